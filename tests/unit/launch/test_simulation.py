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
from launch.simulation import Costs, RulePool, Setting, Simulation, Work, drawn_rewards, simulate

chance = random.Random(3)
SKEWED = tuple(chance.lognormvariate(2, 0.8) for _ in range(400))
"""Seconds: one in a hundred takes six times as long as the median."""


def outcome(work=(10.0,), staleness=1, size=4, train=1.0, groups=4, servers=1, steps=60, **costs):
    rules = costs.pop("rules", None) or Rules(size, staleness)
    decoded = costs.pop("decoded", groups)
    given = {"contention": 0.0, "send": 0.0, "load": 0.0, "pause": 0.0, **costs}
    if not isinstance(given["load"], tuple):
        given["load"] = (given["load"],)
    setting = Setting(servers, groups, decoded, rules, 10**6)
    return simulate(Costs(work=tuple(work), train=train, **given), setting, steps)


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


def waves(load, **costs):
    """Two groups of 4 s at a time, two such waves a batch: batch i is done at 8 (i + 1), of waves that began
    at 8 i and 8 i + 4. Training takes 3 s and sending 0.5, so version i + 1 is there at 8 (i + 1) + 3.5 +
    load: 0.5 s less the load before the second wave of batch i + 1 begins."""
    costs = {"work": (4.0,), "groups": 2, **costs}
    return outcome(staleness=4, train=0.75, send=0.5, load=load, **costs)


def test_a_group_is_of_the_version_that_was_loaded_when_it_began():
    assert waves(load=0.25).staleness_mean == 0.5, "the second wave is on policy, the first one behind"
    assert waves(load=1.0).staleness_mean == 1, "the version comes when the second wave has begun"
    assert waves(load=0.25).groups_per_second == waves(load=1.0).groups_per_second == 0.5


def test_of_loads_that_differ_each_version_draws_one():
    mixed = waves(load=(0.25, 1.0), steps=400)
    assert mixed.staleness_mean == pytest.approx(0.75, abs=0.05)
    assert mixed.staleness_max == 1


def test_a_group_that_waits_for_the_engine_is_of_the_version_at_its_first_token():
    """Twice as many leases, none of which begins any earlier."""
    queued = waves(load=0.25, groups=4, decoded=2)
    assert queued.staleness_mean == 0.5, "counted from the lease it would be 1"
    assert queued.groups_per_second == 0.5
    assert queued.server_idle == 0


def test_groups_of_one_length_stay_abreast_at_any_pace():
    """A wave takes 3.6 or 4.4 s, the first of a batch never less than the 3.5 until the version is there."""
    paced = waves(load=0.0, pace=(0.9, 1.1), steps=400)
    assert paced.staleness_mean == 0.5
    assert paced.groups_per_second == pytest.approx(0.5, rel=0.01)
    scattered = waves(load=0.0, work=(3.6, 4.4), steps=400)
    assert scattered.staleness_mean > 0.6, "each on its own, they begin at any moment"


def test_what_a_batch_costs_at_any_size_is_halved_by_one_of_twice_the_size():
    for size, seconds in ((4, 4 * 0.5 + 2), (8, 8 * 0.5 + 2)):
        made = outcome(work=(0.5,), size=size, groups=20, train=0.5, step=2.0)
        assert made.groups_per_second == pytest.approx(size / seconds, rel=0.01)


class Ticks:
    """The same pipeline a second at a time, every group looked at in each: slow, and nothing to get wrong.
    Durations are whole seconds; what happens in one happens in the simulation's order."""

    def __init__(self, costs: Costs, setting: Setting, pool: RulePool) -> None:
        self.costs, self.setting, self.pool = costs, setting, pool
        self.hands: list[list[Work]] = [[] for _ in range(setting.servers)]
        self.left: dict[int, float] = {}
        self.version = self.index = self.now = 0
        self.paused = self.loads_at = -1
        self.does, self.until = "waits", 0
        self.ages: list[int] = []

    def run(self, batches: int) -> list[int]:
        self.pool.published(0)
        self.look()
        while self.index < batches:
            self.now += 1
            if self.now > self.paused:
                for group in (g for hand in self.hands for g in hand if g.started >= 0):
                    self.left[group.lease] -= 1
            if self.now == self.loads_at:
                self.version, self.loads_at, self.paused = self.sent, -1, self.now + self.costs.pause
                self.pool.published(self.version)
                self.look()
            for hand in self.hands:
                while done := [g for g in hand if self.left.get(g.lease) == 0]:
                    hand.remove(done[0])
                    self.pool.deliver(done[0])
                    self.look()
            self.learn()
        return self.ages[: batches * self.setting.rules.groups_per_batch]

    def look(self) -> None:
        """Places are filled, waiting groups begin, and the learner asks."""
        self.fill()
        if self.does == "waits" and (batch := self.pool.batch(self.index)) is not None:
            self.ages += [self.index - group.started for group in batch]
            self.does, self.until = "trains", self.now + self.costs.train * len(batch) + self.costs.step
            self.fill()

    def fill(self) -> None:
        while True:
            self.begin()
            hand = min(self.hands, key=len)
            if len(hand) == self.setting.max_groups or not (leases := self.pool.lease(1)):
                return
            hand += leases

    def begin(self) -> None:
        for group in (g for hand in self.hands for g in hand[: self.setting.decoded] if g.started < 0):
            group.started, self.left[group.lease] = self.version, group.work

    def learn(self) -> None:
        if self.does == "trains" and self.now >= self.until:
            self.does = "settles"
        if self.does == "settles" and self.loads_at < 0 and self.now >= self.paused:
            self.does, self.until = "sends", self.now + self.costs.send
        if self.does == "sends" and self.now == self.until:
            self.index, self.does = self.index + 1, "waits"
            self.sent, self.loads_at = self.index, self.now + self.costs.load[0]
            self.look()


