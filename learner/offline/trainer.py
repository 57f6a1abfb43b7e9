"""One step's examples into one update, held-out examples into an evaluation, by Megatron's schedules.

Every call is collective; ranks of one model copy hold the same examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from learner import collectives
from learner.offline.config import OfflineLearnerConfig
from learner.offline.encoding import Encoded
from learner.offline.packing import ExampleBatch, empty, pack
from learner.offline.stages import Row, Stage
from learner.optimizer import Trainable, learning_rate, set_rates
from learner.passes import equal_counts, reduce_sums, run_schedule
from learner.reference.local import Reference


@dataclass(frozen=True, slots=True)
class Prepared:
    """Examples laid out, with the reference's logprobs where the stage needs them."""

    micro_batches: list[ExampleBatch]
    """Of this rank; equally many on all."""
    total: float
    """The loss's denominator, over all ranks."""
    counts: Row
    """Examples, trained tokens and tokens of all ranks."""


class Trainer:
    """Owns nothing but references; the trainable's weights and moments are the state."""

    def __init__(
        self,
        config: OfflineLearnerConfig,
        stage: Stage,
        trainable: Trainable,
        reference: Reference | None,
        steps: int,
    ) -> None:
        """Args:
        steps: Of the run, for the learning rate's schedule.
        reference: The frozen initial model, where the stage needs one.
        """
        self._config = config
        self._stage = stage
        self._trainable = trainable
        self._reference = reference
        self._steps = steps

    def prepare(self, examples: Sequence[Encoded]) -> Prepared:
        """Lay examples out, those of this rank."""
        only_ends = self._stage.head == "score"
        packed = pack(examples, self._config.tokens_per_microbatch, only_ends)
        trained = sum(e.trained for e in examples)
        laid_out = sum(m.num_tokens for m in packed)
        size = sum(self._stage.size(e) for e in examples)
        total, *counts = collectives.sum_over_data([size, len(examples), trained, laid_out])
        micro_batches = equal_counts(packed, empty())
        if self._reference is not None:
            found = self._reference.logprobs(micro_batches)
            if found:
                pairs = zip(micro_batches, found, strict=True)
                micro_batches = [replace(m, reference_logprobs=logprobs) for m, logprobs in pairs]
        names = ("examples", "tokens", "all_tokens")
        return Prepared(micro_batches, total, {n: int(c) for n, c in zip(names, counts, strict=True)})

    def update(self, step: int, prepared: Prepared) -> Row:
        """Train step `step`, counted from 0; a step without examples changes nothing."""
        optimizer = self._config.optimizer
        rate = learning_rate(optimizer, step, self._steps)
        row: Row = {"lr": rate, "skipped_updates": 0, **prepared.counts}
        if not prepared.total:
            return row
        set_rates(self._trainable.optimizer, rate, optimizer)
        self._trainable.model.zero_grad_buffer()
        self._trainable.optimizer.zero_grad()
        row |= self._measured(prepared, forward_only=False)
        norm, made = self._trainable.step(optimizer.clip_grad)
        return row | {"grad_norm": norm, "skipped_updates": int(not made)}

    def evaluate(self, held_out: Prepared) -> Row:
        """The stage's numbers on these examples, without training on them."""
        return {f"eval/{name}": value for name, value in self._measured(held_out, forward_only=True).items()}

    def _measured(self, prepared: Prepared, forward_only: bool) -> Row:
        def measure(batch: ExampleBatch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return self._stage.objective(output, batch, prepared.total)

        balance = self._config.expert_balance
        found = run_schedule(
            self._trainable.model, prepared.micro_batches, measure, forward_only, balance=balance
        )
        return self._stage.row(reduce_sums(found, self._stage.sums))
