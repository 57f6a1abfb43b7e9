"""Token rewards, GAE and whitening against loops over tokens, and what padding must not change."""

import math
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import EPSILON, Moments
from learner.returns import explained_variance, gae, token_moments, token_rewards, vtrace, whiten

number = st.floats(-4, 4, width=32)
completions = st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=9), min_size=1, max_size=5)


def flat(rows):
    """Rewards, values and sequence numbers of completions, some numbers left out between them."""
    rewards = [r for row in rows for r, _ in row]
    values = [v for row in rows for _, v in row]
    sequences = [2 * i for i, row in enumerate(rows) for _ in row]
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(sequences)


def oracle(row, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l}, from its definition (arXiv 1506.02438, equation 16)."""
    rewards, values = [r for r, _ in row], [v for _, v in row] + [0.0]
    n = len(rewards)
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


@settings(deadline=None)
@given(rows=completions, gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_differences_of_each_completion_alone(rows, gamma, lam):
    rewards, values, sequences = flat(rows)
    found, returns = gae(rewards, values, sequences, gamma, lam)
    expected = [a for row in rows for a in oracle(row, gamma, lam)]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx([a + float(v) for a, v in zip(expected, values, strict=True)])


def test_with_lambda_one_a_return_is_the_rewards_still_to_come_whatever_the_values():
    rows = [[(0.5, 3.0), (0.0, -2.0), (1.0, 9.0)], [(2.0, 1.0)]]
    _, returns = gae(*flat(rows), gamma=1.0, gae_lambda=1.0)
    assert returns.tolist() == pytest.approx([1.5, 1.0, 1.0, 2.0])


def test_with_lambda_zero_an_advantage_looks_one_token_ahead():
    found, _ = gae(*flat([[(0.0, 1.0), (0.0, 3.0), (5.0, 4.0)]]), gamma=0.9, gae_lambda=0.0)
    assert found.tolist() == pytest.approx([0.9 * 3 - 1, 0.9 * 4 - 3, 5 - 4])


def test_nothing_is_to_come_after_the_last_token_not_even_after_one_at_the_limit():
    """The reward is already that of the completion as it was cut: a value on top would pay it twice."""
    found, returns = gae(*flat([[(0.0, 0.6), (1.0, 0.8)]]), gamma=1.0, gae_lambda=0.95)
    assert float(returns[-1]) == pytest.approx(1.0)
    assert float(found[-1]) == pytest.approx(1.0 - 0.8)


def traced(row, ratios, gamma, lam, rho_bar, c_bar):
    """Advantages and v_s = V_s + Σ_t γ^{t-s} (Π_{i<t} c_i) δ_t, from its definition (arXiv 1802.01561, 1)."""
    rewards, values = [r for r, _ in row], [v for _, v in row] + [0.0]
    n, targets = len(row), []
    for s in range(n):
        total = values[s]
        for t in range(s, n):
            carried = math.prod(lam * min(c_bar, ratios[i]) for i in range(s, t))
            error = rewards[t] + gamma * values[t + 1] - values[t]
            total += gamma ** (t - s) * carried * min(rho_bar, ratios[t]) * error
        targets.append(total)
    ahead = [*targets[1:], 0.0]
    mixed = [lam * ahead[s] + (1 - lam) * values[s + 1] for s in range(n)]
    return [rewards[s] + gamma * mixed[s] - values[s] for s in range(n)], targets


@settings(deadline=None)
@given(
    rows=completions,
    ratios=st.lists(st.floats(0.01, 5), min_size=45, max_size=45),
    gamma=st.floats(0.5, 1),
    lam=st.floats(0, 1),
    bars=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (10.0, 10.0)]),
)
def test_vtrace_is_the_sum_of_its_definition_of_each_completion_alone(rows, ratios, gamma, lam, bars):
    rewards, values, sequences = flat(rows)
    used = torch.tensor(ratios[: len(rewards)], dtype=torch.float64)
    found, targets = vtrace(rewards, values, used, sequences, gamma, lam, *bars)
    start, expected = 0, []
    for row in rows:
        expected.append(traced(row, ratios[start : start + len(row)], gamma, lam, *bars))
        start += len(row)
    assert found.tolist() == pytest.approx([a for row, _ in expected for a in row], abs=1e-8)
    assert targets.tolist() == pytest.approx([v for _, row in expected for v in row], abs=1e-8)


def test_vtrace_of_the_sampling_policy_itself_is_gae():
    rewards, values, sequences = flat([[(0.5, 3.0), (0.0, -2.0), (1.0, 9.0)], [(2.0, 1.0)]])
    ones = torch.ones(4)
    for lam in (0.0, 0.7, 1.0):
        one, two = (
            vtrace(rewards, values, ones, sequences, 0.9, lam, 1.0, 1.0),
            gae(rewards, values, sequences, 0.9, lam),
        )
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


def test_a_token_that_the_policy_has_given_up_teaches_its_value_nothing():
    """ρ = 0: V stays where it is, and nothing is carried back over it."""
    rewards, values, sequences = flat([[(0.0, 1.0), (0.0, 2.0), (9.0, 3.0)]])
    _, targets = vtrace(rewards, values, torch.tensor([1.0, 0.0, 1.0]), sequences, 1.0, 1.0, 1.0, 1.0)
    assert targets.tolist() == [2.0, 2.0, 9.0]


@given(
    scores=st.lists(number, min_size=4, max_size=4),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any),
    penalised=st.booleans(),
)
def test_the_score_is_paid_at_the_last_trained_token_and_the_penalty_at_every_one(scores, lengths, penalised):
    sequences = [i for i, n in enumerate(lengths) for _ in range(n)]
    penalties = [0.1 * t for t in range(len(sequences))] if penalised else [0.0] * len(sequences)
    expected = []
    for number_, run in groupby(sequences):
        tokens = list(run)
        for place, _ in enumerate(tokens):
            reward = -penalties[len(expected)]
            expected.append(reward + (scores[number_] if place == len(tokens) - 1 else 0.0))
    found = token_rewards(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(sequences),
        torch.tensor(penalties, dtype=torch.float64) if penalised else None,
    )
    assert found.tolist() == pytest.approx(expected)


@given(parts=st.lists(st.lists(number, min_size=1, max_size=6), min_size=1, max_size=4))
def test_whitening_is_over_the_trained_tokens_of_all_parts_and_over_nothing_else(parts):
    """Filling has weight 0: whatever stands there moves neither mean nor deviation."""
    real = [x for part in parts for x in part]
    mean = sum(real) / len(real)
    std = math.sqrt(sum((x - mean) ** 2 for x in real) / len(real))
    padded = [
        (torch.tensor([*part, 1e3, -7.0]), torch.tensor([1.0] * len(part) + [0.0, 0.0])) for part in parts
    ]
    batch = token_moments(padded)
    assert batch.count == len(real)
    got = [x for part in parts for x in whiten(torch.tensor(part), batch).tolist()]
    # ε is 1e-5, so an error of 1e-7 in a standard deviation near 0 shows as 1e-2 of it.
    assert got == pytest.approx([(x - mean) / (std + EPSILON) for x in real], abs=2e-2)


def test_whitened_advantages_have_mean_zero_and_deviation_one_where_padding_would_shrink_them():
    advantages = torch.tensor([2.0, 4.0, 6.0, 8.0, 0.0, 0.0, 0.0, 0.0])
    trained = torch.tensor([1.0] * 4 + [0.0] * 4)
    got = whiten(advantages[:4], token_moments([(advantages, trained)]))
    assert float(got.mean()) == pytest.approx(0, abs=1e-6)
    assert float(got.std(correction=0)) == pytest.approx(1, rel=1e-4)
    over_padding = whiten(advantages[:4], token_moments([(advantages, torch.ones(8))]))
    assert float(over_padding.mean()) > 0.5


def test_moments_of_parts_add_up_over_ranks():
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([2.0])
    one, two = token_moments([(a, torch.ones(2))]), token_moments([(b, torch.ones(1))])
    both = token_moments([(a, torch.ones(2)), (b, torch.ones(1))])
    assert both == Moments(
        one.count + two.count, one.total + two.total, one.total_squares + two.total_squares
    )


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 2.0, 3.0], 1.0), ([2.0, 2.0, 2.0], 0.0), ([3.0, 2.0, 1.0], -3.0)]
)
def test_explained_variance(values, expected):
    returns, weights = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    errors = returns - torch.tensor(values)
    got = explained_variance(token_moments([(returns, weights)]), token_moments([(errors, weights)]))
    assert got == pytest.approx(expected)


def test_equal_returns_have_no_variance_to_explain():
    constant = token_moments([(torch.ones(3), torch.ones(3))])
    assert explained_variance(constant, constant) is None
