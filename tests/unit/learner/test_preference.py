"""Pair losses against a loop over pairs written from the formulas, and where the rivals go wrong."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.preference import bradley_terry, dpo, ipo, over_pairs, pairs_of, sum_by_response


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


FORMULAS = {
    "bradley_terry": (bradley_terry, lambda d: -math.log(sigmoid(d))),
    "dpo": (dpo(0.3), lambda d: -math.log(sigmoid(0.3 * d))),
    "cdpo": (
        dpo(0.3, 0.2),
        lambda d: -0.8 * math.log(sigmoid(0.3 * d)) - 0.2 * math.log(sigmoid(-0.3 * d)),
    ),
    "ipo": (ipo(0.3), lambda d: (d - 1 / 0.6) ** 2),
}


def oracle(values, scores, prompts, formula, total):
    """Loss and pairs, prompt by prompt and pair by pair."""
    loss, pairs, correct = 0.0, 0, 0.0
    for prompt in sorted(set(prompts)):
        own = [i for i, p in enumerate(prompts) if p == prompt]
        losses = [
            (formula(values[i] - values[j]), values[i] - values[j])
            for i in own
            for j in own
            if scores[i] > scores[j]
        ]
        if losses:
            loss += sum(value for value, _ in losses) / len(losses) / total
            pairs += len(losses)
            correct += sum(1.0 if d > 0 else 0.5 if d == 0 else 0.0 for _, d in losses)
    return loss, pairs, correct


responses = st.lists(
    st.tuples(st.floats(-8, 8, width=32), st.sampled_from([0.0, 0.3, 0.7, 1.0, -2.0]), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(rows=responses, name=st.sampled_from(sorted(FORMULAS)))
def test_loss_and_gradient_are_the_loops(rows, name):
    values, scores, prompts = map(list, zip(*rows, strict=True))
    pair_loss, formula = FORMULAS[name]
    tensor = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, sums = over_pairs(
        tensor, torch.tensor(scores, dtype=torch.float64), torch.tensor(prompts), pair_loss, 3.0
    )
    expected, pairs, correct = oracle(values, scores, prompts, formula, 3.0)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6), "a pair's share is a float32"
    assert (int(sums["pairs"]), float(sums["correct"])) == (pairs, correct)
    loss.backward()
    for i in range(len(values)):
        moved = [list(values), list(values)]
        moved[0][i] += 1e-4
        moved[1][i] -= 1e-4
        up, down = (oracle(v, scores, prompts, formula, 3.0)[0] for v in moved)
        assert tensor.grad is not None
        assert tensor.grad[i].item() == pytest.approx((up - down) / 2e-4, abs=1e-4)


def test_scores_are_compared_as_they_are():
    """As integers 0.7 and 0.3 would both be 0, a tie."""
    pairs = pairs_of(torch.tensor([0.3, 0.7]), torch.tensor([0, 0]))
    assert (pairs.preferred.tolist(), pairs.other.tolist()) == ([1], [0])


def test_a_prompt_of_ties_changes_nothing_for_those_behind_it():
    values = torch.tensor([5.0, -5.0, 0.1, 0.4], requires_grad=True)
    scores, prompts = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    loss, sums = over_pairs(values, scores, prompts, bradley_terry, 1.0)
    alone, _ = over_pairs(values[2:], scores[2:], prompts[2:], bradley_terry, 1.0)
    assert loss.item() == alone.item()
    loss.backward()
    assert values.grad is not None
    assert values.grad[:2].tolist() == [0.0, 0.0]
    assert int(sums["pairs"]) == 1


def test_without_any_pair_the_loss_is_zero_and_has_a_gradient():
    values = torch.tensor([3.0, 4.0], requires_grad=True)
    loss, _ = over_pairs(values, torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), dpo(0.1), 0.0)
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0]


def test_every_prompt_counts_the_same_however_many_pairs_it_has():
    values = torch.zeros(6, requires_grad=True)
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 0.0])
    loss, sums = over_pairs(values, scores, torch.tensor([0, 0, 0, 0, 1, 1]), bradley_terry, 2.0)
    assert int(sums["pairs"]) == 7
    assert loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("name", ["bradley_terry", "dpo", "cdpo"])
def test_far_apart_values_neither_overflow_nor_vanish(name, difference):
    """log(sigmoid(x)) is -inf at -110 already, and its gradient not a number."""
    at = torch.tensor([difference], requires_grad=True)
    loss = FORMULAS[name][0](at).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert at.grad is not None
    if name != "cdpo" and difference < 0:
        slope = 1.0 if name == "bradley_terry" else 0.3
        assert loss.item() == pytest.approx(-slope * difference, rel=1e-5)
        assert at.grad.item() == pytest.approx(-slope)


def test_sums_by_response_keep_the_gradient():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = sum_by_response(values, torch.tensor([1, 0, 1, 1]), 3)
    assert sums.tolist() == [2.0, 13.0, 0.0]
    (sums * torch.tensor([10.0, 1.0, 5.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 10.0, 1.0, 1.0]
