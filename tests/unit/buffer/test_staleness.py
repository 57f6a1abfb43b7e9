from hypothesis import example, given
from hypothesis import strategies as st

from buffer.staleness import Candidate, Stock, admissible, choose, shard


@given(
    leased=st.integers(0, 100), stored=st.integers(0, 100), assembled=st.integers(0, 50),
    lag=st.integers(0, 3),
    batch=st.integers(1, 16), staleness=st.integers(0, 5), capacity=st.integers(1, 500),
)  # fmt: skip
def test_admission_never_exceeds_its_inequality(leased, stored, assembled, lag, batch, staleness, capacity):
    published = max(0, assembled - lag)
    room = admissible(Stock(leased, stored, assembled, published), batch, staleness, capacity)
    assert room >= 0
    if room:
        total = leased + stored + room
        assert total + batch * assembled <= (staleness + published + 1) * batch
        assert total <= capacity


def test_synchronous_training_leases_one_batch_and_then_waits_for_its_version():
    assert admissible(Stock(0, 0, 0, None), 4, 0, 100) == 0
    assert admissible(Stock(0, 0, 0, 0), 4, 0, 100) == 4
    assert admissible(Stock(0, 0, 1, 0), 4, 0, 100) == 0
    assert admissible(Stock(0, 0, 1, 1), 4, 0, 100) == 4


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=20),
    st.integers(1, 6),
    st.integers(0, 9),
)
@example(stored=[(0, 0)], count=1, index=3)  # one version too old, which random numbers may miss
def test_no_choice_is_too_old(stored, count, index):
    candidates = [Candidate(i, turn, oldest) for i, (turn, oldest) in enumerate(stored)]
    for policy in ("fifo", "freshest"):
        chosen = choose(candidates, count, index, 2, policy)
        assert len(chosen) in (0, count)
        assert all(index - c.oldest_version <= 2 for c in chosen)
        assert bool(chosen) == (sum(index - c.oldest_version <= 2 for c in candidates) >= count)


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_shards_share_out_every_group_once_and_evenly(tokens, size):
    shards = shard(tokens, size)
    assert sorted(p for s in shards for p in s) == list(range(len(tokens)))
    loads = [sum(tokens[p] for p in s) for s in shards]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert shards == shard(tokens, size)
