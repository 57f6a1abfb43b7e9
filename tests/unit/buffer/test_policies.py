import itertools
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buffer.config import BufferConfig
from buffer.errors import BadMessage
from buffer.policies import choose, priority
from buffer.staleness import Candidate, Rules

POLICIES = ("fifo", "freshest", "priority", "uniform")
GROUPS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 1), st.floats(0, 1)), max_size=20
)


def candidates(stored):
    return [Candidate(i, *facts) for i, facts in enumerate(stored)]


@given(GROUPS, st.lists(st.integers(0, 9), max_size=8), st.integers(1, 6), st.integers(0, 9))
@example(stored=[(0, 0, 0, 0.0)], leased=[], count=1, index=3)  # one version too old, which chance may miss
def test_no_choice_is_too_old_or_holds_a_group_twice(stored, leased, count, index):
    young = sum(index - oldest <= 2 for _, oldest, _, _ in stored)
    for policy in POLICIES:
        chosen = choose(candidates(stored), leased, index, Rules(count, 2, policy, 2), 1)
        assert len(chosen) in (0, count)
        assert len({c.sequence for c in chosen}) == len(chosen)
        assert all(index - c.oldest_version <= 2 for c in chosen)
        if policy == "freshest" or not leased:
            assert bool(chosen) == (young >= count)


@given(GROUPS, st.integers(1, 4), st.integers(0, 9))
def test_a_batch_takes_the_most_wanted_that_leave_no_other_without_a_place(stored, count, index):
    """The oracle tries every batch: the best by the policy's order among those after which each group that is
    left still finds a place in a later batch that may train it."""
    rules = Rules(count, 2, "priority", 2)
    young = [c for c in candidates(stored[:9]) if index - c.oldest_version <= 2]
    ranked = sorted(young, key=lambda c: (-c.priority, c.uses, c.turn, c.sequence))

    def places_left(left):
        last = sorted(c.oldest_version + 2 for c in left if not c.uses)
        return all(d > index + place // count for place, d in enumerate(last))

    feasible = [
        b for b in itertools.combinations(ranked, count) if places_left([c for c in young if c not in b])
    ]
    if feasible:
        best = min(feasible, key=lambda b: [ranked.index(c) for c in b])
        assert choose(young, [], index, rules, 1) == list(best)


def test_a_batch_waits_for_a_lease_that_no_later_one_may_train():
    stored = [Candidate(i, turn, 1) for i, turn in enumerate((1, 2, 3))]
    rules = Rules(2, 2)
    assert choose(stored, [0], 2, rules, 1) == []
    assert choose(stored, [0], 2, Rules(2, 2, "freshest"), 1) == stored[:2]
    late = Candidate(9, 0, 0)
    assert choose([*stored, late], [], 2, rules, 1) == [late, stored[0]]
    assert choose(stored, [-1], 2, rules, 1) == stored[:2], "too late already: nothing to wait for"


def test_a_batch_waits_for_leases_that_the_next_one_could_not_hold_together():
    stored = [Candidate(i, 5 + i, 2) for i in range(2)]
    assert choose(stored, [1], 2, Rules(2, 2), 1) == stored, "batch 3 has room for it"
    assert choose(stored, [1, 1, 1], 2, Rules(2, 2), 1) == [], "batch 3 has room for two of the three"


def test_priority_takes_the_highest_and_keeps_the_turns():
    stored = [Candidate(i, i, 2, priority=p) for i, p in enumerate((0.1, 0.5, 0.3, 0.4))]
    rules = Rules(2, 2, "priority")
    assert [c.sequence for c in choose(stored, [], 2, rules, 1)] == [1, 3]
    last_turn = Candidate(7, 0, 0, priority=0.0)
    assert [c.sequence for c in choose([*stored, last_turn], [], 2, rules, 1)] == [1, 7]


def test_uniform_draws_by_seed_and_index_alone_and_evenly():
    stored = [Candidate(i, i, 5) for i in range(6)]
    rules = Rules(2, 4, "uniform")

    def drawn(seed, index):
        return [c.sequence for c in choose(stored, [], index, rules, seed)]

    assert drawn(1, 5) == [c.sequence for c in choose(stored[::-1], [], 5, rules, 1)]
    counts = [0] * 6
    for seed in range(600):
        for sequence in drawn(seed, 5):
            counts[sequence] += 1
    assert all(150 < n < 250 for n in counts)
    assert len({tuple(drawn(1, i)) for i in range(5, 8)}) > 1


def test_used_groups_fill_up_what_fresh_ones_leave():
    used = [Candidate(i, i, 5, uses=1) for i in range(3)]
    fresh = Candidate(8, 8, 5)
    assert choose([*used, fresh], [], 5, Rules(2, 2, "fifo", 2), 1) == [fresh, used[0]]


def group_of(*rewards):
    return SimpleNamespace(trajectories=[SimpleNamespace(reward=r, metadata={"hard": r}) for r in rewards])


def test_the_advantage_of_a_group_is_its_mean_distance_from_its_mean():
    assert priority(group_of(1.0, 1.0, 1.0), "advantage") == 0
    assert priority(group_of(0.0, 0.0, 1.0, 1.0), "advantage") == 0.5
    assert priority(group_of(0.0, 0.0, 0.0, 1.0), "advantage") == pytest.approx((3 * 0.25 + 0.75) / 4)


def spread(rewards, metadata):
    return max(rewards) - min(rewards) + metadata[0]["hard"]


def broken(rewards, metadata):
    return [][0]


def endless(rewards, metadata):
    return float("inf")


def test_a_function_of_the_users_weighs_groups(monkeypatch):
    here = __name__
    assert priority(group_of(2.0, 5.0), f"{here}:spread") == 5.0
    with pytest.raises(BadMessage, match="broken raised IndexError"):
        priority(group_of(1.0), f"{here}:broken")
    with pytest.raises(BadMessage, match="finite"):
        priority(group_of(1.0), f"{here}:endless")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"priority": "advantage"}, "no effect under policy=fifo"),
        (
            {"policy": "priority", "priority": "best"},
            "expected advantage or your own package.module:function",
        ),
        ({"policy": "priority", "max_staleness": 1}, "nothing to choose from"),
        ({"policy": "uniform", "max_staleness": 0}, "nothing to choose from"),
        ({"max_uses": 2, "max_staleness": 0}, "max_uses=2 cannot come about"),
        ({"max_uses": 3, "max_staleness": 2, "policy": "uniform"}, "expected at most 2"),
        ({"max_uses": 2, "capacity": 30}, "below the 36 groups"),
    ],
)
def test_what_cannot_work_is_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        BufferConfig(**settings)
