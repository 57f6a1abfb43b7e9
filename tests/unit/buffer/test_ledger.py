"""A random walk over the store beside a slow oracle: nothing is lost or doubled, nothing stale is trained."""

import collections
import random
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer import service
from buffer.errors import DataExhausted
from buffer.groups import decode_delivery, encode_group
from buffer.ledger import MOST_EQUAL, MOST_FRUITLESS

ROWS, BATCH = 7, 2
RULES = [
    {"policy": "fifo", "max_staleness": 1},
    {"policy": "freshest", "max_staleness": 1},
    {"policy": "priority", "max_staleness": 2},
    {"policy": "uniform", "max_staleness": 3, "max_uses": 2},
    {"policy": "fifo", "max_staleness": 2, "max_uses": 3},
]
STEPS = (
    "lease",
    "deliver",
    "deliver",
    "late",
    "twice",
    "fail",
    "time",
    "batch",
    "publish",
    "commit",
    "restart",
)


@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"{r['policy']}-{r.get('max_uses', 1)}")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=20, max_size=120), seed=st.integers(0, 1000))
def test_every_prompt_is_accounted_for_and_no_stale_token_is_trained(bench, group, rules, steps, seed):
    b = bench(rows=ROWS, epochs=2, groups_per_batch=BATCH, **rules)
    # What a crash of the machine would cost is not the walk's question; without its fsyncs it goes further.
    b.store.database.run("PRAGMA synchronous = OFF")
    b.do(lambda s: s.published(0))
    walk = Walk(b, group, random.Random(seed))
    for step in steps:
        walk.step(step)
        walk.check()


