"""A group that is still being generated when its last batch is made."""

import pytest

from buffer.errors import BadMessage


def overtaken(bench, group, **rules):
    """Two leases of version 0, one of them slow; the learner asks for the last batch that may train them."""
    b = bench(rows=40, **{"groups_per_batch": 2, "max_staleness": 1, "lease_timeout_s": 40.0, **rules})
    b.do(lambda s: s.published(0))
    slow, *others = b.lease(4)
    for lease in others:
        b.deliver(group(lease))
    assert b.batch(0) is not None
    b.do(lambda s: s.published(1))
    for lease in b.lease(2):
        b.deliver(group(lease, versions=(1,)))
    return b, slow


@pytest.mark.parametrize("policy", ["fifo", "priority", "uniform"])
def test_the_batch_waits_for_it_and_nothing_is_evicted(bench, group, policy):
    rules = {} if policy == "fifo" else {"max_staleness": 2}
    b, slow = overtaken(bench, group, policy=policy, **rules)
    index = 1
    while (found := b.batch(index)) is not None:  # under a longer bound there is time yet
        index += 1
        b.do(lambda s, v=index: s.published(v))
        for lease in b.lease(4):
            b.deliver(group(lease, versions=(lease.version,)))
    assert found is None
    assert index == b.config.max_staleness
    assert b.store.status()["overdue"] == 1
    b.deliver(group(slow))
    assert b.batch(index) is not None
    assert slow.prompt.prompt_id in b.prompts_of(index)
    assert b.store.status()["evicted"] == b.store.status()["overdue"] == 0


def test_freshest_does_not_wait(bench, group):
    b, slow = overtaken(bench, group, policy="freshest")
    assert b.batch(1) is not None
    b.do(lambda s: s.published(2))
    b.deliver(group(slow))
    b.batch(2)
    assert b.ledger()[slow.prompt.prompt_id] == "queued"
    assert b.store.status()["evicted"] > 0


def test_nobody_waits_for_a_server_that_is_silent(bench, group):
    b, slow = overtaken(bench, group)
    b.now = 14.0
    assert b.batch(1) is None
    b.do(lambda s: s.renew([slow.lease_id]))
    b.now = 28.0
    assert b.batch(1) is None
    b.now = 29.5
    assert b.batch(1) is not None


def test_a_lease_that_ends_wakes_who_waits_for_a_batch(bench, group):
    b, slow = overtaken(bench, group)
    b.store.take_changes()
    b.do(lambda s: s.give_up(slow.lease_id, "reward", True))
    assert b.store.take_changes() == (True, True)
    assert b.batch(1) is not None

    b, _ = overtaken(bench, group)
    b.store.take_changes()
    b.now = 41.0
    b.do(lambda s: s.expire())
    assert b.store.take_changes()[1]


def by_seven(rewards, metadata):
    return 7 * max(rewards)


def refusing(rewards, metadata):
    raise KeyError("hardness")


def test_the_store_takes_what_the_users_function_wants_most(bench, group):
    b = bench(rows=40, policy="priority", priority=f"{__name__}:by_seven", max_staleness=2)
    b.do(lambda s: s.published(0))
    leases = b.lease(4)
    for lease, reward in zip(leases, (0.1, 0.5, 0.3, 0.4), strict=True):
        b.deliver(group(lease, rewards=(0.0, reward)))
    b.batch(0)
    assert b.prompts_of(0) == [leases[1].prompt.prompt_id, leases[3].prompt.prompt_id]


def test_a_function_that_fails_refuses_the_group_and_changes_nothing(bench, group):
    b = bench(rows=40, policy="priority", priority=f"{__name__}:refusing", max_staleness=2)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    with pytest.raises(BadMessage, match="raised KeyError"):
        b.deliver(group(lease))
    assert b.ledger()[lease.prompt.prompt_id] == "leased"


def test_a_priority_that_is_not_there_is_told_at_the_start(bench):
    with pytest.raises(ValueError, match="cannot be imported"):
        bench(policy="priority", priority="nowhere:f", max_staleness=2)
