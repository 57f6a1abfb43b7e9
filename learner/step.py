"""One batch into one update of the policy, and of its value model, through Megatron's schedules.

Called by `learner/loop.py` on every rank with its data-parallel shard; every call is collective. Ranks of one
model copy (tensor and pipeline) hold the same shard and so make the same micro-batches in the same order.
"""

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffer.dotted import is_dotted
from buffer.records import Batch, Group
from learner import collectives, parallel
from learner.advantages import Moments, Rewards, advantages, clipped, moments
from learner.config import LearnerExperiment
from learner.critic import Critic
from learner.losses import (
    METRICS,
    PAIR_METRICS,
    Denominators,
    Metrics,
    Ranking,
    adapted,
    kl,
    objective,
    pair_objective,
)
from learner.metrics import StepReport, ValueReport
from learner.offline.packing import ExampleBatch
from learner.optimizer import Trainable, learning_rate, set_rates
from learner.packing import MicroBatch, empty, pack
from learner.passes import equal_counts, reduce_sums, run_schedule, target_logprobs
from learner.ptx import TextPart, TextReport, Texts
from learner.returns import gae, token_moments, token_rewards, whiten


@dataclass(slots=True)
class _Part:
    """What one optimizer step trains on: micro-batches of this rank, denominators of all."""

    micro_batches: list[MicroBatch]
    total: Denominators
    ranking: Ranking
    """Of what `sequence_index` counts, on this rank's device."""

    def fill(self, name: str, found: list[Tensor]) -> None:
        """Put what a model found into that field of every micro-batch; nothing but on the last stage."""
        if found:
            pairs = zip(self.micro_batches, found, strict=True)
            self.micro_batches = [replace(m, **{name: values}) for m, values in pairs]


