"""Advantages against slow loops, and at the edges: a group of one, equal rewards, an empty shard."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import EPSILON, Moments, advantages, clipped, length_penalty, moments

NONE = Moments(0, 0, 0)
rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


def oracle(kind, r, batch):
    n = len(r)
    mean = sum(r) / n
    out = []
    for i in range(n):
        if kind == "grpo":
            std = math.sqrt(sum((x - mean) ** 2 for x in r) / n)
            out.append((r[i] - mean) / (std + EPSILON))
        if kind == "dr_grpo":
            out.append(r[i] - mean)
        if kind == "rloo":
            others = [r[j] for j in range(n) if j != i]
            out.append(r[i] - sum(others) / len(others) if others else 0.0)
        if kind == "reinforce_plus_plus":
            m = sum(batch) / len(batch)
            std = math.sqrt(sum((x - m) ** 2 for x in batch) / len(batch))
            out.append((r[i] - m) / (std + EPSILON))
    return out


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
@given(shard=st.lists(rewards, min_size=1, max_size=4))
def test_against_loops(kind, shard):
    groups = [np.array(r, np.float64) for r in shard]
    got = advantages(kind, groups, moments(groups))
    flat = [x for r in shard for x in r]
    for r, values in zip(shard, got, strict=True):
        # ε is 1e-5, so an error of 1e-7 in a standard deviation near 0 shows as 1e-2 of it.
        within = 1e-9 if kind in ("dr_grpo", "rloo") else 2e-2
        assert values == pytest.approx(oracle(kind, r, flat), abs=within)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("r", [[0.7], [0.1, 0.1, 0.1], [-1e9] * 7])
def test_equal_rewards_teach_exactly_nothing(kind, r):
    (values,) = advantages(kind, [np.array(r)], NONE)
    assert (values == 0).all()


def test_plain_numbers():
    r = np.array([1.0, 0.0, 0.0, 1.0])
    assert advantages("grpo", [r], NONE)[0] == pytest.approx([1, -1, -1, 1], rel=1e-4)
    assert advantages("dr_grpo", [r], NONE)[0] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert advantages("rloo", [r], NONE)[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_moments_of_shards_add_up_to_the_batch():
    a, b = np.array([1.0, 5.0]), np.array([2.0])
    one, two, both = moments([a]), moments([b]), moments([a, b])
    added = Moments(one.count + two.count, one.total + two.total, one.total_squares + two.total_squares)
    assert added == both
    assert both.std == pytest.approx(np.concatenate([a, b]).std())
    assert moments([]).std == 0


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="group 1 of the shard: rewards"):
        clipped([np.zeros(2), np.array([0.0, math.nan])], None)


def test_rewards_are_clipped_on_both_sides_or_left_alone_and_infinite_ones_are_refused_all_the_same():
    r = np.array([-9.0, -0.5, 3.0])
    assert clipped([r], 2.0)[0].tolist() == [-2.0, -0.5, 2.0]
    assert clipped([r], None)[0].tolist() == r.tolist()
    with pytest.raises(ValueError, match="group 0 of the shard: rewards"):
        clipped([np.array([0.0, math.inf])], 2.0)


def test_with_gae_a_completion_has_no_advantage_of_its_own():
    (values,) = advantages("gae", [np.array([1.0, 2.0])], NONE)
    assert values.tolist() == [0.0, 0.0]


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    band=st.integers(1, 40),
    penalty=st.sampled_from([1.0, 0.5]),
)
def test_a_reward_falls_over_the_band_before_the_limit(lengths, band, penalty):
    expected = []
    for n in lengths:
        if n <= 40 - band:
            expected.append(0.0)
        elif n <= 40:
            expected.append(penalty * ((40 - band) - n) / band)
        else:
            expected.append(-penalty)
    got = length_penalty(np.array(lengths, np.float64), 40, band, penalty)
    assert got == pytest.approx(expected)
