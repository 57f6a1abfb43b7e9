"""The value model of PPO: values before a batch's updates, and its own optimizer steps.

Called by `learner/step.py`, or where it has ranks of its own by `learner/value/service.py`; collective, with
the same micro-batches as the policy's.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from learner.apart.wire import VALUE_METRICS
from learner.checkpoint import ValueState
from learner.config import ValueConfig
from learner.layout import Layout
from learner.losses import Denominators, Metrics, value_objective
from learner.metrics import ValueReport
from learner.optimizer import Trainable, learning_rate, set_rates
from learner.packing import MicroBatch, ValueBatch
from learner.passes import reduce_sums, run_schedule


class ValueModel(Protocol):
    """Wherever it is. Every call is collective."""

    config: ValueConfig

    @property
    def state(self) -> ValueState:
        """What a checkpoint holds of it."""
        ...

    def begin(self, index: int, parts: Sequence[Sequence[MicroBatch]]) -> ValueReport:
        """Batch `index` comes, in these parts; the report is for its updates."""
        ...

    def values(self, micro_batches: Sequence[MicroBatch], report: ValueReport) -> list[Tensor]:
        """V of every micro-batch's targets, float32 [N] each, without gradients; on the last stage only."""
        ...

    def update(self, micro_batches: Sequence[MicroBatch], total: Denominators, report: ValueReport) -> None:
        """One optimizer step towards the micro-batches' returns; it may go on behind this call."""
        ...

    def end(self, report: ValueReport) -> None:
        """All updates of the batch are made when this returns, and in the report."""
        ...


class Critic:
    """Owns nothing but references; the trainable's weights and moments are the state."""

    def __init__(self, config: ValueConfig, trainable: Trainable, steps: int) -> None:
        """Args:
        trainable: Around a ScoreModel; its score at the position that predicts token t is V(s_t).
        steps: Of the run, for the learning rate's schedule.
        """
        self.config = config
        self.trainable = trainable
        self._steps = steps

    @property
    def state(self) -> Trainable:
        return self.trainable

    def begin(self, index: int, parts: Sequence[Sequence[MicroBatch]] = ()) -> ValueReport:
        """Set batch `index`'s learning rate."""
        optimizer = self.config.optimizer
        rate = learning_rate(optimizer, index, self._steps)
        set_rates(self.trainable.optimizer, rate, optimizer)
        return ValueReport(lr=rate)

    def values(self, micro_batches: Sequence[MicroBatch], report: ValueReport) -> list[Tensor]:
        return self.values_of(micro_batches)

    def values_of(self, micro_batches: Sequence[Layout]) -> list[Tensor]:
        """As `values`, of whatever it is."""

        def keep(batch: Layout, values: Tensor) -> tuple[Tensor, Tensor]:
            return values.detach().sum(), values.detach()

        return run_schedule(self.trainable.model, micro_batches, keep, True)

    def update(
        self, micro_batches: Sequence[MicroBatch | ValueBatch], total: Denominators, report: ValueReport
    ) -> None:
        def measure(batch: MicroBatch | ValueBatch, values: Any) -> tuple[Tensor, Metrics]:
            return value_objective(values, batch, self.config.clip, total)

        started = time.perf_counter()
        self.trainable.model.zero_grad_buffer()
        self.trainable.optimizer.zero_grad()
        found = run_schedule(self.trainable.model, micro_batches, measure, False)
        sums = reduce_sums(found, VALUE_METRICS)
        norm, made = self.trainable.step(self.config.optimizer.clip_grad)
        report.add(sums, norm, made)
        report.seconds += time.perf_counter() - started

    def end(self, report: ValueReport) -> None:
        """They are made already."""
