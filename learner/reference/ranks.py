"""The reference on ranks of its own, as the learner's ranks see it.

    tensor rank 0 of the last pipeline stage ──micro-batch──▶ reference
                                             ◀──logprobs──── reference ──▶ the stage's other tensor ranks

One rank of each model copy asks, for all micro-batches of a batch at once and before its first pass; each
answer is waited for when the loss of that micro-batch needs it, so that both models compute at the same time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from learner import collectives, parallel
from learner.apart.client import ApartClient
from learner.apart.layouts import work_of
from learner.apart.waiting import PATIENCE_S, TICK_S, await_all, impatient, on_tensor_ranks
from learner.apart.wire import Answer, Task
from learner.layout import Layout
from learner.line import Line, done_within


class ReferenceRanks:
    """`ask` is collective, and so is taking what it returns."""

    def __init__(self, line: Line[ApartClient] | None, stopping: Callable[[], bool]) -> None:
        """Args:
        line: On ranks that ask; None elsewhere.
        stopping: Whether this process was told to stop.
        """
        self._line = line
        self._stopping = stopping
        self._waited_s = 0.0

    def ask(self, parts: Sequence[Sequence[Layout]], temperature: float) -> list[Iterator[Tensor]]:
        """For each part log π_ref of its micro-batches' targets, float32 [N] each, as they come.

        Waits for the reference to be there; it then works on the answers while this goes on.

        Returns:
            On the last pipeline stage one iterator a part; elsewhere they are empty.

        Raises:
            Abandoned: The learner was told to stop before the reference was there.
            Unreachable, WrongRun: It did not come within `learner.reference.timeout_s`.
        """
        started = time.perf_counter()
        here = [self._line.ask(lambda reference: reference.hello())] if self._line is not None else []
        await_all(here, self._stopping, "reference")
        self._waited_s += time.perf_counter() - started
        return [self._answers(part, self._sent(part, temperature)) for part in parts]

    def seconds(self) -> float:
        """The longest that a rank waited since the last call."""
        (longest,) = collectives.max_over_world([round(1e6 * self._waited_s)])
        self._waited_s = 0.0
        return longest / 1e6

    def _sent(self, part: Sequence[Layout], temperature: float) -> "list[Future[Answer]] | None":
        if self._line is None:
            return None
        tasks = [Task("logprobs", (work_of(batch, temperature),)) for batch in part]
        return [self._line.ask(lambda reference, task=task: reference.of_targets(task)) for task in tasks]

    def _answers(self, part: Sequence[Layout], sent: "list[Future[Answer]] | None") -> Iterator[Tensor]:
        if not parallel.is_last_stage():
            return
        for number, batch in enumerate(part):
            started = time.perf_counter()
            mine = None if sent is None else torch.from_numpy(self._come(sent[number]).arrays[0])
            found = on_tensor_ranks(mine, len(batch.target_ids))
            self._waited_s += time.perf_counter() - started
            yield found

    def _come(self, sent: "Future[Answer]") -> Answer:
        """The answer, of a step that is under way."""
        stopping_since: float | None = None
        while not done_within(sent, TICK_S):
            if self._stopping():
                stopping_since = stopping_since or time.monotonic()
                if time.monotonic() - stopping_since > PATIENCE_S:
                    raise impatient("reference")
        return sent.result()
