from itertools import combinations
from statistics import fmean, stdev

import pytest

from buffer.pass_rate import part_means, pass_at, rates


@pytest.mark.parametrize(("samples", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(samples, passed):
    outcomes = [True] * passed + [False] * (samples - passed)
    for k in range(1, samples + 1):
        slow = fmean(any(chosen) for chosen in combinations(outcomes, k))
        assert pass_at(k, samples, passed) == pytest.approx(slow)


def test_rates_are_means_over_prompts_and_leave_out_those_without_completions():
    result = rates([[1.0, 0.0, 0.5, 0.0], [], [1.0, 1.0, 2.0, 0.0, 0.0]])
    assert result["prompts"] == 2
    assert result["completions"] == 9
    assert result["score"] == pytest.approx((1.5 / 4 + 4 / 5) / 2)
    assert result["stderr"] == pytest.approx(stdev([1.5 / 4, 4 / 5]) / 2**0.5)
    assert result["pass@1"] == pytest.approx((1 / 4 + 3 / 5) / 2)
    assert result["pass@4"] == pytest.approx(1.0)
    assert "pass@8" not in result


def test_nothing_scored_is_told_as_counts_only():
    assert rates([[], []]) == {"prompts": 0.0, "completions": 0.0}


def test_parts_are_averaged_where_they_occur():
    assert part_means([{"a": 1.0}, {"a": 0.0, "b": 3.0}]) == {"a": 0.5, "b": 3.0}