class Updater:
    """The trainables' weights and moments, and the KL coefficient, are the state; the rest are references."""

    def __init__(
        self,
        experiment: LearnerExperiment,
        trainable: Trainable,
        reference: Any | None,
        critic: Critic | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Args:
        reference: The frozen model of the KL term, or of DPO; None where the loss has neither.
        critic: Of advantage gae.
        texts: Mixed into every optimizer step of the policy.
        """
        self._experiment = experiment
        self._algorithm = experiment.learner.algorithm
        self._trainable = trainable
        self._reference = reference
        self._critic = critic
        self._texts = texts
        self._temperature = experiment.rollout.sampling.temperature
        self._kl_coefficient = self._algorithm.kl.coefficient

    @property
    def value_trainable(self) -> Trainable | None:
        return self._critic.trainable if self._critic is not None else None

    def position(self) -> dict[str, Any]:
        """What a checkpoint holds of the updater itself, plain JSON."""
        texts = {"ptx": self._texts.position} if self._texts is not None else {}
        return {"kl_coefficient": self._kl_coefficient, **texts}

    def restore(self, position: dict[str, Any]) -> None:
        """Go on from a checkpoint's `position`. A fixed coefficient is the configuration's."""
        if self._algorithm.kl.target is not None:
            self._kl_coefficient = float(position.get("kl_coefficient", self._kl_coefficient))
        if self._texts is not None and "ptx" in position:
            self._texts.seek(position["ptx"])

    def update(self, shard: Batch) -> StepReport:
        """Train batch `shard.index`; the policy's version is that index plus 1 afterwards.

        Raises:
            ValueError: A reward or logprob that is not finite, or a malformed trajectory, with its place.
        """
        learner = self._experiment.learner
        started = time.perf_counter()
        parts = self._parts(shard)
        self._fill_logprobs(parts)
        rate = learning_rate(learner.optimizer, shard.index, learner.steps)
        set_rates(self._trainable.optimizer, rate, learner.optimizer)
        beta = self._algorithm.dpo.beta if self._compares_pairs else None
        report = StepReport(lr=rate, kl_coefficient=self._kl_coefficient, beta=beta)
        report.ptx = TextReport() if self._texts is not None else None
        if self._critic is not None:
            report.value = self._critic.begin(shard.index)
        if self._algorithm.per_token:
            self._estimate(parts, report.value)
        for part in parts:
            report.tied_groups += int(part.total.tied_groups)
            if not part.total.tokens:
                continue
            sums = self._forward_backward(part, report.ptx)
            report.forward_backward_seconds += time.perf_counter() - started
            started = time.perf_counter()
            norm, made = self._trainable.step(learner.optimizer.clip_grad)
            report.add(sums, norm, made)
            report.trained_tokens += int(part.total.tokens)
            report.completions += int(part.total.sequences)
            report.optimizer_seconds += time.perf_counter() - started
            if self._critic is not None and report.value is not None:
                self._critic.update(part.micro_batches, part.total, report.value)
            started = time.perf_counter()
        self._move_coefficient(report)
        return report

    def _parts(self, shard: Batch) -> list[_Part]:
        learner, algorithm = self._experiment.learner, self._algorithm
        given = [np.array([t.reward for t in g.trajectories], np.float64) for g in shard.groups]
        rewards = clipped(given, algorithm.reward_clip)
        if self._compares_pairs:
            values = [has_pair(g, r) for g, r in zip(shard.groups, rewards, strict=True)]
        else:
            batch = Moments(*collectives.sum_over_data(astuple(moments(rewards))))
            values = advantages(algorithm.advantage, rewards, batch)
        digests = [_digest(g) for g in shard.groups]
        homes = update_of_groups(collectives.digests_over_data(digests), learner.updates_per_batch)
        parts = []
        for number in range(learner.updates_per_batch):
            mine = [i for i, digest in enumerate(digests) if homes[digest] == number]
            groups = [shard.groups[i] for i in mine]
            # A group with equal rewards has nothing to teach: no pass over it changes the gradient. With
            # tokens of different advantages it has, and a loss of the user's may.
            own = is_dotted(algorithm.loss)
            only_moving = not (algorithm.kl.coefficient or algorithm.entropy or algorithm.per_token or own)
            budget, chosen = learner.tokens_per_microbatch, [values[i] for i in mine]
            micro_batches = pack(groups, chosen, budget, only_moving, whole_groups=self._compares_pairs)
            ranking = _ranking([rewards[i] for i in mine])
            total = self._denominators(groups, chosen)
            parts.append(_Part(equal_counts(micro_batches, empty()), total, ranking))
        return parts

    def _denominators(self, groups: list[Group], values: list[Rewards]) -> Denominators:
        """Of all trained tokens, also those whose loss is zero without being computed; of online DPO, of the
        groups that have a pair."""
        paired = [g for g, v in zip(groups, values, strict=True) if v.any()] if self._compares_pairs else []
        counted = paired if self._compares_pairs else groups
        counts = [int(t.loss_mask.sum()) for group in counted for t in group.trajectories]
        tied = len(groups) - len(paired)
        found = collectives.sum_over_data([sum(counts), sum(n > 0 for n in counts), len(paired), tied])
        tokens, sequences, *pairing = found
        return Denominators(tokens, sequences, self._experiment.model.max_length, *pairing)

    def _fill_logprobs(self, parts: list[_Part]) -> None:
        """Those of the reference and of the proximal policy, where they are needed before the updates."""
        models = {}
        if self._reference is not None:
            models["reference_logprobs"] = self._reference
        # With one update the training pass itself is the proximal policy's; DPO has none in its loss.
        several = self._experiment.learner.updates_per_batch > 1 and not self._compares_pairs
        if several or self._rewards_proximal:
            models["proximal_logprobs"] = self._trainable.model
        for name, model in models.items():
            for part in parts:
                part.fill(name, target_logprobs(model, part.micro_batches, self._temperature))

    @property
    def _compares_pairs(self) -> bool:
        return self._algorithm.loss == "dpo"

    @property
    def _rewards_proximal(self) -> bool:
        """Whether KL in the reward is the proximal policy's; with `bypass` the behavior policy stands in."""
        return self._algorithm.kl.placement == "reward" and self._algorithm.correction.kind == "decoupled"

    def _estimate(self, parts: list[_Part], report: ValueReport | None) -> None:
        """Give every token its advantage, and its return where there is a value model.

        Only the last pipeline stage has what that takes, and only it needs them.
        """
        if self._critic is not None:
            for part in parts:
                part.fill("old_values", self._critic.values(part.micro_batches))
        if parallel.is_last_stage():
            for part in parts:
                part.micro_batches = [self._estimated(m, part.ranking.rewards) for m in part.micro_batches]
        all_of_them = [m for part in parts for m in part.micro_batches]
        found = [token_moments((m.advantages, m.weights) for m in all_of_them)]
        valued = [(m.returns, m.old_values, m.weights) for m in all_of_them]
        found += [
            token_moments((r, w) for r, v, w in valued if r is not None),
            token_moments((r - v, w) for r, v, w in valued if r is not None and v is not None),
        ]
        mine = [number for of in found for number in astuple(of)]
        sums = collectives.from_last_stage(collectives.sum_over_data(mine))
        batch, returns, errors = (Moments(*sums[i : i + 3]) for i in (0, 3, 6))
        if not math.isfinite(batch.total_squares):
            raise ValueError(
                "the batch's advantages are not finite: a logprob or a value of the value model is not; "
                "lower learner.value.optimizer.lr if value/loss grew before"
            )
        for part in parts:
            part.fill("advantages", [whiten(m.advantages, batch) for m in part.micro_batches])
        if report is not None:
            report.returns, report.errors = returns, errors

    def _estimated(self, batch: MicroBatch, scores: Tensor) -> MicroBatch:
        """With advantages before whitening, and returns."""
        penalty = None
        if self._algorithm.kl.placement == "reward":
            old = batch.proximal_logprobs if self._rewards_proximal else batch.behavior_logprobs
            assert old is not None
            assert batch.reference_logprobs is not None
            penalty = self._kl_coefficient * kl(old, batch.reference_logprobs, self._algorithm.kl.estimate)
        rewards = token_rewards(scores, batch.sequence_index, penalty)
        if self._critic is None or batch.old_values is None:
            still_to_come, _ = gae(rewards, torch.zeros_like(rewards), batch.sequence_index, 1.0, 1.0)
            return replace(batch, advantages=still_to_come.float())
        of = self._critic.config
        found, returns = gae(rewards, batch.old_values, batch.sequence_index, of.gamma, of.gae_lambda)
        return replace(batch, advantages=found.float(), returns=returns.float())

    def _move_coefficient(self, report: StepReport) -> None:
        of = self._algorithm.kl
        if of.target is not None and report.completions:
            self._kl_coefficient = adapted(
                self._kl_coefficient, report.divergence, report.completions, of.target, of.horizon
            )

    def _forward_backward(self, part: _Part, report: TextReport | None) -> dict[str, float]:
        """Gradients of the objective, and of the texts, in one run of the schedule: it ends with the sum over
        the data-parallel ranks, which must not be made twice."""
        in_loss = self._kl_coefficient if self._algorithm.kl.placement == "loss" else 0.0
        mixed = (
            self._texts.next(report) if self._texts is not None and report is not None else TextPart([], 0)
        )

        def measure(batch: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Metrics]:
            if self._texts is not None and isinstance(batch, ExampleBatch):
                return self._texts.objective(output[0], batch, mixed)
            if self._compares_pairs:
                return pair_objective(*output, batch, self._algorithm, part.total, part.ranking)
            return objective(*output, batch, self._algorithm, part.total, in_loss)

        self._trainable.model.zero_grad_buffer()
        self._trainable.optimizer.zero_grad()
        count = len(part.micro_batches)
        temperatures = [self._temperature] * count + [1.0] * len(mixed.micro_batches)
        both = [*part.micro_batches, *mixed.micro_batches]
        balance = self._experiment.learner.expert_balance
        found = run_schedule(self._trainable.model, both, measure, False, temperatures, balance)
        if mixed.tokens and report is not None:
            report.losses.append(reduce_sums(found[count:], ("loss",))["loss"])
        return reduce_sums(found[:count], PAIR_METRICS if self._compares_pairs else METRICS)


def update_of_groups(digests: Iterable[bytes], updates: int) -> dict[bytes, int]:
    """Which optimizer step of the batch trains which group, by digests of the ids of the whole batch.

    Evenly many each, in the digests' order: the same for every layout.
    """
    ordered = sorted(set(digests))
    return {digest: place * updates // len(ordered) for place, digest in enumerate(ordered)}


def has_pair(group: Group, rewards: Rewards) -> Rewards:
    """1 for every trajectory of a group of which two with a trained token differ in their rewards, else 0."""
    compared = {r for t, r in zip(group.trajectories, rewards.tolist(), strict=True) if t.loss_mask.any()}
    return np.full_like(rewards, len(compared) > 1)


def _ranking(rewards: list[Rewards]) -> Ranking:
    # An empty micro-batch counts from 0 too, so there is always one.
    joined = np.concatenate(rewards) if rewards else np.zeros(1)
    groups = np.repeat(np.arange(len(rewards)), [len(r) for r in rewards]) if rewards else np.zeros(1, int)
    device = parallel.device()
    return Ranking(torch.from_numpy(joined).to(device), torch.from_numpy(groups).to(device))


def _digest(group: Group) -> bytes:
    return hashlib.blake2b(group.group_id.encode(), digest_size=collectives.DIGEST_BYTES).digest()
