"""From rewards and values to every token's advantage and return. Pure; no gradient flows through any of it.

Shapes: N trained tokens of one micro-batch, those of one completion together and in order; B completions.
Called by `learner/step.py`; `docs/algorithms.md` has the formulas beside their papers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from learner.advantages import EPSILON, Moments


def token_rewards(scores: Tensor, sequences: Tensor, penalty: Tensor | None = None) -> Tensor:
    """float64 [N]: a completion's score at its last trained token, less the penalty of every token.

    Args:
        scores: float64, indexed by `sequences`.
        sequences: int64 [N].
        penalty: [N]; None for none.
    """
    rewards = torch.zeros(len(sequences), dtype=torch.float64, device=sequences.device)
    is_last = torch.ones_like(sequences, dtype=torch.bool)
    is_last[:-1] = sequences[1:] != sequences[:-1]
    rewards[is_last] = scores[sequences[is_last]]
    return rewards if penalty is None else rewards - penalty.double()


def gae(
    rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, float64 [N] each (arXiv 1506.02438, equation 16).

    δ_t = r_t + γ·V_{t+1} - V_t, A_t = δ_t + γ·λ·A_{t+1}, R_t = A_t + V_t, where t + 1 is the completion's
    next trained token and V after its last one is 0. Also where it was cut by its length: its reward is for
    what it had become and is paid in full, so the value of going on would be paid on top of it.

    Args:
        rewards: [N].
        values: [N]: V_t, before token t is drawn.
        sequences: int64 [N].
        gamma: Discount of one token.
        gae_lambda: 0 looks one token ahead; 1, with no values, sums up the rewards that are still to come.
    """
    ones = torch.ones_like(values)
    return vtrace(rewards, values, ones, sequences, gamma, gae_lambda, 1.0, 1.0)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    ratios: Tensor,
    sequences: Tensor,
    gamma: float,
    gae_lambda: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns v, float64 [N] each, of the proximal policy where another one sampled (IMPALA,
    arXiv 1802.01561, equation 1 in the recursive form of remark 1, λ as in remark 2).

    δ_t = min(ρ̄, ρ_t)·(r_t + γ·V_{t+1} - V_t), v_t = V_t + δ_t + γ·λ·min(c̄, ρ_t)·(v_{t+1} - V_{t+1}) and
    A_t = r_t + γ·(V_{t+1} + λ·(v_{t+1} - V_{t+1})) - V_t, with no ρ_t: the policy loss has it. Where all ρ
    are 1 these are GAE's.

    Args:
        rewards: As of `gae`, and so are values, sequences, gamma and gae_lambda.
        ratios: [N]: ρ_t = π_proximal / μ.
        rho_bar: Whose values are learned: with 1 those of a policy between μ and π_proximal, with more
            nearly the latter's.
        c_bar: How far a difference of values is carried back; at most rho_bar.
    """
    numbers, counts = torch.unique_consecutive(sequences, return_inverse=True, return_counts=True)[1:]
    first = counts.cumsum(0) - counts
    steps = torch.arange(len(sequences), device=sequences.device) - first[numbers]
    longest = int(counts.max())
    ahead = torch.zeros(len(counts), longest + 1, dtype=torch.float64, device=sequences.device)
    # Behind a completion's end all grids hold 0, and so do the differences there.
    ahead[numbers, steps] = values.double()
    deltas, carry = torch.zeros_like(ahead[:, 1:]), torch.zeros_like(ahead[:, 1:])
    errors = rewards.double() + gamma * ahead[:, 1:][numbers, steps] - values.double()
    deltas[numbers, steps] = ratios.double().clamp(max=rho_bar) * errors
    carry[numbers, steps] = gamma * gae_lambda * ratios.double().clamp(max=c_bar)
    moved = torch.zeros_like(ahead)
    for step in range(longest - 1, -1, -1):
        moved[:, step] = deltas[:, step] + carry[:, step] * moved[:, step + 1]
    advantages = errors + gamma * gae_lambda * moved[:, 1:][numbers, steps]
    return advantages, values.double() + moved[numbers, steps]


def token_moments(parts: Iterable[tuple[Tensor, Tensor]]) -> Moments:
    """Sums over the tokens of any micro-batches; they add up over data-parallel ranks.

    Args:
        parts: Of each, numbers [N] and their weights [N]: 0 for what is there only to fill up.
    """
    count = total = squares = 0.0
    for numbers, weights in parts:
        weighed = numbers.double() * weights
        count += float(weights.sum())
        total += float(weighed.sum())
        squares += float((weighed * numbers).sum())
    return Moments(count, total, squares)


def whiten(numbers: Tensor, batch: Moments) -> Tensor:
    """(x - mean) / (std + ε), float32 [N], with the moments of the trained tokens of the whole batch."""
    return ((numbers.double() - batch.mean) / (batch.std + EPSILON)).float()


def explained_variance(returns: Moments, errors: Moments) -> float | None:
    """1 - Var(R - V) / Var(R): 1 when the values tell the returns, 0 or less when a constant would do as
    well; None when all returns are the same."""
    return 1 - (errors.std / returns.std) ** 2 if returns.std else None
