from collections import Counter

import numpy as np
import pytest

from buffer.order import LONGEST_CYCLE, Order, cycle_counts, parse_split, share


def draws(order, count, start=0):
    return [order.at(start + i) for i in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 7, 10, 1000, 1003])
@pytest.mark.parametrize("split", ["2,4,4", "1,1,1", "0,1,0", "0.2,0.3,0.5"])
def test_every_row_is_in_exactly_one_share(rows, split):
    parts = [share(rows, split, stage) for stage in ("sft", "reward", "rl")]
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    for part, wanted in zip(parts, parse_split(split), strict=True):
        assert abs(len(part) - rows * wanted / sum(parse_split(split))) <= 1
    np.testing.assert_array_equal(share(rows, split, "dpo"), parts[1])


def test_2_4_4_is_20_40_and_40_percent():
    parts = [share(1000, "2,4,4", stage) for stage in ("sft", "reward", "rl")]
    assert [len(p) for p in parts] == [200, 400, 400]
    # Drawn from all over the file, so that a sorted file gives every stage the same mixture.
    for part in parts:
        assert abs(part.mean() - 499.5) < 4 * 1000 / np.sqrt(12 * len(part))


@pytest.mark.parametrize("text", ["2,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1", ""])
def test_a_split_that_is_none_is_told(text):
    with pytest.raises(ValueError, match="2,4,4"):
        parse_split(text)


def test_a_blend_keeps_its_weights_exactly_in_every_cycle():
    order = Order([100, 30, 7], [0.5, 0.3, 0.2], seed=3, shuffle=True, epochs=None)
    sources = [d.source for d in draws(order, 1000)]
    for start in range(0, 1000, 10):
        assert Counter(sources[start : start + 10]) == {0: 5, 1: 3, 2: 2}
    cycles = {tuple(sources[i : i + 10]) for i in range(0, 1000, 10)}
    assert len(cycles) > 50, "the order within a cycle is the seed's, not a pattern"


def test_a_source_of_a_blend_goes_round_without_leaving_a_row_out():
    order = Order([100, 7], [0.8, 0.2], seed=3, shuffle=True, epochs=None)
    small = [(d.lap, d.row) for d in draws(order, 5 * 7 * 10) if d.source == 1]
    assert [lap for lap, _ in small] == [lap for lap in range(10) for _ in range(7)]
    laps = [[r for lap, r in small if lap == k] for k in range(10)]
    assert all(sorted(rows) == list(range(7)) for rows in laps)
    assert len({tuple(rows) for rows in laps}) > 5


def test_no_two_draws_are_the_same():
    order = Order([10, 3, 5], [3, 2, 1], seed=1, shuffle=True, epochs=4)
    taken = draws(order, 4 * 18)
    assert len(set(taken)) == 4 * 18
    assert order.at(4 * 18) is None


def test_any_draw_can_be_had_without_those_before():
    def order():
        return Order([50, 20], [1, 2], seed=9, shuffle=True, epochs=None)

    whole = draws(order(), 500)
    for start in (499, 0, 250, 63):
        assert draws(order(), 1, start) == [whole[start]]
    other = Order([50, 20], [1, 2], seed=10, shuffle=True, epochs=None)
    assert draws(other, 500) != whole


def test_weights_become_the_smallest_whole_numbers():
    assert cycle_counts([0.7, 0.3]) == [7, 3]
    assert cycle_counts([2, 4]) == [1, 2]
    assert cycle_counts([5]) == [1]
    assert cycle_counts([0.1, 0.2, 0.7]) == [1, 2, 7]
    odd = cycle_counts([1 / 3, 0.123456789, 1e-9])
    assert sum(odd) <= LONGEST_CYCLE
    assert odd[2] == 1, "a source is never left out"
    assert abs(odd[0] / sum(odd) - (1 / 3) / (1 / 3 + 0.123456789)) < 2 / LONGEST_CYCLE


def test_shuffled_rows_come_everywhere():
    # Each of 10 rows at each of 10 places over 2000 passes: 200 expected, standard deviation 13.4.
    order = Order([10], None, seed=5, shuffle=True, epochs=None)
    counts = np.zeros((10, 10))
    for lap in range(2000):
        for place in range(10):
            counts[place, order.at(lap * 10 + place).row] += 1
    assert np.abs(counts - 200).max() < 5 * 13.4
