"""What is done about ρ = π_proximal / μ, the distance between the learner and the policy that sampled.

Shapes: N trained tokens of one micro-batch, B sequences in it. Pure; gradients flow only through `ratio`.
Ratios are the exact exp of a float32 log difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 40.0
"""A log ratio above this is taken as this: e^40 is as good as infinite, and its square still fits float32."""


class NonFiniteLogprob(ValueError):
    """A logprob that is nan or infinite, from the engine or from the model itself."""


@dataclass(frozen=True, slots=True)
class Correction:
    weight: Tensor
    """[N]: what the policy loss of the token is multiplied by; 0 where it is not trained."""
    keep: Tensor
    """[N]: 1, or 0 where the token is masked or its sequence vetoed; multiplies the other loss terms."""
    masked: Tensor
    """bool [N]: ρ lies outside the band."""
    vetoed: Tensor
    """bool [N]: some token of the sequence has a ρ below the veto."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator, of logprobs [N], at most LOG_RATIO_LIMIT."""
    return (numerator.float() - denominator.float()).clamp(max=LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator), of logprobs [N]; finite by LOG_RATIO_LIMIT."""
    return torch.exp(log_ratio(numerator, denominator))


def decoupled(rho: Tensor, sequences: Tensor, low: float, high: float, veto: float) -> Correction:
    """Weigh by ρ inside [low, high], train nothing outside it nor in a sequence with any ρ below `veto`.

    Args:
        rho: [N].
        sequences: int64 [N], 0 to B - 1.

    Masking is IcePop's (arXiv 2510.18855), decoupling Hilton et al.'s (arXiv 2110.00641).
    """
    rho = rho.detach()
    masked = (rho < low) | (rho > high)
    vetoed = any_of_sequence(rho < veto, sequences)
    keep = (~(masked | vetoed)).float()
    return Correction(weight=rho * keep, keep=keep, masked=masked, vetoed=vetoed)


def bypass(rho: Tensor) -> Correction:
    """Neither weight nor mask: the loss's own ratio is to μ, and ρ again would count it twice."""
    nowhere = torch.zeros_like(rho, dtype=torch.bool)
    ones = torch.ones_like(rho)
    return Correction(weight=ones, keep=ones, masked=nowhere, vetoed=nowhere)


def any_of_sequence(flags: Tensor, sequences: Tensor) -> Tensor:
    """bool [N]: whether any token of the token's sequence is flagged."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    hits = torch.zeros(count, dtype=torch.int64, device=flags.device)
    return hits.scatter_add(0, sequences, flags.long())[sequences] > 0


def refuse_non_finite(logprobs: Tensor, whose: str, sequence_index: Tensor, target_ids: Tensor) -> None:
    """Raise NonFiniteLogprob naming the first bad entry of [N] logprobs: whose, where, and the token."""
    bad = torch.nonzero(~torch.isfinite(logprobs.detach()))
    if len(bad):
        at = int(bad[0])
        raise NonFiniteLogprob(
            f"{whose} logprob of token {int(target_ids[at])} in sequence {int(sequence_index[at])} "
            f"of the shard (target {at} of its micro-batch) is {float(logprobs[at])}; expected a finite one"
        )
