import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.starvation import distance, report

SAMPLES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(SAMPLES, SAMPLES)
def test_the_distance_is_the_largest_gap_between_the_shares_below_any_point(left, right):
    gaps = [
        abs(sum(a <= x for a in left) / len(left) - sum(b <= x for b in right) / len(right))
        for x in range(10)
    ]
    assert distance(np.array(left), np.array(right)) == pytest.approx(max(gaps), abs=1e-4)


def test_long_groups_that_run_out_show():
    made = [(10.0, 1.0, "trained")] * 3 + [(50.0, 0.0, "evicted")]
    told = report(made)
    assert (told["generated"], told["trained"], told["evicted"]) == (4, 3, 1)
    assert told["length_ratio"] == 0.5
    assert told["evicted_length_ratio"] == 5
    assert told["length_ks"] == told["reward_ks"] == 0.25


def test_nothing_trained_is_nothing_to_compare():
    for groups in ([], [(5.0, 0.0, "evicted")]):
        told = report(groups)
        assert told["trained"] == 0
        assert told["length_ratio"] is told["evicted_length_ratio"] is told["length_ks"] is None


def test_the_store_tells_it_of_groups_whose_fate_is_known(bench, group):
    b = bench(rows=40, policy="freshest")
    b.do(lambda s: s.published(0))
    slow, *others = b.lease(4)
    for lease in others[:2]:
        b.deliver(group(lease, versions=(1, 1), rewards=(1.0, 0.0)))
    b.batch(0)
    b.do(lambda s: s.published(2))
    b.deliver(group(slow, versions=(0,) * 6, rewards=(0.0, 0.0)))
    b.deliver(group(others[2], versions=(2, 2)))
    b.batch(2)
    told = b.store.status()["starvation"]
    assert (told["generated"], told["trained"], told["evicted"]) == (3, 2, 1), "one is stored yet"
    assert told["evicted_length_ratio"] == 3
    assert told["length_ratio"] == pytest.approx(2 / (10 / 3), abs=1e-4)
    assert told["reward_ks"] == pytest.approx(1 / 3, abs=1e-4)