class Walk:
    """The oracle keeps its own books: versions are numbers it chose, batches are lists it saw."""

    def __init__(self, b, group, chance):
        self.b, self.group, self.chance = b, group, chance
        self.held, self.delivered, self.batches = [], [], []
        self.version = 0
        self.oldest = {}
        self.committed = 0
        self.exhausted = False
        self.staleness = b.config.max_staleness
        self.uses = b.config.max_uses

    def step(self, name):
        getattr(self, name)()

    def lease(self):
        before = self.b.store.stock()
        leases = self.b.lease(self.chance.randint(1, 4))
        self.held += leases
        ahead = {"priority": 1, "uniform": 2}.get(self.b.config.policy, self.staleness)
        fresh = -(-BATCH // self.uses)
        room = (ahead + self.version + 1 - len(self.batches)) * fresh
        assert before.leased + before.stored + len(leases) <= max(room, before.leased + before.stored)

    def deliver(self):
        if not self.held:
            return
        lease = self.held.pop(self.chance.randrange(len(self.held)))
        oldest = self.chance.randint(min(lease.version, self.version), self.version)
        made = self.group(lease, versions=(oldest, self.version))
        if self.b.deliver(made):
            self.oldest[made.group_id] = oldest
        self.delivered.append(made)

    def late(self):
        self.b.now += 11
        self.b.do(lambda s: s.expire())
        self.deliver()

    def twice(self):
        if self.delivered:
            assert not self.b.deliver(self.chance.choice(self.delivered))

    def fail(self):
        if self.held:
            lease = self.held.pop()
            self.b.do(lambda s: s.give_up(lease.lease_id, "made", self.chance.random() < 0.8))

    def time(self):
        self.b.now += 6
        self.b.do(lambda s: s.expire())

    def batch(self):
        index = len(self.batches)
        with self.b.store.transaction():
            try:
                found = self.b.store.batch(index)
            except DataExhausted:
                self.exhausted = True
                return
        if found is None:
            return
        rows = self.b.store.database.run(
            "SELECT prompt_id, group_id FROM members JOIN groups USING (sequence) "
            "WHERE batch = ? ORDER BY place",
            index,
        ).fetchall()
        assert len(rows) == len(set(rows)) == BATCH, "full, and no group twice in it"
        for _, group_id in rows:
            assert index - self.oldest[group_id] <= self.staleness
        self.batches.append((found, rows))

    def publish(self):
        if self.version < len(self.batches):
            self.version += 1
            self.b.do(lambda s: s.published(self.version))

    def commit(self):
        self.committed = max(self.committed, self.chance.randint(0, self.version))
        self.b.do(lambda s: s.committed(self.committed))

    def restart(self):
        self.b.reopen()
        self.b.store.database.run("PRAGMA synchronous = OFF")
        for index in range(self.committed, len(self.batches)):
            assert self.b.batch(index) == self.batches[index][0]

    def check(self):
        trained = collections.Counter(p for _, rows in self.batches for p, _ in rows)
        assert max(trained.values(), default=0) <= self.uses, "a prompt is in max_uses batches at most"
        assert len({g for _, rows in self.batches for _, g in rows}) == len(trained), "by one group of it"
        assert self.b.store.status()["reused"] == trained.total() - len(trained)
        states = self.b.ledger()
        epoch, position = self.b.store.ledger.place()
        assert set(states) == {f"{e}/{r}" for e in range(epoch) for r in range(ROWS)} | {
            f"{epoch}/{r}" for r in range(position)
        }
        assert {p for p, s in states.items() if s in ("batched", "trained")} == set(trained)
        stored = {
            p
            for (p,) in self.b.store.database.run(
                "SELECT prompt_id FROM groups WHERE state = 'stored' AND uses = 0"
            )
        }
        leased = {p for (p,) in self.b.store.database.run("SELECT prompt_id FROM leases")}
        assert {p for p, s in states.items() if s == "stored"} == stored
        assert {p for p, s in states.items() if s == "leased"} == leased
        dropped = sum(s == "dropped" for s in states.values())
        assert dropped == sum(self.b.store.status()["dropped"].values())
        kept = {q for (q,) in self.b.store.database.run("SELECT sequence FROM payloads")}
        live = self.b.store.database.run("SELECT sequence FROM groups WHERE state IN ('stored', 'batched')")
        assert kept == {q for (q,) in live}, (
            "payloads are kept for exactly the groups that can still be asked for"
        )


def dropped(b, count, reason="reward_raised", requeue=True):
    """So many prompts in a row, each given up until it is dropped."""
    with b.store.transaction():
        while count:
            (lease,) = b.store.lease("server-0", uuid.uuid4().hex, 1)
            outcome = b.store.give_up(lease.lease_id, reason, requeue)
            count -= not outcome.queued


@pytest.mark.parametrize("epochs", [None, 1])
def test_prompts_that_all_fail_are_hopeless_after_a_bounded_number(bench, group, epochs):
    b = bench(rows=3 * MOST_FRUITLESS, epochs=epochs)
    b.do(lambda s: s.published(0))
    dropped(b, MOST_FRUITLESS - 1)
    assert not b.store.status()["hopeless"]
    b.deliver(group(b.lease(1)[0]))
    dropped(b, MOST_FRUITLESS - 1)
    assert not b.store.status()["hopeless"], "a group came in between"
    dropped(b, 1)
    assert b.store.status()["hopeless"]
    b.reopen()
    assert not b.store.status()["hopeless"], "what did not work may have been mended"


def test_rows_that_can_never_be_sampled_are_hopeless_after_a_whole_pass_of_them(bench):
    """Fewer in a row may well be too long: rows come in the order of their lengths in some files."""
    b = bench(rows=MOST_FRUITLESS + 9, epochs=None)
    b.do(lambda s: s.published(0))
    dropped(b, MOST_FRUITLESS + 8, "too_long", requeue=False)
    assert not b.store.status()["hopeless"]
    dropped(b, 1, "too_long", requeue=False)
    assert b.store.status()["hopeless"]


def test_groups_that_are_all_dropped_as_equal_are_hopeless_after_a_bounded_number(bench, group, caplog):
    b = bench(rows=9, epochs=None, dynamic_sampling=True)
    b.do(lambda s: s.published(0))

    def come(count, rewards):
        with b.store.transaction():
            for _ in range(count):
                (lease,) = b.store.lease("server-0", uuid.uuid4().hex, 1)
                assert b.store.deliver(decode_delivery(*encode_group(group(lease, rewards=rewards))))

    come(MOST_EQUAL - 1, (0.5, 0.5))
    assert "rewarded alike (0.5 to 0.5): 1024 in a row end the buffer" in caplog.text
    come(1, (1.0, 0.0))
    come(MOST_EQUAL - 1, (0.0, 0.0))
    assert not b.store.status()["hopeless"], "one in between told its completions apart"
    come(1, (1.0, 1.0))
    status = b.store.status()
    assert status["hopeless"]
    told = service.fruitless(status)
    assert told.startswith("the completions of each of the last 1024 groups were all rewarded alike (0 to 1)")
    assert "\n" not in told
    b.reopen()
    assert not b.store.status()["hopeless"], "the reward may have been mended"


def test_equal_rewards_end_nothing_where_such_groups_are_trained(bench, group):
    b = bench(rows=9, epochs=None)
    b.do(lambda s: s.published(0))
    b.deliver(group(b.lease(1)[0], rewards=(0.0, 0.0)))
    assert b.store.status()["equal"] == 0
