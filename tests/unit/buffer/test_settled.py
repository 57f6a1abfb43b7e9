"""The store of a long run stays small, and still tells of everything that was in it."""

import json

import pytest

from buffer import settled
from buffer.inspection import inspect

KEPT = 20
TABLES = ("prompts", "groups", "members", "leases", "payloads", "eval_groups")


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(settled, "KEPT", KEPT)


def train(b, group, batches, first=0):
    """Batches assembled, trained and confirmed one by one; delivered groups, in order."""
    b.store.database.run("PRAGMA synchronous = OFF")  # nobody pulls the plug here
    made = []
    for index in range(first, first + batches):
        b.do(lambda s, index=index: s.published(index))
        while (batch := b.batch(index)) is None:
            for lease in b.lease(4):
                made.append(group(lease, group_id=f"g{len(made)}-{index}"))
                assert b.deliver(made[-1])
        assert batch.index == index
        b.do(lambda s, index=index: s.committed(index))
    return made


def rows(b):
    return {name: b.store.database.one(f"SELECT count(*) FROM {name}") for name in TABLES}


def test_rows_do_not_grow_with_the_run(bench, group):
    b = bench(rows=10, epochs=None, eval_rows=3, eval_every=2)
    train(b, group, 40)
    before, told = rows(b), len(json.dumps(b.store.status()))
    train(b, group, 160, first=40)
    after = rows(b)
    assert len(json.dumps(b.store.status())) < 1.1 * told, "a line of metrics"
    for name in TABLES:
        assert after[name] <= max(before[name], KEPT + 8), (name, before, after)


def test_what_is_settled_is_still_told(bench, group):
    b, other = (bench(rows=10, epochs=None) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled, "KEPT", 10**6)
        train(other, group, 100)
    train(b, group, 100)
    few, all_of_it = inspect(b.folder), inspect(other.folder)
    assert rows(b)["groups"] < rows(other)["groups"] / 4
    for name in ("prompts", "groups", "staleness", "uses", "dropped", "counters"):
        assert few[name] == all_of_it[name], name
    assert sum(few["groups"].values()) >= 200


def test_what_is_dropped_and_evicted_is_settled_too(bench, group):
    b = bench(rows=1000, dynamic_sampling=True, max_staleness=1)
    b.do(lambda s: s.published(0))
    for i in range(50):
        (lease,) = b.lease(1)
        assert b.deliver(group(lease, group_id=f"equal-{i}", rewards=(1.0, 1.0)))
    for lease in b.lease(3):
        b.do(lambda s, lease=lease: s.give_up(lease.lease_id, "too_long", False))
    b.do(lambda s: s.committed(0))
    assert rows(b)["groups"] == KEPT
    assert rows(b)["prompts"] <= KEPT + 1
    seen = inspect(b.folder)
    assert seen["groups"] == {"dropped": 50}
    assert seen["prompts"] == {0: {"dropped": 53}}
    assert seen["dropped"] == {"zero_variance": 50, "too_long": 3}


def test_what_a_resume_may_ask_for_stays(bench, group):
    """Without a checkpoint nothing is settled, however long ago it was trained."""
    b = bench(rows=10, epochs=None)
    for index in range(40):
        b.do(lambda s, index=index: s.published(index))
        while b.batch(index) is None:
            for lease in b.lease(4):
                assert b.deliver(group(lease))
        b.do(lambda s: s.committed(0))
    b.reopen()
    for index in range(40):
        assert len(b.batch(index).sequences) == 2
        assert len(b.prompts_of(index)) == 2


def test_a_group_that_comes_again_after_its_rows_went_is_nobodys(bench, group):
    b = bench(rows=10, epochs=None)
    first = train(b, group, 1)[0]
    assert not b.deliver(first)
    assert b.store.database.counters()["duplicates"] == 1
    train(b, group, 40, first=1)
    assert not b.deliver(first)
    counters = b.store.database.counters()
    assert (counters["duplicates"], counters["orphans"]) == (1, 1)
    assert inspect(b.folder)["groups"]["trained"] >= 78


def test_evaluations_leave_their_scores_only(bench, group):
    b = bench(rows=4, epochs=None, eval_rows=3, eval_every=1)
    b.do(lambda s: s.published(0))
    leases = b.lease(8)
    evaluated = [group(lease) for lease in leases if lease.kind == "eval"]
    assert len(evaluated) == 3
    for made in evaluated:
        assert b.deliver(made)
    assert rows(b)["eval_groups"] == 0
    assert inspect(b.folder)["evaluations"][0]["score"] == 0.5
    assert len((b.folder / "eval.jsonl").read_text().splitlines()) == 3 * 2 + 1
    assert not b.deliver(evaluated[0]), "and a second time is no second score"
