"""Groups in more than one batch."""

from collections import Counter

import pytest

from buffer.errors import BatchForgotten


def filled(bench, group, **rules):
    """Six groups delivered at version 0, two a batch, each good for three batches."""
    b = bench(rows=40, **{"groups_per_batch": 2, "max_staleness": 3, "max_uses": 3, **rules})
    b.do(lambda s: s.published(0))
    for lease in b.lease(6):
        b.deliver(group(lease))
    return b


def test_a_group_trains_up_to_max_uses_batches_and_is_admitted_as_one(bench, group):
    b = filled(bench, group)
    assert b.store.stock().stored == 4, "four batches of one fresh group each"
    batches = []
    for index in range(4):
        assert b.batch(index) is not None
        batches.append(b.prompts_of(index))
    assert batches[:2] == [["0/0", "0/1"], ["0/2", "0/3"]], "fresh ones first"
    assert batches[2:] == [["0/0", "0/1"], ["0/2", "0/3"]], "then those that were in fewer batches"
    status = b.store.status()
    assert (status["stored"], status["kept"], status["reused"]) == (0, 4, 4)
    assert b.store.stock().kept == 4


@pytest.mark.parametrize("policy", ["fifo", "freshest", "priority", "uniform"])
@pytest.mark.parametrize("fresh", [(2, 0, 0), (2, 1, 1), (2, 2, 2)])
def test_under_every_policy_a_group_is_in_at_most_max_uses_batches_and_young_in_each(
    bench, group, policy, fresh
):
    """As many fresh ones come to a version, and to the two behind it, of which each trains two."""
    b = bench(rows=80, groups_per_batch=2, max_staleness=4, max_uses=3, policy=policy)
    rewards, sampled, batches = ((0.0, 1.0), (0.0, 0.0), (0.0, 0.5)), {}, []
    for version in range(12):
        b.do(lambda s, version=version: s.published(version))
        for number, lease in enumerate(b.lease(fresh[version % 3]) if fresh[version % 3] else []):
            sampled[lease.prompt.prompt_id] = lease.version
            b.deliver(group(lease, rewards=rewards[(version + number) % 3]))
        assert b.batch(version) is not None
        batches.append(b.prompts_of(version))
    uses = Counter(prompt for batch in batches for prompt in batch)
    assert max(uses.values()) <= 3
    assert sum(uses.values()) == 24
    if fresh == (2, 0, 0):
        assert set(uses.values()) == {3}, "there is nothing else to train"
    for index, batch in enumerate(batches):
        assert len(set(batch)) == 2, "no group twice in one"
        assert all(0 <= index - sampled[prompt] <= 4 for prompt in batch)
    status = b.store.status()
    assert (status["evicted"], status["reused"]) == (0, 24 - len(uses))


def test_the_group_of_the_highest_priority_is_used_again_before_a_fresh_one(bench, group):
    b = bench(rows=40, groups_per_batch=1, max_staleness=4, max_uses=3, policy="priority")
    b.do(lambda s: s.published(0))
    first, second = b.lease(2)
    b.deliver(group(first, rewards=(0.0, 1.0)))
    b.deliver(group(second, rewards=(0.0, 0.2)))
    best, other = first.prompt.prompt_id, second.prompt.prompt_id
    assert [b.batch(index) is not None for index in range(4)] == [True] * 4
    assert [b.prompts_of(index) for index in range(4)] == [[best], [best], [best], [other]]


def test_a_used_group_that_is_too_old_is_not_generated_again(bench, group):
    b = filled(bench, group, max_staleness=2)
    assert [b.batch(i) is not None for i in range(3)] == [True] * 3
    b.do(lambda s: s.published(3))
    assert b.batch(3) is None
    status = b.store.status()
    assert status["evicted"] == status["kept"] == 0
    assert set(b.ledger().values()) == {"batched"}


def test_a_payload_stays_until_no_batch_can_ask_for_it(bench, group):
    b = filled(bench, group, max_uses=2)
    found = [b.batch(i) for i in range(3)]
    payloads = "SELECT count(*) FROM payloads"
    b.do(lambda s: s.committed(1))
    with pytest.raises(BatchForgotten):
        b.batch(0)
    assert b.store.database.one(payloads) == 4, "batch 2 holds the groups of batch 0 too, their last use"
    b.reopen()
    assert [b.batch(i) for i in (1, 2)] == found[1:]
    b.do(lambda s: s.committed(3))
    assert b.store.database.one(payloads) == 2, "of the two that batch 1 left a use of"
    assert b.batch(3) is not None
    assert b.batch(4) is None, "used up"
    b.do(lambda s: s.committed(4))
    assert b.store.database.one(payloads) == 0
    assert b.store.status()["trained"] == 4
    assert set(b.ledger().values()) == {"trained"}


def test_kept_groups_take_room_of_the_capacity(bench, group):
    b = filled(bench, group, capacity=20)
    b.batch(0)
    assert b.store.stock().kept == 2
    b.do(lambda s: s.published(17))
    assert len(b.lease(100)) == min(4 - 2, 20 - 4)


def test_the_file_itself_refuses_a_group_twice_in_a_batch(bench, group):
    b = filled(bench, group)
    b.batch(0)
    (sequence,) = b.store.database.run("SELECT sequence FROM members WHERE place = 0").fetchone()
    with pytest.raises(Exception, match="UNIQUE"):
        b.store.database.run("INSERT INTO members VALUES (0, 9, ?)", sequence)
