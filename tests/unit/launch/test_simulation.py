"""The simulation against closed forms, and over the real store."""

import random

import numpy as np
import pytest

from buffer.config import BufferConfig
from buffer.groups import decode_delivery, encode_group
from buffer.prompts import PromptQueue
from buffer.records import Group, Trajectory
from buffer.staleness import Rules
from buffer.store import Sources, Store
from launch.simulation import Costs, RulePool, Setting, Simulation, Work, simulate

chance = random.Random(3)
SKEWED = tuple(chance.lognormvariate(2, 0.8) for _ in range(400))
"""Seconds: one in a hundred takes six times as long as the median."""


def outcome(work=(10.0,), staleness=1, size=4, train=1.0, groups=4, servers=1, steps=60, **costs):
    rules = costs.pop("rules", None) or Rules(size, staleness)
    given = {"contention": 0.0, "send": 0.0, "load": 0.0, "pause": 0.0, **costs}
    return simulate(
        Costs(work=tuple(work), train=train, **given), Setting(servers, groups, rules, 10**6), steps
    )


def test_synchronous_steps_take_generation_and_training_one_after_the_other():
    made = outcome(staleness=0, send=0.5, load=0.25)
    assert made.groups_per_second == pytest.approx(4 / (10 + 4 * 1.0 + 0.5 + 0.25))
    assert made.learner_idle == pytest.approx((10 + 0.25) / 14.75)
    assert (made.staleness_mean, made.staleness_max) == (0, 0)


@pytest.mark.parametrize("train", [1.0, 2.5, 6.0])
def test_asynchronous_steps_take_the_longer_of_the_two(train):
    made = outcome(staleness=1, train=train)
    assert made.groups_per_second == pytest.approx(4 / max(10, 4 * train), rel=0.01)


def test_more_versions_and_more_servers_help_as_far_as_the_learner_goes():
    assert outcome(staleness=2, groups=8).groups_per_second == pytest.approx(4 / 5, rel=0.03)
    assert outcome(staleness=2, groups=4, servers=2).groups_per_second == pytest.approx(4 / 5, rel=0.03)
    assert outcome(staleness=9, groups=4, servers=9).groups_per_second == pytest.approx(4 / 4, rel=0.03)


def test_a_shared_server_makes_one_group_after_the_other_in_the_mean():
    """Four groups in hand under full contention take four times as long as one."""
    alone = outcome(staleness=1, groups=1, train=0.1).groups_per_second
    shared = outcome(staleness=1, groups=4, train=0.1, contention=1.0).groups_per_second
    assert alone == pytest.approx(shared, rel=0.02) == pytest.approx(0.1, rel=0.02)


def test_servers_stand_still_while_they_are_paused():
    # Sixteen seconds of work, two of pause in each: the load falls into a group's time.
    made = outcome(work=(16.0,), staleness=1, train=0.1, pause=2.0, load=0.1)
    assert made.groups_per_second == pytest.approx(4 / 18, rel=0.02)


def test_a_version_is_sent_when_the_one_before_is_loaded():
    made = outcome(work=(0.5,), staleness=4, groups=20, train=0.1, send=0.5, load=3.0)
    assert made.groups_per_second == pytest.approx(4 / (3.0 + 0.5), rel=0.02)


class StorePool:
    """The real store, fed as the simulation says; durations come from the same seed as in `RulePool`."""

    def __init__(self, config: BufferConfig, work, seed: int = 1) -> None:
        queue = PromptQueue([{"prompt": str(i)} for i in range(100_000)], seed=1, epochs=1, shuffle=False)
        self.store = Store(None, "simulated", config, Sources(queue, [], None, seed), lambda: 0.0)
        self._chance, self._work, self._costs = random.Random(seed), work, {}
        self._held, self._groups = {}, {}
        self._requests = self._turns = 0

    def _do(self, call):
        with self.store.transaction():
            return call(self.store)

    def lease(self, limit: int) -> list[Work]:
        self._requests += 1
        leases = self._do(lambda s: s.lease("server", f"r{self._requests}", limit))
        return [self._held_as(lease) for lease in leases]

    def _held_as(self, lease) -> Work:
        prompt = lease.prompt.prompt_id
        if prompt not in self._costs:
            self._costs[prompt] = self._chance.choice(self._work)
        group = Work(self._turns, lease.version, self._costs[prompt])
        self._held[self._turns] = lease
        self._turns += 1
        return group

    def deliver(self, group: Work) -> None:
        lease = self._held.pop(group.lease)
        name = f"g{group.lease}"
        self._groups[name] = group
        one = np.ones(1, np.int32)
        made = Trajectory(
            0, one, one.astype(np.uint8), -one.astype(np.float32), one * group.started, 1.0, {}, "stop"
        )
        whole = Group(name, lease.lease_id, lease.prompt.prompt_id, "train", (made,))
        assert self._do(lambda s: s.deliver(decode_delivery(*encode_group(whole))))

    def batch(self, index: int) -> list[Work] | None:
        if self._do(lambda s: s.batch(index)) is None:
            return None
        names = self.store.database.run(
            "SELECT group_id FROM members JOIN groups USING (sequence) WHERE batch = ? ORDER BY place", index
        )
        return [self._groups[name] for (name,) in names]

    def published(self, version: int) -> None:
        self._do(lambda s: s.published(version))

    def evicted(self) -> int:
        return self.store.status()["evicted"]


@pytest.mark.parametrize(
    ("servers", "rules"),
    [
        (1, {"policy": "fifo"}),
        (3, {"policy": "fifo"}),
        (1, {"policy": "freshest"}),
        (1, {"policy": "uniform"}),
        (1, {"policy": "fifo", "max_uses": 2}),
    ],
)
def test_under_skewed_durations_the_real_store_evicts_nothing_and_prefers_no_length(rules, servers):
    """`freshest`, which waits for nobody, shows what the others are spared."""
    config = BufferConfig(groups_per_batch=4, max_staleness=2, **rules)
    costs = Costs(SKEWED, contention=0.2, train=0.5, send=0.3, load=0.4, pause=0.1)
    setting = Setting(servers, 12, config.rules, config.capacity)
    real = Simulation(costs, setting, StorePool(config, SKEWED))
    made = real.run(steps=80, warm_up=10)
    assert made.staleness_max <= 2
    told = Simulation(costs, setting, RulePool(config.rules, config.capacity, SKEWED, 1)).run(80, 10)
    if rules["policy"] == "freshest":
        assert made.evicted > 0.1
        assert made.work_trained < 0.8, "the long ones run out, again and again"
    else:
        assert made.evicted == 0
        # What took long is young for fewer batches, so it is used again less often.
        assert made.work_trained == pytest.approx(1 if config.max_uses == 1 else 0.93, abs=0.04)
        assert told == made, "the simulation's own rules do as the store does"


@pytest.mark.parametrize("policy", ["fifo", "freshest", "priority", "uniform"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_no_setting_goes_beyond_the_bound(policy, staleness):
    if policy in ("priority", "uniform") and staleness < 2:
        return
    for servers, size in ((1, 3), (4, 2)):
        rules = Rules(size, staleness, policy)
        made = outcome(SKEWED, rules=rules, servers=servers, groups=9, load=3.0, pause=1.0, steps=30)
        assert made.staleness_max <= staleness
        assert 0 <= made.learner_idle <= 1
        assert 0 <= made.server_idle <= 1
