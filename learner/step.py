"""One batch into one update of the policy, through Megatron's schedules.

Called by `learner/loop.py` on every rank with its data-parallel shard; every call is collective. Ranks of one
model copy (tensor and pipeline) hold the same shard and so make the same micro-batches in the same order.
"""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from buffer.records import Batch, Group
from learner import collectives
from learner.advantages import Moments, advantages, moments
from learner.config import LearnerExperiment
from learner.losses import METRICS, Denominators, Metrics, objective
from learner.metrics import StepReport
from learner.optimizer import Trainable, apply_gradients, learning_rate, set_rates
from learner.packing import MicroBatch, empty, pack
from learner.passes import equal_counts, reduce_sums, run_schedule, target_logprobs


@dataclass(slots=True)
class _Part:
    """What one optimizer step trains on: micro-batches of this rank, denominators of all."""

    micro_batches: list[MicroBatch]
    total: Denominators


class Updater:
    """Owns nothing but references; the trainable's weights and moments are the state."""

    def __init__(self, experiment: LearnerExperiment, trainable: Trainable, reference: Any | None) -> None:
        """Args:
        reference: The frozen model of the KL term; None when its coefficient is 0.
        """
        self._experiment = experiment
        self._trainable = trainable
        self._reference = reference
        self._temperature = experiment.rollout.sampling.temperature

    def update(self, shard: Batch) -> StepReport:
        """Train batch `shard.index`; the policy's version is that index plus 1 afterwards.

        Raises:
            ValueError: A reward or logprob that is not finite, or a malformed trajectory, with its place.
        """
        learner = self._experiment.learner
        started = time.perf_counter()
        parts = self._parts(shard)
        if self._reference is not None:
            self._fill("reference_logprobs", self._reference, parts)
        if learner.updates_per_batch > 1:
            # With one update the training pass itself is the proximal policy's.
            self._fill("proximal_logprobs", self._trainable.model, parts)
        rate = learning_rate(learner.optimizer, shard.index, learner.steps)
        set_rates(self._trainable.optimizer, rate, learner.optimizer)
        report = StepReport(lr=rate)
        for part in parts:
            if not part.total.tokens:
                continue
            sums = self._forward_backward(part)
            report.forward_backward_seconds += time.perf_counter() - started
            started = time.perf_counter()
            norm, made = apply_gradients(self._trainable.optimizer, learner.optimizer.clip_grad)
            report.add(sums, norm, made)
            report.trained_tokens += int(part.total.tokens)
            report.optimizer_seconds += time.perf_counter() - started
            started = time.perf_counter()
        return report

    def _parts(self, shard: Batch) -> list[_Part]:
        learner = self._experiment.learner
        rewards = [np.array([t.reward for t in g.trajectories], np.float64) for g in shard.groups]
        mine = moments(rewards)
        batch = Moments(*collectives.sum_over_data([mine.count, mine.total, mine.total_squares]))
        values = advantages(learner.algorithm.advantage, rewards, batch)
        digests = [_digest(g) for g in shard.groups]
        homes = update_of_groups(collectives.digests_over_data(digests), learner.updates_per_batch)
        parts = []
        for number in range(learner.updates_per_batch):
            mine = [i for i, digest in enumerate(digests) if homes[digest] == number]
            groups = [shard.groups[i] for i in mine]
            # A group with equal rewards has nothing to teach: no pass over it changes the gradient.
            only_moving = not (learner.algorithm.kl.coefficient or learner.algorithm.entropy)
            budget = learner.tokens_per_microbatch
            micro_batches = pack(groups, [values[i] for i in mine], budget, only_moving)
            parts.append(_Part(equal_counts(micro_batches, empty()), self._denominators(groups)))
        return parts

    def _denominators(self, groups: list[Group]) -> Denominators:
        """Of all trained tokens, also those whose loss is zero without being computed."""
        counts = [int(t.loss_mask.sum()) for group in groups for t in group.trajectories]
        tokens, sequences = collectives.sum_over_data([sum(counts), sum(n > 0 for n in counts)])
        return Denominators(tokens, sequences, self._experiment.model.max_length)

    def _fill(self, name: str, model: Any, parts: list[_Part]) -> None:
        """Compute logprobs with `model`, without gradients, into that field of every micro-batch.

        Only the last pipeline stage has them, and only it needs them.
        """
        for part in parts:
            found = target_logprobs(model, part.micro_batches, self._temperature)
            if found:
                pairs = zip(part.micro_batches, found, strict=True)
                part.micro_batches = [replace(m, **{name: logprobs}) for m, logprobs in pairs]

    def _forward_backward(self, part: _Part) -> dict[str, float]:
        def measure(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Metrics]:
            return objective(*output, batch, self._experiment.learner.algorithm, part.total)

        self._trainable.model.zero_grad_buffer()
        self._trainable.optimizer.zero_grad()
        model, temperature = self._trainable.model, self._temperature
        found = run_schedule(model, part.micro_batches, measure, False, temperature)
        return reduce_sums(found, METRICS)


def update_of_groups(digests: Iterable[bytes], updates: int) -> dict[bytes, int]:
    """Which optimizer step of the batch trains which group, by digests of the ids of the whole batch.

    Evenly many each, in the digests' order: the same for every layout.
    """
    ordered = sorted(set(digests))
    return {digest: place * updates // len(ordered) for place, digest in enumerate(ordered)}


def _digest(group: Group) -> bytes:
    return hashlib.blake2b(group.group_id.encode(), digest_size=collectives.DIGEST_BYTES).digest()
