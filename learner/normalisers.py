"""What a correction or a loss has to know of all tokens of an optimizer step before it is made.

Called by `learner/step.py` on every rank; collective. Only the last pipeline stage has logprobs; sums are over
its data-parallel ranks, so what is found is the same whatever the layout and the micro-batches.
"""

from collections.abc import Iterable, Sequence

import torch

from learner import collectives, parallel
from learner.algorithm import AlgorithmConfig
from learner.corrections import correct, log_ratio
from learner.packing import MicroBatch


def mean_weight(micro_batches: Sequence[MicroBatch], algorithm: AlgorithmConfig) -> float:
    """Mean of the correction's weights over the tokens that it keeps; 1 if it keeps none."""
    mine = weight_sums(micro_batches if parallel.is_last_stage() else (), algorithm)
    weights, tokens = collectives.from_last_stage(collectives.sum_over_data(mine))
    return weights / tokens if weights else 1.0


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
        correction = correct(log_rho, sequences, algorithm.correction, algorithm.weight_level)
        weights += float((correction.weight * batch.weights).double().sum())
        tokens += float((correction.keep * batch.weights).double().sum())
    return weights, tokens
