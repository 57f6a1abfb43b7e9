"""Losses over pairs of responses to one prompt: the reward model's, DPO's and IPO's.

Shapes: B responses of one micro-batch, N trained tokens, P ordered pairs. Pure functions. A micro-batch's
loss is its part of the mean over the prompts of the global batch, so that parts add up over micro-batches and
data-parallel ranks, and so do the sums. A prompt whose responses all score the same makes no pair and adds
nothing, whatever stands before or behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.algorithm import PairLossConfig

PAIR_SUMS = ("loss", "pairs", "correct", "preferred", "other")
"""What `over_pairs` sums."""

PairLoss = Callable[[Tensor], Tensor]
"""From what the preferred response has more than the other, [P], to the loss, [P]."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Every ordered pair of responses to the same prompt of which the first scored strictly more."""

    preferred: Tensor
    """int64 [P]: index into the B responses."""
    other: Tensor
    """int64 [P]."""
    weights: Tensor
    """float32 [P]: 1 / pairs of the prompt, so that every prompt with a pair counts the same."""


def pairs_of(scores: Tensor, prompts: Tensor) -> Pairs:
    """
    Args:
        scores: float [B], compared as they are: 0.7 beats 0.3.
        prompts: int64 [B], which prompt each response answers; any numbers.
    """
    number = torch.unique(prompts, return_inverse=True)[1]
    better = (number[:, None] == number[None]) & (scores[:, None] > scores[None])
    preferred, other = better.nonzero(as_tuple=True)
    counts = torch.bincount(number[preferred], minlength=max(len(scores), 1))
    return Pairs(preferred, other, 1 / counts[number[preferred]].float())


def over_pairs(
    values: Tensor, scores: Tensor, prompts: Tensor, pair_loss: PairLoss, total_prompts: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of a loss over each prompt's pairs, then over prompts: this micro-batch's part of it.

    Args:
        values: float32 [B], what the model thinks of each response.
        scores: float [B], what is true of it.
        prompts: int64 [B].
        pair_loss: Of value(preferred) − value(other).
        total_prompts: Prompts with a pair in the global batch.

    Returns:
        The loss, which has a gradient (of zero) without any pair too; and PAIR_SUMS, float64: `correct`
        counts pairs in the right order, half where the values are equal; `preferred` and `other` sum values.
    """
    pairs = pairs_of(scores, prompts)
    preferred, other = values[pairs.preferred], values[pairs.other]
    difference = preferred - other
    loss = (pair_loss(difference) * pairs.weights).sum() / max(total_prompts, 1.0) + 0.0 * values.sum()
    correct = (difference > 0).double() + 0.5 * (difference == 0).double()
    sums = {
        "loss": loss.detach().double(),
        "pairs": torch.tensor(len(difference), dtype=torch.float64),
        "correct": correct.sum(),
        "preferred": preferred.detach().double().sum(),
        "other": other.detach().double().sum(),
    }
    return loss, sums


def bradley_terry(difference: Tensor) -> Tensor:
    """-log σ(s_preferred − s_other), the reward model's (arXiv 2203.02155, equation 1); never overflows."""
    return -F.logsigmoid(difference)


def dpo(beta: float, label_smoothing: float = 0.0) -> PairLoss:
    """-(1 − ε) log σ(βd) − ε log σ(−βd), with d the difference of log π / π_ref.

    ε = 0 is DPO (arXiv 2305.18290, equation 7); ε is the chance that a label is the wrong way round (cDPO,
    ericmitchell.ai/cdpo.pdf).
    """

    def loss(difference: Tensor) -> Tensor:
        margin = beta * difference
        return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)

    return loss


def ipo(beta: float) -> PairLoss:
    """(d − 1 / 2β)², with d the difference of log π / π_ref (arXiv 2310.12036, equation 17; β is its τ)."""
    return lambda difference: (difference - 1 / (2 * beta)) ** 2


def pair_loss(config: PairLossConfig) -> PairLoss:
    """The configured one of the two above."""
    return ipo(config.beta) if config.loss == "ipo" else dpo(config.beta, config.label_smoothing)


def sum_by_response(values: Tensor, responses: Tensor, count: int) -> Tensor:
    """Sums [count] of per-token values [N], by the response each token belongs to, int64 [N]."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, responses, values)
