"""What is done about ρ = π_proximal / μ, the distance between the learner and the policy that sampled.

Shapes: N trained tokens of one micro-batch, B sequences in it. Pure; gradients flow only through `ratio`.
Ratios are the exact exp of a float32 log difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.correction_config import CAP, CorrectionConfig, Level

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
    """bool [N]: its ρ lies outside the band."""
    vetoed: Tensor
    """bool [N]: some token of the sequence has a ρ below the veto."""
    capped: Tensor
    """bool [N]: it is trained with a truncated weight."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator, of logprobs [N], at most LOG_RATIO_LIMIT."""
    return (numerator.float() - denominator.float()).clamp(max=LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator), of logprobs [N]; finite by LOG_RATIO_LIMIT."""
    return torch.exp(log_ratio(numerator, denominator))


def sampling_weight(logprobs: Tensor, behavior: Tensor, cap: float | None) -> Tensor:
    """min(π / μ, cap) as a constant, [N]: what makes a mean over samples of μ one over those of π (truncated
    importance sampling, Ionides, J. Comput. Graph. Stat. 17, 2008)."""
    return ratio(logprobs.detach(), behavior).clamp(max=CAP if cap is None else cap)


def at_level(log_ratios: Tensor, sequences: Tensor, level: Level) -> Tensor:
    """The log ratio [N] that stands for each token: its own, or that of the whole sequence.

    Args:
        log_ratios: [N], of single tokens.
        sequences: int64 [N], 0 to B - 1; each sequence lies wholly in this micro-batch.
        level: Of `sequence` the ratio is the product over its tokens, at most e^LOG_RATIO_LIMIT; of
            `geometric` the product's geometric mean (arXiv 2507.18071, equation 7); otherwise its own.
    """
    if level not in ("sequence", "geometric"):
        return log_ratios
    lengths = torch.bincount(sequences)
    # A long completion's sum in float32 would lose what its single tokens are off by.
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=log_ratios.device)
    sums = sums.index_add(0, sequences, log_ratios.double())
    whole = sums / lengths if level == "geometric" else sums
    return whole.clamp(max=LOG_RATIO_LIMIT).float()[sequences]


def correct(
    log_rho: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    of: CorrectionConfig,
    level: Level,
    mean_weight: float = 1.0,
) -> Correction:
    """Weigh by ρ, truncated at `of.cap`; train nothing whose ρ lies outside of the band, nor a sequence with
    any token whose ρ is below the veto. With `of.taper` weights and band are for A ≤ 0 alone.

    Args:
        log_rho: [N], of single tokens; a constant, and so is the weight.
        advantages: [N]; only a taper asks for their sign.
        sequences: int64 [N], 0 to B - 1.
        of: What is tested and where it is bounded.
        level: Whose ρ is the weight; of `none` it is 1.
        mean_weight: What weights are divided by: their mean over the kept tokens of the optimizer step.

    Sources: weights of tokens, Hilton et al. (arXiv 2110.00641, "Decoupled policy objectives"), of
    completions, Precup et al. (ICML 2000, importance sampling of trajectories); cap, Ionides (J. Comput.
    Graph. Stat. 17, 2008); mean weight, self-normalised importance sampling (Owen, Monte Carlo theory,
    chapter 9); masks of tokens, IcePop (arXiv 2510.18855, equation 2), of completions, verl
    (rollout_corr_math.md, section 3.4), by their mean log ρ where A < 0, DeepSeek-V3.2 (arXiv 2512.02556,
    equation 9); veto, verl (section 3.5).
    """
    low, high = of.band
    tested = at_level(log_rho, sequences, of.mask_level).exp()
    masked = (tested < low) | (tested > high)
    if of.taper:
        masked &= advantages <= 0
    vetoed = any_of_sequence(log_rho.exp() < of.veto_below, sequences)
    keep = (~(masked | vetoed)).float()
    ones = torch.ones_like(log_rho)
    weight = ones if level == "none" else at_level(log_rho, sequences, level).exp()
    if of.taper:
        weight = tapered(weight, advantages)
    truncated = weight if of.cap is None else weight.clamp(max=of.cap)
    return Correction(
        weight=truncated * keep / mean_weight,
        keep=keep,
        masked=masked,
        vetoed=vetoed,
        capped=(truncated < weight) & (keep > 0),
    )


def tapered(ratios: Tensor, advantages: Tensor) -> Tensor:
    """1 where A > 0, min(ρ, 1) elsewhere, [N].

    With ρ of whole completions it is TOPR's weight (arXiv 2503.14286, section 3), with A for its reward. A
    push up is bounded by itself: the likelier something is, the less is left to gain. A push down is not: the
    gradient of log π grows the rarer it has become. So what the policy has left already is let go, and what
    was right is trained however far the policy has gone from it, unless the veto stops its whole sequence.
    """
    return torch.where(advantages > 0, 1.0, ratios.clamp(max=1))


def proximal_share(versions: Tensor, index: int, progress: float) -> Tensor:
    """How far the way from the policy that sampled to the current one the proximal policy lies, float32 [N].

    α = (v_prox - v) / (v_π - v), with v_prox the version that the batch began with and v_π that of the
    current weights, which counts each of the batch's optimizer steps as its part of a version (A-3PO's
    staleness-aware coefficient, arXiv 2512.06547, whose v_π is a whole version ahead: its 1/d is 1 - α).

    Args:
        versions: int32 [N], of the tokens; at most `index`.
        index: v_prox.
        progress: Share of the batch's optimizer steps that have been made, above 0 and below 1.
    """
    behind = index - versions.float()
    return behind / (behind + progress)


def interpolated(logprobs: Tensor, behavior: Tensor, share: Tensor) -> Tensor:
    """log μ + α·(log π - log μ), [N], a constant: the proximal policy without a pass (arXiv 2512.06547, its
    interpolation of log-probabilities)."""
    return behavior + share * (logprobs.detach() - behavior)


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
