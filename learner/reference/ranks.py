"""The reference on ranks of its own, as the learner's ranks see it.

    tensor rank 0 of the last pipeline stage ──micro-batch──▶ reference
                                             ◀──logprobs──── reference ──▶ the stage's other tensor ranks

One rank of each model copy asks, for all micro-batches of a batch at once and before its first pass; each
answer is waited for when the loss of that micro-batch needs it, so that both models compute at the same time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from learner import collectives, parallel
from learner.layout import Layout
from learner.line import Line, done_within
from learner.reference.client import ReferenceClient
from learner.reference.wire import Work
from learner.stop import Abandoned

TICK_S = 0.2
"""How often ranks that wait for the reference are told that the wait goes on."""
PATIENCE_S = 20.0
"""Of a learner that was told to stop, with a step under way whose logprobs do not come."""


def asks() -> bool:
    """Whether this rank speaks with the reference, for its model copy."""
    return parallel.is_last_stage() and parallel.tp_rank() == 0


class ReferenceRanks:
    """`ask` is collective, and so is taking what it returns."""

    def __init__(self, line: Line[ReferenceClient] | None, stopping: Callable[[], bool]) -> None:
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
        self._await_there()
        self._waited_s += time.perf_counter() - started
        return [self._answers(part, self._sent(part, temperature)) for part in parts]

    def seconds(self) -> float:
        """The longest that a rank waited since the last call."""
        (longest,) = collectives.max_over_world([round(1e6 * self._waited_s)])
        self._waited_s = 0.0
        return longest / 1e6

    def _await_there(self) -> None:
        here = self._line.ask(lambda reference: reference.hello()) if self._line is not None else None
        while True:
            waits = here is not None and not done_within(here, TICK_S)
            if here is not None and not waits:
                here.result()
            # The others are told of every tick, so that a long wait never looks like a dead rank.
            waiting, stop = collectives.max_over_world([waits, self._stopping()])
            if not waiting:
                return
            if stop:
                if here is not None:
                    here.cancel()
                raise Abandoned("stopped while it waited for the reference; the batch is trained at a resume")

    def _sent(self, part: Sequence[Layout], temperature: float) -> "list[Future[NDArray[np.float32]]] | None":
        if self._line is None:
            return None
        works = [work_of(batch, temperature) for batch in part]
        return [self._line.ask(lambda reference, work=work: reference.logprobs(work)) for work in works]

    def _answers(
        self, part: Sequence[Layout], sent: "list[Future[NDArray[np.float32]]] | None"
    ) -> Iterator[Tensor]:
        if not parallel.is_last_stage():
            return
        group, device = parallel.tensor_parallel_group(), parallel.device()
        for number, batch in enumerate(part):
            started = time.perf_counter()
            found = torch.empty(len(batch.target_ids), dtype=torch.float32)
            if sent is not None:
                found = torch.from_numpy(self._come(sent[number]))
            found = found.to(device)
            if parallel.tp_size() > 1:
                dist.broadcast(found, dist.get_global_rank(group, 0), group)
            self._waited_s += time.perf_counter() - started
            yield found

    def _come(self, sent: "Future[NDArray[np.float32]]") -> NDArray[np.float32]:
        """The answer. The step is under way: there is no other way out of it than this rank's end."""
        stopping_since: float | None = None
        while not done_within(sent, TICK_S):
            if self._stopping():
                stopping_since = stopping_since or time.monotonic()
                if time.monotonic() - stopping_since > PATIENCE_S:
                    raise TimeoutError(
                        "told to stop, and the reference does not answer for the step under way; a resume "
                        "goes on from the last checkpoint"
                    )
        return sent.result()


def work_of(batch: Layout, temperature: float) -> Work:
    """What the reference looks at of a micro-batch."""
    return Work(
        segments=tuple((s.prompt_length, *s.completion_lengths) for s in batch.segments),
        token_ids=_numbers(batch.token_ids[0]),
        target_positions=_numbers(batch.target_positions),
        target_ids=_numbers(batch.target_ids),
        temperature=temperature,
    )


def _numbers(tensor: Tensor) -> NDArray[np.int32]:
    return tensor.cpu().numpy().astype(np.int32)
