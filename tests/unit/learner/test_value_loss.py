"""The value model's loss and the KL coefficient's control against loops, with gradients."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import AlgorithmConfig
from learner.losses import Denominators, adapted, kl, objective, value_objective
from learner.packing import MicroBatch, empty

TOTAL = Denominators(tokens=40.0, sequences=9.0, max_length=64)
number = st.floats(-3, 3, width=32)


def micro_batch(old, returns, weights=None) -> MicroBatch:
    n = len(old)
    return replace(
        empty(),
        weights=torch.ones(n) if weights is None else torch.tensor(weights),
        sequence_index=torch.zeros(n, dtype=torch.int64),
        old_values=torch.tensor(old),
        returns=torch.tensor(returns),
    )


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(number, number, number), min_size=1, max_size=9),
    clip=st.sampled_from([0.1, 0.2, 1.0]),
)
def test_against_a_loop_with_its_gradient(rows, clip):
    loss, slopes, count, close = 0.0, [], 0, 0
    for value, old, target in rows:
        limited = old + min(max(value - old, -clip), clip)
        plain, held = (value - target) ** 2, (limited - target) ** 2
        loss += 0.5 * max(plain, held) / TOTAL.tokens
        # Past the band the clipped side is constant; inside it both sides are the same.
        slopes.append((value - target) / TOTAL.tokens if plain >= held else 0.0)
        count += held > plain and abs(value - old) > clip
        # Where float32 may see it the other way round.
        close += abs(held - plain) < 1e-5 and abs(value - old) > clip - 1e-5
    values = torch.tensor([value for value, _, _ in rows], requires_grad=True)
    batch = micro_batch([old for _, old, _ in rows], [target for _, _, target in rows])
    found, metrics = value_objective(values, batch, clip, TOTAL)
    found.backward()
    assert float(found) == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert values.grad is not None
    for got, expected, (value, old, target) in zip(values.grad.tolist(), slopes, rows, strict=True):
        limited = old + min(max(value - old, -clip), clip)
        if abs((value - target) ** 2 - (limited - target) ** 2) > 1e-5 or abs(value - old) < clip - 1e-4:
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert float(metrics["clipped"]) == pytest.approx(count, abs=close)
    assert float(metrics["tokens"]) == len(rows)


def slope(value: float, old: float, target: float) -> float:
    values = torch.tensor([value], requires_grad=True)
    loss, _ = value_objective(values, micro_batch([old], [target]), 0.2, TOTAL)
    loss.backward()
    assert values.grad is not None
    return float(values.grad) * TOTAL.tokens


def test_clipping_stops_what_went_far_enough_towards_the_return_and_never_the_way_back():
    assert slope(1.5, 1.0, 3.0) == 0, "past the band, and the return lies further on"
    assert slope(0.5, 1.0, 3.0) == pytest.approx(-2.5), "moved away from the return"
    assert slope(1.1, 1.0, 3.0) == pytest.approx(-1.9), "inside the band"
    assert slope(1.0, 1.0, 3.0) == pytest.approx(-2.0), "the first update is the plain squared error's"


def test_inside_the_band_nothing_is_clipped_however_the_last_digit_is_rounded():
    old = torch.linspace(-2, 2, 999)
    values = old + torch.linspace(-0.19, 0.19, 999).flip(0)
    _, metrics = value_objective(values, micro_batch(old.tolist(), [0.3] * 999), 0.2, TOTAL)
    assert float(metrics["clipped"]) == 0


def test_only_the_clipped_are_counted_and_filling_adds_nothing():
    values = torch.tensor([1.5, 1.1, 9.0], requires_grad=True)
    batch = micro_batch([1.0, 1.0, 0.0], [3.0, 3.0, -5.0], [1.0, 1.0, 0.0])
    loss, metrics = value_objective(values, batch, 0.2, TOTAL)
    loss.backward()
    assert values.grad is not None
    assert float(values.grad[2]) == 0
    assert (float(metrics["clipped"]), float(metrics["tokens"])) == (1.0, 2.0)
    expected = 0.5 * ((1.2 - 3) ** 2 + (1.1 - 3) ** 2) / TOTAL.tokens
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 64 / 10000),
        (5.4, 1 - 0.1 * 64 / 10000),
        (600.0, 1 + 0.2 * 64 / 10000),
        (-1.0, 1 - 0.2 * 64 / 10000),
    ],
)
def test_the_coefficient_rises_above_the_target_and_falls_below_it_by_a_bounded_share(divergence, expected):
    got = adapted(0.3, divergence, completions=64, target=6.0, horizon=10000)
    assert got == pytest.approx(0.3 * expected, rel=1e-12)


def test_a_coefficient_holds_the_divergence_of_a_policy_that_answers_to_it():
    """A policy whose divergence is 2 / β settles where that is the target."""
    coefficient = 10.0
    for _ in range(3000):
        coefficient = adapted(coefficient, 2 / coefficient, completions=100, target=4.0, horizon=10000)
    assert 2 / coefficient == pytest.approx(4.0, rel=1e-2)


def reference_gradient(coefficient: float) -> tuple[float, float]:
    """Of a token without advantage, and the divergence that is reported of it."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    batch = replace(
        empty(),
        weights=torch.ones(1),
        behavior_logprobs=torch.tensor([-1.0]),
        reference_logprobs=torch.tensor([-2.0]),
    )
    of = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    loss, metrics = objective(logprobs, torch.zeros(1), batch, of, TOTAL, coefficient)
    loss.backward()
    assert logprobs.grad is not None
    return float(logprobs.grad), float(metrics["reference_k1"])


def test_the_loss_takes_the_coefficient_of_its_step_and_a_reward_that_has_it_leaves_none_to_the_loss():
    slope, divergence = reference_gradient(0.3)
    assert slope == pytest.approx(0.3 * (1 - math.exp(-1)) / TOTAL.tokens)
    assert reference_gradient(0.0)[0] == 0
    assert divergence == reference_gradient(0.0)[1] == pytest.approx(1.0)


def moved_by_reward(estimator) -> torch.Tensor:
    """How the policy gradient with -estimate as the reward moves three probabilities, in expectation."""
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    reward = -kl(logprobs.detach(), reference.log(), estimator)
    (logprobs.exp().detach() * reward * logprobs).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_in_the_reward_only_k1_pulls_what_is_too_rare_back_up():
    """Why the configuration refuses the others: they push the first token, too rare already, further down."""
    assert moved_by_reward("k1")[0] > 0
    assert moved_by_reward("k2")[0] < 0
    assert moved_by_reward("k3")[0] < 0
