"""A model on ranks of its own as a process: what such jobs have in common, whatever they compute."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import Refusal
from buffer.keys import server_keys
from buffer.stacks import Stillness
from learner import collectives, parallel
from learner.apart import wire
from learner.apart.desk import Desk
from learner.apart.layouts import layout_of
from learner.apart.server import ApartServer
from learner.apart.waiting import asks
from learner.apart.wire import Answer, Failed, Served, Task
from learner.apart.work import Limits, Work
from learner.config import LearnerExperiment, OwnRanks
from learner.layout import Layout, empty_layout
from learner.service import threads
from learner.stop import StopFlag

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How often ranks that wait for work are told that the wait goes on."""
DEPTH = 2
"""Micro-batches a pipeline stage that are computed at a time: with fewer, stages would stand idle."""

Compute = Callable[[list[Task]], Sequence[Answer | Failed]]
"""Collective: what a job's ranks do with what they were asked; the answers count on rank 0."""


def run(serve: Callable[[], None], whose: str) -> None:
    """Answer until the run is over or a signal comes.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        serve()
    except (Refusal, ValueError, OSError) as error:
        logger.error("the %s stops: %s", whose, error)
        sys.exit(1)
    except RuntimeError as error:
        if not parallel.is_of_others(error):
            raise
        logger.error("the %s stops: its other ranks are not heard any more: %s", whose, error)
        sys.exit(1)


def serve(
    experiment: LearnerExperiment,
    role: str,
    key: str,
    of: OwnRanks,
    prepare: Callable[[], tuple[Served, Compute]],
    make_server: type[ApartServer] = ApartServer,
) -> None:
    """
    Args:
        role: Of the job's key.
        key: Its section.
        of: That section.
        prepare: Loads the model, once the ranks have their places.
    """
    stop = StopFlag("stopping")
    stop.install()
    parallel.initialize(of.parallel, experiment.seed, key=f"{key}.parallel")
    torch.set_num_threads(threads(of.threads))
    stillness = Stillness(experiment.logging.stalled_s)
    with ExitStack() as stack:
        stack.callback(parallel.shutdown)
        stack.callback(stillness.end)
        stillness.see("loading")
        served, compute = prepare()

        def listen() -> ApartServer:
            return make_server(
                served, f"{key}.address", of.address, server_keys(experiment.security.keys, role)
            )

        # It listens once it can answer: until then, whoever asks waits and says for whom.
        desk = stack.enter_context(Desk(experiment, role, listen)) if parallel.rank() == 0 else None
        if desk is not None:
            logger.info("the %s is up at %s, weights %s", served.kind.name, of.address, served.weights)
        answer(served, compute, desk, stop, stillness)


def answer(served: Served, compute: Compute, desk: Desk | None, stop: StopFlag, stillness: Stillness) -> None:
    """Do what is asked, on every rank.

    Consumes: what the learner's ranks ask for, in the order in which it came.
    Waits for: the next of it.
    Unblocked by: it, the end of the run, or a signal.
    """
    stages = parallel.pp_size()
    most = parallel.dp_size() * (1 if stages == 1 else DEPTH * stages)
    asked = 0
    while (tasks := _next(served, desk, most, stop)) is not None:
        if not tasks:
            stillness.end()  # it is no fault of its ranks that nobody asks
            continue
        asked += len(tasks)
        stillness.see(asked)
        try:
            found = compute(tasks)
        except (ValueError, OSError) as error:
            if desk is not None:
                desk.fail(error)
            raise
        if desk is not None:
            desk.answer(list(found))


def _next(served: Served, desk: Desk | None, most: int, stop: StopFlag) -> list[Task] | None:
    """The same on every rank: what to do; nothing yet; None when there will be nothing any more."""
    over, tasks = 0, []
    if desk is not None:
        over = int(stop.is_set or desk.over)
        tasks = [] if over else desk.take(most, TICK_S)
    # The others are told of every tick, so that a long wait never looks like a dead rank 0.
    over, count = collectives.broadcast_numbers([over, len(tasks)])
    if over:
        return None
    if parallel.world_size() == 1:
        return tasks
    return [_handed_on(tasks[i] if desk is not None else None, served) for i in range(count)]


def _handed_on(task: Task | None, served: Served) -> Task:
    frames = wire.encode_task(task) if task is not None else None
    return wire.decode_task(collectives.broadcast_frames(frames, 0, None), served)


def targets_of_all(
    works: Sequence[Work], passes: Callable[[list[Layout], list[float]], list[Tensor]]
) -> list[NDArray[np.float32]]:
    """What passes over micro-batches, shared by the model's copies, find of each one's targets: [N], on
    global rank 0; elsewhere of no meaning. Collective.

    Args:
        passes: From layouts and temperatures to one tensor [N] of each, on the last stage.
    """
    copies, mine = parallel.dp_size(), range(parallel.dp_rank(), len(works), parallel.dp_size())
    layouts = [layout_of(works[i]) for i in mine]
    temperatures = [works[i].temperature for i in mine]
    # All copies make equally many passes.
    short = -(-len(works) // copies) - len(mine)
    layouts += [empty_layout()] * short
    temperatures += [1.0] * short
    found = passes([one.to(parallel.device()) for one in layouts], temperatures)
    ends = np.cumsum([len(work.target_ids) for work in works]).tolist()
    joined = torch.zeros(ends[-1])
    if asks():
        for i, values in zip(mine, found, strict=False):
            joined[ends[i] - len(values) : ends[i]] = values.cpu()
    collectives.sum_on_first(joined)
    return np.split(joined.numpy(), ends[:-1])


def limits_of(experiment: LearnerExperiment, vocabulary: int) -> Limits:
    """Of the learner's micro-batches."""
    learner, length = experiment.learner, experiment.model.max_length
    # Under DPO a group is in one micro-batch, however long.
    most = length * (experiment.rollout.group_size if learner.algorithm.loss == "dpo" else 1)
    return Limits(max(learner.tokens_per_microbatch, most), vocabulary)
