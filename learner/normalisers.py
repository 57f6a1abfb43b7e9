"""What a correction or a loss has to know of all tokens of an optimizer step before it is made.

Called by `learner/step.py` on every rank; collective. Only the last pipeline stage has logprobs; what is
found is over its data-parallel ranks, and so the same whatever the layout and the micro-batches.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from learner import collectives, parallel
from learner.algorithm import AlgorithmConfig
from learner.corrections import correct, log_ratio
from learner.packing import MicroBatch
from learner.policy_losses import trusted_limit


def mean_weight(micro_batches: Sequence[MicroBatch], algorithm: AlgorithmConfig) -> float:
    """Mean of the correction's weights over the tokens that it keeps; 1 if it keeps none."""
    mine = weight_sums(micro_batches if parallel.is_last_stage() else (), algorithm)
    weights, tokens = collectives.from_last_stage(collectives.sum_over_data(mine))
    return weights / tokens if weights else 1.0


def trusted_tokens(
    micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor], second_moment: float
) -> list[Tensor]:
    """Of each micro-batch, which tokens loss m2po trains, bool [N]; on the last stage only.

    Only tokens of its trust region can be left out, and only their squares count: those that the update would
    drive further from the sampler, A > 0 with π > μ or A < 0 with π < μ (arXiv 2510.01161, algorithm 1). One
    that leads back towards it is trained however far off it is.

    Args:
        micro_batches: Of this rank, with their final advantages.
        logprobs: log π of the weights that are about to be trained, float32 [N] of each micro-batch; none but
            on the last stage.
        second_moment: Of log π/μ, over what is trained of the trust region, of the global batch.
    """
    if not parallel.is_last_stage():
        return []
    pairs = list(zip(micro_batches, logprobs, strict=True))
    logs = [found - batch.behavior_logprobs for batch, found in pairs]
    away = [(b.weights > 0) & (b.advantages * of > 0) for of, (b, _) in zip(logs, pairs, strict=True)]
    squares = torch.cat([of[held] ** 2 for of, held in zip(logs, away, strict=True)])
    limit = trusted_limit(collectives.numbers_over_data(squares), second_moment)
    return [~held | (of**2 <= limit) for of, held in zip(logs, away, strict=True)]


def weight_sums(micro_batches: Iterable[MicroBatch], algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Sum of the weights of the tokens that the correction keeps, and how many those are.

    Args:
        micro_batches: With proximal logprobs.
    """
    weights = tokens = 0.0
    for batch in micro_batches:
        assert batch.proximal_logprobs is not None
        log_rho = log_ratio(batch.proximal_logprobs, batch.behavior_logprobs)
        sequences = torch.unique(batch.sequence_index, return_inverse=True)[1]
        correction = correct(
            log_rho, batch.advantages, sequences, algorithm.correction, algorithm.weight_level
        )
        weights += float((correction.weight * batch.weights).double().sum())
        tokens += float((correction.keep * batch.weights).double().sum())
    return weights, tokens
