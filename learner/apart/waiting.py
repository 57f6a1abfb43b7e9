"""How the learner's ranks wait, all together, for a model on ranks of its own."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner import collectives, parallel
from learner.stop import Abandoned

TICK_S = 0.2
"""How often ranks that wait are told that the wait goes on."""
PATIENCE_S = 20.0
"""Of a learner that was told to stop, with a step under way whose answers do not come."""


def asks() -> bool:
    """Whether this rank speaks with such a model, for its model copy."""
    return parallel.is_last_stage() and parallel.tp_rank() == 0


def await_all(
    asked: Sequence["Future[Any]"],
    stopping: Callable[[], bool],
    whom: str,
    silent_s: Callable[[], float] | None = None,
) -> None:
    """Wait until every rank has the answers that it asked for. Collective.

    Args:
        asked: By this rank; nothing on ranks that do not ask.
        stopping: Whether this process was told to stop.
        whom: For messages.
        silent_s: For how long this rank has heard nothing of the model; None where the batch can be left as
            it is, at once.

    Raises:
        Abandoned: Told to stop, the answers not being there.
        TimeoutError: Likewise, and the model silent for `PATIENCE_S`: what is under way has no other way out.
        Refusal, Unreachable: What came in an answer's place, on the rank that it came to.
    """
    stopping_since: float | None = None
    while True:
        found = wait(asked, TICK_S, FIRST_EXCEPTION) if asked else None
        for answer in found.done if found else ():
            answer.result()
        # The others are told of every tick, so that a long wait never looks like a dead rank.
        silent = False
        if stopping():
            stopping_since = stopping_since or time.monotonic()
            silent = bool(asked) and time.monotonic() - stopping_since > PATIENCE_S
            silent = silent and silent_s is not None and silent_s() > PATIENCE_S
        mine = [bool(found and found.not_done), stopping(), silent]
        waiting, stop, given_up = collectives.max_over_world(mine)
        if not waiting:
            return
        if stop and silent_s is None:
            for answer in asked:
                answer.cancel()
            raise Abandoned(f"stopped while it waited for the {whom}; the batch is trained at a resume")
        if given_up:
            raise impatient(whom)


def impatient(whom: str) -> TimeoutError:
    """Of a step that is under way: there is no other way out of it than the rank's end."""
    return TimeoutError(
        f"told to stop, and the {whom} does not answer for the step under way; a resume goes on from the "
        "last checkpoint"
    )


def on_tensor_ranks(mine: Tensor | None, count: int) -> Tensor:
    """What the rank that asked was answered, float32 [count], on all tensor ranks of its stage, on their
    device. Collective over these.

    Args:
        mine: On the rank that asked; None elsewhere.
    """
    found = (torch.empty(count, dtype=torch.float32) if mine is None else mine).to(parallel.device())
    if parallel.tp_size() > 1:
        group = parallel.tensor_parallel_group()
        dist.broadcast(found, dist.get_global_rank(group, 0), group)
    return found
