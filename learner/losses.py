"""The objective: policy loss, distance to the reference, entropy bonus, and what is logged of them.

Shapes: N trained tokens of one micro-batch. Pure functions of tensors and floats. A micro-batch's loss is its
part of the mean over the global batch (denominators are given), so parts simply add up over micro-batches and
data-parallel ranks. So do the metrics.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithm import AlgorithmConfig, Estimator
from learner.correction_config import CAP
from learner.corrections import (
    LOG_RATIO_LIMIT,
    correct,
    interpolated,
    log_ratio,
    refuse_non_finite,
    sampling_weight,
)
from learner.packing import MicroBatch, ValueBatch
from learner.policy_losses import gradient_ratio, policy_loss
from learner.preference import PAIR_SUMS, over_pairs, pair_loss, sum_by_response

Metrics = dict[str, Tensor]
METRICS = (
    "rho", "rho_squares", "behavior_k1", "behavior_k3", "entropy", "clipped", "masked", "vetoed", "capped",
    "reference_kl", "reference_k1", "rho_bounded", "weight", "weight_squares", "tokens", "loss", "rho_max",
    "inverse_rho_max",
)  # fmt: skip
"""They add up, but for those in `_max`, of which the largest counts."""
PAIR_METRICS = tuple(dict.fromkeys((*METRICS, *PAIR_SUMS)))
"""Of online DPO."""
LARGEST_ERROR = 0.2
"""How far off its target, as a share of it, the adaptive coefficient takes the divergence to be at most."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Of the global batch that one optimizer step trains on, over all data-parallel ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Trajectories with at least one trained token."""
    max_length: int
    """Longest sequence there may be, in tokens."""
    groups: float = 0.0
    """Groups with two different rewards; of online DPO, which trains on no others."""
    tied_groups: float = 0.0
    """Of online DPO: the others."""
    mean_weight: float = 1.0
    """Of the correction's weights over the tokens that it keeps; 1 where they are not normalised."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """What `sequence_index` counts, B completions, as online DPO compares them."""

    rewards: Tensor
    """float64 [B]: total rewards."""
    groups: Tensor
    """int64 [B]: which group each belongs to."""


def objective(
    logprobs: Tensor,
    entropy: Tensor,
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    total: Denominators,
    kl_coefficient: float,
) -> tuple[Tensor, Metrics]:
    """A micro-batch's part of the loss, and its part of the metrics.

    Each part's source is with its function; the entropy bonus is A3C's (arXiv 1602.01783, its regularisation
    by the policy's entropy).

    Args:
        logprobs: float32 [N], log π of the targets at the sampling temperature.
        entropy: float32 [N], of π at the targets' positions.
        batch: Its proximal logprobs and share may be None: then this pass is the proximal policy.
        kl_coefficient: Of the loss term, at this step; 0 where the distance is in the reward.

    Raises:
        NonFiniteLogprob: Names whose logprob it is, and where.
        ValueError: A loss of the user's that is not one number a token.
    """
    behavior = batch.behavior_logprobs
    proximal = proximal_logprobs(logprobs, batch)
    for values, whose in ((behavior, "behavior"), (logprobs, "learner"), (proximal, "proximal")):
        refuse_non_finite(values, whose, batch.sequence_index, batch.target_ids)
    sequences = torch.unique(batch.sequence_index, return_inverse=True)[1]
    log_rho = log_ratio(proximal, behavior)
    correction = correct(
        log_rho, batch.advantages, sequences, algorithm.correction, algorithm.weight_level, total.mean_weight
    )
    old = proximal if algorithm.correction.kind == "decoupled" else behavior
    policy, clipped = lost = policy_loss(logprobs, old, sequences, batch, algorithm)
    per_token = correction.weight * policy
    if algorithm.entropy:  # over the whole vocabulary, so whoever sampled the token plays no part
        per_token = per_token - correction.keep * algorithm.entropy * entropy
    metrics: Metrics = dict.fromkeys(("reference_kl", "reference_k1"), torch.zeros_like(log_rho))
    if batch.reference_logprobs is not None:
        refuse_non_finite(batch.reference_logprobs, "reference", batch.sequence_index, batch.target_ids)
        distance = kl(logprobs, batch.reference_logprobs, algorithm.kl.estimate)
        if kl_coefficient:
            # Not the policy loss's weight, which is 1 where the ratio is in that loss or A > 0 with a taper.
            weight = correction.keep * sampling_weight(logprobs, behavior, algorithm.correction.cap)
            per_token = per_token + weight * kl_coefficient * distance
        metrics["reference_kl"] = distance
        metrics["reference_k1"] = divergence(logprobs, behavior, batch.reference_logprobs)
    loss = aggregate(per_token, batch.weights, sequences, algorithm.aggregation, total)
    metrics |= {
        "entropy": entropy,
        "clipped": clipped.float() * correction.keep,
        "masked": correction.masked.float(),
        "vetoed": correction.vetoed.float(),
        "capped": correction.capped.float(),
        "weight": correction.weight * gradient_ratio(logprobs, old, sequences, batch, lost, algorithm),
    }
    return loss, _summed(loss, log_rho, metrics, batch)


def proximal_logprobs(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Of the policy that ρ is of, [N], a constant: as computed before the updates, or estimated from this
    pass, or this pass's own."""
    if batch.proximal_logprobs is not None:
        return batch.proximal_logprobs
    if batch.proximal_share is not None:
        return interpolated(logprobs, batch.behavior_logprobs, batch.proximal_share)
    return logprobs.detach()


def pair_objective(
    logprobs: Tensor,
    entropy: Tensor,
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    total: Denominators,
    ranking: Ranking,
) -> tuple[Tensor, Metrics]:
    """Online DPO: a micro-batch's part of the loss over pairs, and its part of PAIR_METRICS.

    A completion's value is Σ log π / π_ref over its trained tokens; every ordered pair of a group's
    completions whose rewards differ is a preference (arXiv 2305.18290, equation 7, on pairs as in
    arXiv 2402.04792). The behavior logprobs are only measured: no ratio to them is in the loss.

    Args:
        logprobs: float32 [N], log π of the targets at the sampling temperature.
        entropy: float32 [N], measured too.
        batch: With reference logprobs; every group in it is whole.
        total: With its number of groups.
        ranking: Of all completions that `batch.sequence_index` may name.

    Raises:
        NonFiniteLogprob: Names whose logprob it is, and where.
    """
    behavior, reference = batch.behavior_logprobs, batch.reference_logprobs
    assert reference is not None
    for values, whose in ((behavior, "behavior"), (logprobs, "learner"), (reference, "reference")):
        refuse_non_finite(values, whose, batch.sequence_index, batch.target_ids)
    found, responses = torch.unique(batch.sequence_index, return_inverse=True)
    values = sum_by_response((logprobs - reference) * batch.weights, responses, len(found))
    rewards, groups = ranking.rewards[found], ranking.groups[found]
    loss, pair_sums = over_pairs(values, rewards, groups, pair_loss(algorithm.dpo), total.groups)
    nothing = torch.zeros_like(entropy)
    metrics: Metrics = {
        "reference_kl": kl(logprobs, reference, algorithm.kl.estimate),
        "reference_k1": divergence(logprobs, behavior, reference),
        "entropy": entropy,
        **dict.fromkeys(("clipped", "masked", "vetoed", "capped"), nothing),
        "weight": torch.ones_like(entropy),
    }
    return loss, _summed(loss, log_ratio(logprobs.detach(), behavior), metrics, batch) | pair_sums


def _summed(loss: Tensor, log_rho: Tensor, per_token: Metrics, batch: MicroBatch) -> Metrics:
    """METRICS of a micro-batch, from what is known of its tokens."""
    rho = log_rho.exp()
    metrics: Metrics = {
        "rho": rho,
        "rho_squares": rho**2,
        "rho_bounded": rho.clamp(max=CAP),
        "behavior_k1": -log_rho,
        # expm1 keeps the digits that rho - 1 loses when the policies agree.
        "behavior_k3": torch.expm1(log_rho) - log_rho,
        "tokens": torch.ones_like(rho),
        **per_token,
        "weight_squares": per_token["weight"].double() ** 2,
    }
    sums = {name: (values.detach() * batch.weights).double().sum() for name, values in metrics.items()}
    sums["rho_max"] = (rho * batch.weights).max().double()
    # Of the least ρ, so that what is there only to fill up has 0 here too.
    inverse = (-log_rho).clamp(max=LOG_RATIO_LIMIT).exp()
    sums["inverse_rho_max"] = (inverse * batch.weights).max().double()
    sums["loss"] = loss.detach().double()
    return sums


def value_objective(
    values: Tensor, batch: MicroBatch | ValueBatch, clip: float, total: Denominators
) -> tuple[Tensor, Metrics]:
    """A micro-batch's part of the value model's loss, a mean over tokens, and of its metrics.

    ½·max((V - R)², (clip(V, V_old - c, V_old + c) - R)²): past the band a value gains nothing by coming
    closer to its return, and is still driven back where it moved away (value loss clipping: Huang et al., The
    37 Implementation Details of PPO, ICLR blog track 2022, detail 9).

    Args:
        values: float32 [N], V of the targets' states.
        batch: With old values and returns.
        clip: c.
        total: Of it the tokens count.
    """
    assert batch.old_values is not None
    assert batch.returns is not None
    moved = values - batch.old_values
    limited = batch.old_values + moved.clamp(-clip, clip)
    plain, held = (values - batch.returns) ** 2, (limited - batch.returns) ** 2
    loss = aggregate(0.5 * torch.maximum(plain, held), batch.weights, batch.sequence_index, "token", total)
    return loss, {
        "loss": loss.detach().double(),
        # Inside the band the two differ in their last digit at most.
        "clipped": (((held > plain) & (moved.abs() > clip)) * batch.weights).double().sum(),
        "tokens": batch.weights.double().sum(),
    }


def adapted(
    coefficient: float, divergence: float, completions: float, target: float, horizon: float
) -> float:
    """The next step's KL coefficient, β·(1 + clip(KL / target - 1, ±0.2)·completions / horizon).

    Args:
        divergence: KL(π ‖ reference) of one completion, in nats, over the last batch.
        completions: In that batch; at most `horizon`.

    Source: arXiv 1909.08593, section 2.2, with its K_β as completions / horizon.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * completions / horizon)


def divergence(logprobs: Tensor, behavior: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate [N] of KL(π ‖ reference), π/μ · (log π - log π_ref), from samples of μ.

    Without the weight it would be KL(μ ‖ reference) - KL(μ ‖ π), which falls when π leaves both.
    """
    return log_ratio(logprobs, behavior).exp() * (logprobs - reference)


def kl(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate [N] of KL(π ‖ reference) from samples of π; joschu.net/blog/kl-approx.html.

    Samples of another policy need a weight.

    As a loss k1's gradient is zero in expectation, k2's is that of KL(π ‖ reference), and k3's that of
    KL(reference ‖ π).
    """
    distance = logprobs - reference
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return 0.5 * distance**2
    return torch.expm1(log_ratio(reference, logprobs)) + distance


def aggregate(
    per_token: Tensor,
    weights: Tensor,
    sequences: Tensor,
    how: Literal["token", "sequence", "constant"],
    total: Denominators,
) -> Tensor:
    """This micro-batch's part of the mean over the global batch.

    Args:
        per_token: [N].
        weights: [N], 0 for what is there only to fill up.
        sequences: int64 [N], 0 to B - 1; each sequence lies wholly in this micro-batch.
        how: `token` divides by the batch's tokens (DAPO, arXiv 2503.14476, section 3.3); `sequence` takes the
            mean over sequences of each one's token mean (GRPO, arXiv 2402.03300, equation 3); `constant`
            divides by sequences · max_length (Dr.GRPO, arXiv 2503.20783, section 3.2).
    """
    if how == "token":
        return (per_token * weights).sum() / total.tokens
    if how == "constant":
        return (per_token * weights).sum() / (total.sequences * total.max_length)
    lengths = torch.bincount(sequences, weights=weights).clamp(min=1)
    return (per_token * weights / lengths[sequences]).sum() / total.sequences