@pytest.mark.parametrize("seed", range(12))
def test_every_group_is_as_old_as_when_each_second_is_gone_through(seed):
    chance = random.Random(seed)
    costs = Costs(
        work=tuple(float(chance.randint(3, 12)) for _ in range(5)), contention=0.0,
        train=chance.randint(1, 3), send=chance.randint(1, 2), load=(chance.randint(1, 6),),
        pause=chance.randint(0, 3), step=chance.randint(0, 3),
    )  # fmt: skip
    rules = Rules(chance.randint(2, 6), chance.randint(0, 4))
    setting = Setting(chance.randint(1, 3), chance.randint(2, 6), chance.randint(1, 4), rules, 10**6)
    fast, slow = (RulePool(rules, 10**6, costs.work, seed) for _ in range(2))
    made = Simulation(costs, setting, fast)
    made.run(steps=40, warm_up=0)
    assert made.ages == Ticks(costs, setting, slow).run(40)


class StorePool:
    """The real store, fed as the simulation says; durations and rewards come from the same seed as in
    `RulePool`."""

    def __init__(self, config: BufferConfig, work, seed: int = 1) -> None:
        queue = PromptQueue([{"prompt": str(i)} for i in range(100_000)], seed=1, epochs=1, shuffle=False)
        self.store = Store(None, "simulated", config, Sources(queue, [], None, seed), lambda: 0.0)
        self._chance, self._work, self._costs = random.Random(seed), work, {}
        self._luck = random.Random(seed)
        self._draws = config.policy == "priority"
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
        sampled = np.array([0, 1], np.int32)
        mask, logprobs = sampled.astype(np.uint8), -sampled.astype(np.float32)
        rewards = drawn_rewards(self._luck) if self._draws else [1.0]
        made = tuple(
            Trajectory(i, sampled, mask, logprobs, sampled * group.started, r, {}, "stop")
            for i, r in enumerate(rewards)
        )
        whole = Group(name, lease.lease_id, lease.prompt.prompt_id, "train", made)
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
        (1, {"policy": "priority"}),
        (1, {"policy": "fifo", "max_uses": 2}),
    ],
)
def test_under_skewed_durations_the_real_store_evicts_nothing_and_prefers_no_length(rules, servers):
    """`freshest`, which waits for nobody, shows what the others are spared."""
    config = BufferConfig(groups_per_batch=4, max_staleness=2, **rules)
    costs = Costs(
        SKEWED, contention=0.2, train=0.5, send=0.3, load=(0.2, 0.6), pause=0.1, step=0.1, pace=(0.9, 1.1)
    )
    setting = Setting(servers, 12, 9, config.rules, config.capacity)
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


def test_a_batch_takes_the_groups_of_the_highest_priorities():
    """Of those in flight none has its last turn."""
    pool = RulePool(Rules(2, 4, "priority"), 100, [1.0], 1)
    pool.published(0)
    leases = pool.lease(6)
    for lease in leases:
        lease.started = 0
        pool.deliver(lease)
    ranked = sorted(leases, key=lambda lease: -lease.priority)
    assert ranked != leases
    assert len({lease.priority for lease in leases}) > 2
    assert pool.batch(0) == ranked[:2]


def test_a_batch_does_not_wait_for_a_last_turn_that_it_has_no_room_for():
    pool = RulePool(Rules(2, 1), 100, [1.0], 1)
    pool.published(0)
    leases = pool.lease(4)
    for lease in leases[:3]:
        lease.started = 0
        pool.deliver(lease)
    assert pool.batch(1) == leases[:2], "all four may be in no later one"


def test_a_batch_waits_for_a_last_turn_that_it_has_room_for():
    pool = RulePool(Rules(2, 1), 100, [1.0], 1)
    pool.published(0)
    oldest = pool.lease(1)
    pool.published(1)
    younger = pool.lease(3)
    for lease in younger:
        lease.started = 1
        pool.deliver(lease)
    assert pool.batch(1) is None
    oldest[0].started = 0
    pool.deliver(oldest[0])
    assert pool.batch(1) == [oldest[0], younger[0]]
