import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.config import BufferConfig
from buffer.staleness import Rules, Stock, admissible, owed, shard


@given(
    leased=st.integers(0, 100), stored=st.integers(0, 100), kept=st.integers(0, 50),
    assembled=st.integers(0, 50), lag=st.integers(0, 3),
    batch=st.integers(1, 16), staleness=st.integers(0, 5), capacity=st.integers(1, 500),
)  # fmt: skip
def test_admission_never_exceeds_its_inequality(
    leased, stored, kept, assembled, lag, batch, staleness, capacity
):
    published = max(0, assembled - lag)
    stock = Stock(leased, stored, assembled, published, kept)
    room = admissible(stock, Rules(batch, staleness), capacity)
    assert room >= 0
    if room:
        total = leased + stored + room
        assert total + batch * assembled <= (staleness + published + 1) * batch
        assert total + kept <= capacity


def test_synchronous_training_leases_one_batch_and_then_waits_for_its_version():
    rules = Rules(4, 0)
    assert admissible(Stock(0, 0, 0, None), rules, 100) == 0
    assert admissible(Stock(0, 0, 0, 0), rules, 100) == 4
    assert admissible(Stock(0, 0, 1, 0), rules, 100) == 0
    assert admissible(Stock(0, 0, 1, 1), rules, 100) == 4


def test_a_policy_that_passes_groups_over_is_paced_by_half_the_bound():
    assert [Rules(8, s, "uniform").window for s in (2, 3, 4, 5)] == [16, 24, 24, 32]
    assert Rules(8, 4, "fifo").window == Rules(8, 4, "freshest").window == 40


def test_what_is_used_k_times_is_paced_by_a_kth_of_a_batch():
    assert Rules(8, 3, max_uses=2).window == 4 * 4
    assert Rules(8, 3, max_uses=3).window == 4 * 3
    assert admissible(Stock(0, 0, 5, 5), Rules(8, 3, max_uses=2), 1000) == 16
    assert admissible(Stock(0, 0, 6, 5), Rules(8, 3, max_uses=2), 1000) == 12


@pytest.mark.parametrize("staleness", range(6))
@pytest.mark.parametrize("policy", ["fifo", "freshest", "priority", "uniform"])
def test_whatever_the_configuration_admits_can_fill_a_batch_from_nothing(policy, staleness):
    for size, uses in itertools.product((1, 2, 3, 7, 8), (1, 2, 3, 4, 5, 6)):
        try:
            config = BufferConfig(
                groups_per_batch=size, max_staleness=staleness, policy=policy, max_uses=uses, capacity=10**6
            )
        except ValueError:
            continue
        assert admissible(Stock(0, 0, 7, 7), config.rules, config.capacity) >= size


@given(st.lists(st.integers(3, 9), max_size=24).map(sorted), st.integers(1, 4))
def test_what_is_owed_is_what_the_later_batches_cannot_hold(last_batches, size):
    """The oracle counts, for every d, the groups up to d against the places of the batches after this one."""
    expected = {}
    for d in sorted(set(last_batches)):
        too_many = sum(last <= d for last in last_batches) - sum(size for _ in range(3, d))
        if too_many > 0:
            expected[d] = min(size, too_many)
    assert dict(owed(last_batches, 3, size)) == expected


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_shards_share_out_every_group_once_and_evenly(tokens, size):
    shards = shard(tokens, size)
    assert sorted(p for s in shards for p in s) == list(range(len(tokens)))
    loads = [sum(tokens[p] for p in s) for s in shards]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert shards == shard(tokens, size)
