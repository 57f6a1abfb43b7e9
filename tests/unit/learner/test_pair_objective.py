"""Online DPO's part of a micro-batch against a loop over groups and pairs, and what it measures beside."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import AlgorithmConfig
from learner.corrections import NonFiniteLogprob
from learner.losses import PAIR_METRICS, Denominators, Ranking, pair_objective
from learner.packing import MicroBatch, empty

TOTAL = Denominators(tokens=1.0, sequences=1.0, max_length=64, groups=3.0)
REWARDS, GROUPS = [1.0, 0.0, 0.7, 0.3, 0.3, 2.0, 2.0, 5.0], [0, 0, 0, 1, 1, 2, 2, 3]
"""Of the shard's completions: three with all different, two groups of ties, and one alone."""
RANKING = Ranking(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS))
BETA = 0.3


def micro_batch(reference, sequences, behavior=None) -> MicroBatch:
    n = len(reference)
    return replace(
        empty(),
        target_ids=torch.arange(n),
        target_positions=torch.arange(n),
        behavior_logprobs=torch.tensor(behavior or reference, dtype=torch.float32),
        advantages=torch.ones(n),
        weights=torch.ones(n),
        sequence_index=torch.tensor(sequences),
        versions=torch.zeros(n, dtype=torch.int32),
        reference_logprobs=torch.tensor(reference, dtype=torch.float32),
    )


def algorithm(**dpo) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"loss": "dpo", "dpo": {"beta": BETA, **dpo}})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


FORMULAS = {
    "dpo": ({}, lambda d: -math.log(sigmoid(BETA * d))),
    "cdpo": (
        {"label_smoothing": 0.2},
        lambda d: -0.8 * math.log(sigmoid(BETA * d)) - 0.2 * math.log(sigmoid(-BETA * d)),
    ),
    "ipo": ({"loss": "ipo"}, lambda d: (d - 1 / (2 * BETA)) ** 2),
}


def oracle(logprobs, reference, sequences, formula) -> tuple[float, int, float]:
    """Loss, pairs and those in the right order, one pair after the other."""
    value = dict.fromkeys(sequences, 0.0)
    for logprob, other, sequence in zip(logprobs, reference, sequences, strict=True):
        value[sequence] += logprob - other
    loss, pairs, right = 0.0, 0, 0.0
    for group in set(GROUPS):
        own = [s for s in value if GROUPS[s] == group]
        differences = [value[i] - value[j] for i in own for j in own if REWARDS[i] > REWARDS[j]]
        if differences:
            loss += sum(map(formula, differences)) / len(differences) / TOTAL.groups
            pairs += len(differences)
            right += sum(1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences)
    return loss, pairs, right


logprob = st.integers(-40, 0).map(lambda n: n / 8)
"""Eighths are exact in float32, so that sums that are equal on paper are equal."""


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(st.tuples(logprob, logprob, st.integers(0, 7)), min_size=1, max_size=20),
    name=st.sampled_from(sorted(FORMULAS)),
)
def test_against_a_loop(rows, name):
    rows = sorted(rows, key=lambda r: r[2])
    current, reference, sequences = map(list, zip(*rows, strict=True))
    changes, formula = FORMULAS[name]
    logprobs = torch.tensor(current, requires_grad=True)
    batch = micro_batch(reference, sequences)
    loss, metrics = pair_objective(logprobs, -logprobs.detach(), batch, algorithm(**changes), TOTAL, RANKING)
    expected, pairs, right = oracle(current, reference, sequences, formula)
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (float(metrics["pairs"]), float(metrics["correct"])) == (pairs, right)
    assert set(metrics) == set(PAIR_METRICS)
    assert float(metrics["tokens"]) == len(rows)
    loss.backward()
    assert logprobs.grad is not None
    for i in range(len(rows)):
        up, down = ([*current[:i], current[i] + e, *current[i + 1 :]] for e in (1e-4, -1e-4))
        ends = (oracle(moved, reference, sequences, formula)[0] for moved in (up, down))
        assert float(logprobs.grad[i]) == pytest.approx((next(ends) - next(ends)) / 2e-4, abs=1e-3)


def test_the_behavior_policy_is_measured_and_changes_nothing():
    sequences, reference, current = [0, 0, 1, 2], [-1.0, -1.5, -2.0, -1.0], [-1.2, -1.1, -2.5, -0.5]
    found = []
    for behavior in (current, [-3.0, -0.1, -9.0, -2.0]):
        logprobs = torch.tensor(current, requires_grad=True)
        batch = micro_batch(reference, sequences, behavior)
        loss, metrics = pair_objective(logprobs, torch.zeros(4), batch, algorithm(), TOTAL, RANKING)
        loss.backward()
        found.append((float(loss), logprobs.grad.tolist() if logprobs.grad is not None else [], metrics))
    assert found[0][:2] == found[1][:2]
    assert float(found[0][2]["rho"]) == 4.0
    rho = [math.exp(c - b) for c, b in zip(current, [-3.0, -0.1, -9.0, -2.0], strict=True)]
    assert float(found[1][2]["rho"]) == pytest.approx(sum(rho), rel=1e-5)
    assert float(found[1][2]["rho_max"]) == pytest.approx(max(rho), rel=1e-5)
    assert 1 / float(found[1][2]["inverse_rho_max"]) == pytest.approx(min(rho), rel=1e-5)


def test_a_filler_adds_nothing():
    batch = replace(empty(), reference_logprobs=torch.full((1,), -2.0))
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, metrics = pair_objective(logprobs, torch.ones(1), batch, algorithm(), TOTAL, RANKING)
    loss.backward()
    assert logprobs.grad is not None
    assert float(loss) == float(logprobs.grad) == 0
    assert all(float(value) == 0 for value in metrics.values())


def test_a_logprob_that_is_not_finite_is_told_with_its_place():
    for place in range(3):
        values = [[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]
        values[place][1] = -math.inf
        batch = micro_batch(values[1], [0, 1], values[0])
        with pytest.raises(NonFiniteLogprob, match=("behavior", "reference", "learner")[place]):
            pair_objective(torch.tensor(values[2]), torch.zeros(2), batch, algorithm(), TOTAL, RANKING)
