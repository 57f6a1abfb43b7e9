"""One batch into one update of the policy, and of its value model, through Megatron's schedules.

Called by `learner/loop.py` on every rank with its data-parallel shard; every call is collective. Ranks of one
model copy (tensor and pipeline) hold the same shard and so make the same micro-batches in the same order.
"""

import math
import time
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from buffer.records import Batch
from learner import collectives, parallel
from learner.advantages import Moments
from learner.checkpoint import ValueState
from learner.config import LearnerExperiment
from learner.corrections import proximal_share, ratio
from learner.critic import ValueModel
from learner.losses import METRICS, PAIR_METRICS, Metrics, adapted, kl, objective, pair_objective
from learner.metrics import StepReport, ValueReport
from learner.normalisers import mean_weight, trusted_tokens
from learner.offline.packing import ExampleBatch
from learner.optimizer import Trainable, learning_rate, set_rates
from learner.packing import MicroBatch
from learner.parts import Part, parts_of
from learner.passes import reduce_sums, run_schedule, target_logprobs
from learner.ptx import TextPart, TextReport, Texts
from learner.reference.local import ReferenceModel
from learner.returns import gae, token_moments, token_rewards, vtrace, whiten


class Updater:
    """The trainables' weights and moments, and the KL coefficient, are the state; the rest are references."""

    def __init__(
        self,
        experiment: LearnerExperiment,
        trainable: Trainable,
        reference: ReferenceModel | None,
        critic: ValueModel | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Args:
        reference: Of the KL term, or of DPO; None where the loss has neither.
        critic: Of advantage gae.
        texts: Mixed into every optimizer step of the policy.
        """
        self._experiment = experiment
        self._algorithm = experiment.algorithm
        self._trainable = trainable
        self._reference = reference
        self._critic = critic
        self._texts = texts
        self._temperature = experiment.rollout.sampling.temperature
        self._kl_coefficient = self._algorithm.kl.coefficient

    @property
    def value_state(self) -> ValueState | None:
        """Of the value model, where there is one."""
        return self._critic.state if self._critic is not None else None

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
        parts = parts_of(shard, self._experiment)
        value = self._critic.begin(shard.index, [p.micro_batches for p in parts]) if self._critic else None
        self._fill_logprobs(parts)
        rate = learning_rate(learner.optimizer, shard.index, learner.steps)
        set_rates(self._trainable.optimizer, rate, learner.optimizer)
        beta = self._algorithm.dpo.beta if self._compares_pairs else None
        report = StepReport(lr=rate, kl_coefficient=self._kl_coefficient, beta=beta)
        report.ptx = TextReport() if self._texts is not None else None
        report.value = value
        if self._algorithm.per_token:
            self._estimate(parts, report.value)
        updates = 0
        for part in parts:
            report.tied_groups += int(part.total.tied_groups)
            if not part.total.tokens:
                continue
            if self._critic is not None and report.value is not None:
                # Before the policy's pass: on ranks of its own it trains while that goes on.
                began = time.perf_counter()
                self._critic.update(part.micro_batches, part.total, report.value)
                started += time.perf_counter() - began
            self._prepare(part, shard.index, updates / len(parts))
            sums = self._forward_backward(part, report.ptx)
            report.forward_backward_seconds += time.perf_counter() - started
            started = time.perf_counter()
            norm, made = self._trainable.step(learner.optimizer.clip_grad)
            updates += made
            report.add(sums, norm, made)
            report.trained_tokens += int(part.total.tokens)
            report.completions += int(part.total.sequences)
            report.optimizer_seconds += time.perf_counter() - started
            started = time.perf_counter()
        if self._critic is not None and report.value is not None:
            self._critic.end(report.value)
        self._move_coefficient(report)
        if self._reference is not None:
            report.reference_seconds = self._reference.seconds()
        return report

    def _fill_logprobs(self, parts: list[Part]) -> None:
        """Those of the reference are asked for; those of the proximal policy found, where they are needed
        before the updates."""
        if self._reference is not None:
            asked = self._reference.ask([part.micro_batches for part in parts], self._temperature)
            for part, logprobs in zip(parts, asked, strict=True):
                part.reference = logprobs
        if self._experiment.learner.proximal_pass:
            for part in parts:
                found = target_logprobs(self._trainable.model, part.micro_batches, self._temperature)
                part.fill("proximal_logprobs", found)

    def _prepare(self, part: Part, index: int, progress: float) -> None:
        """What correction and loss have to know of the global batch before this optimizer step.

        Args:
            index: Of the batch.
            progress: Share of its optimizer steps that have been made.
        """
        correction = self._algorithm.correction
        if correction.proximal == "interpolated" and progress:
            shares = [proximal_share(m.versions, index, progress) for m in part.micro_batches]
            part.fill("proximal_share", shares)
        if correction.normalize:
            part.total = replace(part.total, mean_weight=mean_weight(part.micro_batches, self._algorithm))
        if self._algorithm.loss == "m2po":
            found = target_logprobs(self._trainable.model, part.micro_batches, self._temperature)
            limit = self._algorithm.m2po.second_moment
            part.fill("trusted", trusted_tokens(part.micro_batches, found, limit))

    @property
    def _compares_pairs(self) -> bool:
        return self._algorithm.loss == "dpo"

    def _estimate(self, parts: list[Part], report: ValueReport | None) -> None:
        """Give every token its advantage, and its return where there is a value model.

        Only the last pipeline stage has what that takes, and only it needs them.
        """
        if self._critic is not None and report is not None:
            for part in parts:
                part.fill("old_values", self._critic.values(part.micro_batches, report))
        if parallel.is_last_stage():
            for part in parts:
                if part.reference is not None:
                    part.fill("reference_logprobs", list(part.reference))
                    part.reference = None
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
            old = batch.proximal_logprobs if self._algorithm.rewards_proximal else batch.behavior_logprobs
            assert old is not None
            assert batch.reference_logprobs is not None
            penalty = self._kl_coefficient * kl(old, batch.reference_logprobs, self._algorithm.kl.estimate)
        rewards = token_rewards(scores, batch.sequence_index, penalty)
        if self._critic is None or batch.old_values is None:
            still_to_come, _ = gae(rewards, torch.zeros_like(rewards), batch.sequence_index, 1.0, 1.0)
            return replace(batch, advantages=still_to_come.float())
        of = self._critic.config
        values, sequences = batch.old_values, batch.sequence_index
        if of.targets == "gae":
            found, returns = gae(rewards, values, sequences, of.gamma, of.gae_lambda)
        else:
            assert batch.proximal_logprobs is not None
            rho = ratio(batch.proximal_logprobs, batch.behavior_logprobs)
            found, returns = vtrace(
                rewards, values, rho, sequences, of.gamma, of.gae_lambda, of.rho_bar, of.c_bar
            )
        return replace(batch, advantages=found.float(), returns=returns.float())

    def _move_coefficient(self, report: StepReport) -> None:
        of = self._algorithm.kl
        if of.target is not None and report.completions:
            self._kl_coefficient = adapted(
                self._kl_coefficient, report.divergence, report.completions, of.target, of.horizon
            )

    def _forward_backward(self, part: Part, report: TextReport | None) -> dict[str, float]:
        """Gradients of the objective, and of the texts, in one run of the schedule: it ends with the sum over
        the data-parallel ranks, which must not be made twice."""
        in_loss = self._kl_coefficient if self._algorithm.kl.placement == "loss" else 0.0
        mixed = (
            self._texts.next(report) if self._texts is not None and report is not None else TextPart([], 0)
        )

        def measure(batch: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Metrics]:
            if self._texts is not None and isinstance(batch, ExampleBatch):
                return self._texts.objective(output[0], batch, mixed)
            if part.reference is not None:
                batch = replace(batch, reference_logprobs=next(part.reference))
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
