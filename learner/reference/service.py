"""The reference as a process on ranks of its own: what it is made of, and what ends it."""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from buffer.errors import Refusal
from learner import collectives, parallel
from learner.checkpoint_files import check
from learner.config import LearnerExperiment
from learner.layout import Layout, Segment, empty_layout
from learner.passes import target_logprobs
from learner.reference import wire
from learner.reference.desk import Desk
from learner.reference.fingerprint import fingerprint
from learner.reference.ranks import asks
from learner.reference.server import Logprobs
from learner.reference.wire import Served, Work
from learner.service import threads
from learner.stop import StopFlag

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How often ranks that wait for work are told that the wait goes on."""
DEPTH = 2
"""Micro-batches a pipeline stage that are computed at a time: with fewer, stages would stand idle."""


def run(experiment: LearnerExperiment) -> None:
    """Answer until the run is over or a signal comes.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        serve(experiment)
    except (Refusal, ValueError, OSError) as error:
        logger.error("the reference stops: %s", error)
        sys.exit(1)


def serve(experiment: LearnerExperiment) -> None:
    """Everything of `run` but its last resort."""
    of = experiment.learner.reference
    if of is None:
        raise ValueError("learner.reference: missing; without it the reference is on the learner's own ranks")
    stop = StopFlag("stopping")
    stop.install()
    parallel.initialize(of.parallel, experiment.seed, key="learner.reference.parallel")
    torch.set_num_threads(threads(of.threads))
    with ExitStack() as stack:
        stack.callback(parallel.shutdown)
        model = _frozen(experiment)
        served = _served(experiment, model.family.vocab)
        # It listens once it can answer: until then, whoever asks waits and says for whom.
        desk = stack.enter_context(Desk(experiment, of, served)) if parallel.rank() == 0 else None
        if desk is not None:
            logger.info("the reference is up at %s, weights %s", of.address, served.weights)
        answer(model, served, desk, stop)


def answer(model: Any, served: Served, desk: Desk | None, stop: StopFlag) -> None:
    """Compute what is asked, on every rank.

    Consumes: micro-batches of the learner's ranks, in the order in which they came.
    Waits for: the next one.
    Unblocked by: it, the end of the run, or a signal.
    """
    stages = parallel.pp_size()
    most = parallel.dp_size() * (1 if stages == 1 else DEPTH * stages)
    while (works := _next(served, desk, most, stop)) is not None:
        if not works:
            continue
        found = logprobs(model, works)
        if desk is not None:
            desk.answer(found)


def _next(served: Served, desk: Desk | None, most: int, stop: StopFlag) -> list[Work] | None:
    """The same on every rank: what to compute; nothing yet; None when there will be nothing any more."""
    over, works = 0, []
    if desk is not None:
        over = int(stop.is_set or desk.over)
        works = [] if over else desk.take(most, TICK_S)
    # The others are told of every tick, so that a long wait never looks like a dead rank 0.
    over, count = collectives.broadcast_numbers([over, len(works)])
    if over:
        return None
    if not count or parallel.world_size() == 1:
        return works
    frames = [frame for work in works for frame in wire.encode_work(work)]
    raw = collectives.broadcast_frames(frames if desk is not None else None, 0, None)
    each = len(raw) // count
    return [wire.decode_work(raw[n : n + each], served) for n in range(0, len(raw), each)]


def logprobs(model: Any, works: Sequence[Work]) -> list[Logprobs]:
    """log π of every micro-batch's targets, on global rank 0; elsewhere of no meaning. Collective."""
    copies, mine = parallel.dp_size(), range(parallel.dp_rank(), len(works), parallel.dp_size())
    layouts = [layout_of(works[i]) for i in mine]
    temperatures = [works[i].temperature for i in mine]
    # All copies make equally many passes.
    short = -(-len(works) // copies) - len(mine)
    layouts += [empty_layout()] * short
    temperatures += [1.0] * short
    found = target_logprobs(model, [one.to(parallel.device()) for one in layouts], temperatures)
    ends = np.cumsum([len(work.target_ids) for work in works]).tolist()
    joined = torch.zeros(ends[-1])
    if asks():
        for i, values in zip(mine, found, strict=False):
            joined[ends[i] - len(values) : ends[i]] = values.cpu()
    collectives.sum_on_first(joined)
    return np.split(joined.numpy(), ends[:-1])


def layout_of(work: Work) -> Layout:
    segments, positions, start = [], [], 0
    for prompt, *completions in work.segments:
        segments.append(Segment(start, prompt, tuple(completions)))
        positions += [np.arange(prompt), *(prompt + np.arange(length) for length in completions)]
        start += prompt + sum(completions)
    targets = len(work.target_ids)
    return Layout(
        token_ids=torch.from_numpy(work.token_ids.astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        segments=segments,
        target_positions=torch.from_numpy(work.target_positions.astype(np.int64)),
        target_ids=torch.from_numpy(work.target_ids.astype(np.int64)),
        weights=torch.ones(targets),
        sequence_index=torch.zeros(targets, dtype=torch.int64),
    )


def _frozen(experiment: LearnerExperiment) -> Any:
    """The model that the run starts from, laid out as `learner.reference.parallel` says."""
    # Megatron is imported late: the CPU backend is in place by now.
    from megatron.core.utils import get_model_config

    from learner.model import build_model
    from learner.optimizer import prepare_schedule

    start = experiment.learner.init_from
    if start and parallel.rank() == 0:
        check(Path(start))
    dtype = getattr(torch, experiment.model.dtype)
    layout = parallel.layout()
    model = build_model(experiment.model.path, layout, dtype, checkpoint=start).requires_grad_(False)
    prepare_schedule(get_model_config(model))
    return model


def _served(experiment: LearnerExperiment, vocabulary: int) -> Served:
    learner, length = experiment.learner, experiment.model.max_length
    # Under DPO a group is in one micro-batch, however long.
    most = length * (experiment.rollout.group_size if learner.algorithm.loss == "dpo" else 1)
    return Served(
        run_id=experiment.name,
        weights=fingerprint(experiment.model, learner.init_from),
        max_tokens=max(learner.tokens_per_microbatch, most),
        vocabulary=vocabulary,
    )
