"""The value model on ranks of its own, as the learner's ranks see it: `learner/critic.py` at a distance.

    tensor rank 0 of the last pipeline stage ──micro-batches──────────────────▶ value model
                                             ◀──values─────────────────────────
                                             ──the same, old values, returns──▶   one optimizer step
                                             ◀──loss, gradient's norm──────────

One rank of each model copy asks: for the values of a batch before the learner's own first pass over it, and
for each update before the policy's, so that both models compute at the same time. The report waits for what
came of the updates.
"""

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import Refusal
from learner import collectives, parallel
from learner.apart.layouts import work_of
from learner.apart.waiting import await_all, on_tensor_ranks
from learner.apart.wire import VALUE, VALUE_METRICS, Answer
from learner.config import ValueConfig
from learner.line import Line
from learner.losses import Denominators
from learner.metrics import ValueReport
from learner.optimizer import learning_rate
from learner.packing import MicroBatch
from learner.value.client import ValueClient

WHOM = "value model"
FOUND = VALUE.verbs["train"].answers
"""What is told of an update."""


T = TypeVar("T")


class CriticRanks:
    """As `critic.ValueModel`, and as `checkpoint.ValueElsewhere`. Every call is collective."""

    def __init__(
        self,
        config: ValueConfig,
        line: Line[ValueClient] | None,
        stopping: Callable[[], bool],
        session: str,
        steps: int,
    ) -> None:
        """Args:
        line: On ranks that ask; None elsewhere.
        stopping: Whether this process was told to stop.
        session: Of this start of the learner, the same on all ranks.
        steps: Of the run, for the learning rate's schedule.
        """
        self.config = config
        self._line = line
        self._stopping = stopping
        self._session = session
        self._steps = steps
        self._made = 0
        """Updates since the start of the learner."""
        self._index = 0
        self._asked: list[Future[NDArray[np.float32]]] = []
        self._values: Iterator[Future[NDArray[np.float32]]] = iter(())
        """Of those the ones that were not taken yet."""
        self._sent: list[Future[Answer]] = []
        self._of_batch = 0
        """Updates of this batch, also on ranks that do not ask."""
        self._saving: list[Future[None]] = []

    @property
    def state(self) -> "CriticRanks":
        return self

    def begin(self, index: int, parts: Sequence[Sequence[MicroBatch]]) -> ValueReport:
        """Ask for the values of all of batch `index`."""
        self._index = index
        works = [work_of(batch) for part in parts for batch in part] if self._line is not None else []
        number = self._made
        asked = [self._ask(lambda model, work=work: model.values(number, work)) for work in works]
        self._asked, self._values = asked, iter(asked)
        self._sent, self._of_batch = [], 0
        return ValueReport(lr=learning_rate(self.config.optimizer, index, self._steps))

    def values(self, micro_batches: Sequence[MicroBatch], report: ValueReport) -> list[Tensor]:
        """V of every micro-batch's targets, float32 [N] each, in `begin`'s order; on the last stage only.

        Raises:
            Abandoned: The learner was told to stop before they were there.
            Unreachable, WrongRun: The model did not come within `learner.value.ranks.timeout_s`.
        """
        started = time.perf_counter()
        # All of them: an advantage of the first update needs the moments of the whole batch.
        await_all(self._asked, self._stopping, WHOM)
        report.seconds += time.perf_counter() - started
        if not parallel.is_last_stage():
            return []
        return [on_tensor_ranks(self._next_values(), len(batch.target_ids)) for batch in micro_batches]

    def update(self, micro_batches: Sequence[MicroBatch], total: Denominators, report: ValueReport) -> None:
        """Have an optimizer step made towards the micro-batches' returns; `end` waits for it."""
        numbers = {
            "number": self._made,
            "index": self._index,
            "copy": parallel.dp_rank(),
            "copies": parallel.dp_size(),
            "tokens": int(total.tokens),
        }
        self._made += 1
        self._of_batch += 1
        if self._line is not None:
            # What only fills up the micro-batches of this rank counts nowhere.
            counted = [batch for batch in micro_batches if batch.weights.any()]
            works = tuple(work_of(batch, 1.0, _known(batch)) for batch in counted)
            self._sent.append(self._ask(lambda model: model.train(works, **numbers)))

    def end(self, report: ValueReport) -> None:
        """Wait for what came of the updates.

        Raises:
            TimeoutError: Told to stop, and they did not come.
            Unreachable, WrongRun, Failed: As the model's ranks say.
        """
        started = time.perf_counter()
        await_all(self._sent, self._stopping, WHOM, self._silent_s)
        report.seconds += time.perf_counter() - started
        told = [sent.result().numbers for sent in self._sent if self._first] or [None] * self._of_batch
        for numbers in told:
            mine = [numbers[name] for name in FOUND] if numbers is not None else [0.0] * len(FOUND)
            *sums, norm, made = collectives.sum_over_world(mine)
            report.add(dict(zip(VALUE_METRICS, sums, strict=True)), norm, bool(made))

    def begin_save(self, step: int) -> None:
        made = self._made
        self._saving = [self._ask(lambda model: model.save(made, step))] if self._first else []

    def end_save(self) -> None:
        try:
            await_all(self._saving, self._stopping, WHOM, self._silent_s)
        except Refusal as refusal:
            raise OSError(f"the value model's ranks: {refusal}") from refusal

    def saved(self, step: int) -> None:
        made = self._made
        if self._line is not None:
            self._ask(lambda model: model.saved(made, step)).result()

    def load(self, step: int) -> None:
        self._made = 0
        session = self._session
        asked = [self._ask(lambda model: model.start(session, step))] if self._line is not None else []
        await_all(asked, self._stopping, WHOM)

    def export(self) -> None:
        """Have the model written as a Hugging Face folder into the run's."""
        made = self._made
        asked = [self._ask(lambda model: model.export(made))] if self._first else []
        await_all(asked, self._stopping, WHOM, self._silent_s)

    @property
    def _first(self) -> bool:
        """Whether this rank speaks for all copies."""
        return self._line is not None and parallel.dp_rank() == 0

    def _silent_s(self) -> float:
        return self._ask(lambda model: model.silent_s()).result()

    def _ask(self, question: Callable[[ValueClient], Coroutine[Any, Any, T]]) -> "Future[T]":
        assert self._line is not None
        return self._line.ask(question)

    def _next_values(self) -> Tensor | None:
        return torch.from_numpy(next(self._values).result()) if self._line is not None else None


def _known(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    assert batch.old_values is not None
    assert batch.returns is not None
    return batch.old_values, batch.returns
