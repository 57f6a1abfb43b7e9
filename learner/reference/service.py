"""The reference as a process on ranks of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from learner import parallel
from learner.apart import job
from learner.apart.job import targets_of_all
from learner.apart.wire import REFERENCE, Answer, Served, Task
from learner.checkpoint import check_start
from learner.config import LearnerExperiment
from learner.passes import target_logprobs
from learner.reference.fingerprint import fingerprint


def run(experiment: LearnerExperiment) -> None:
    """As `job.run`."""
    job.run(lambda: serve(experiment), "reference")


def serve(experiment: LearnerExperiment) -> None:
    """Everything of `run` but its last resort."""
    of = experiment.learner.reference
    if of is None:
        raise ValueError("learner.reference: missing; without it the reference is on the learner's own ranks")

    def prepare() -> tuple[Served, job.Compute]:
        model = _frozen(experiment)
        weights = fingerprint(experiment.model, experiment.learner.init_from)
        limits = job.limits_of(experiment, model.family.vocab)
        return Served(REFERENCE, experiment.name, weights, limits), partial(logprobs, model)

    job.serve(experiment, "reference", "learner.reference", of, prepare)


def logprobs(model: Any, tasks: list[Task]) -> list[Answer]:
    """log π of every micro-batch's targets. Collective."""
    found = targets_of_all([task.works[0] for task in tasks], partial(target_logprobs, model))
    return [Answer((values,)) for values in found]


def _frozen(experiment: LearnerExperiment) -> Any:
    """The model that the run starts from, laid out as `learner.reference.parallel` says."""
    # Megatron is imported late: the CPU backend is in place by now.
    from megatron.core.utils import get_model_config

    from learner.model import build_model
    from learner.optimizer import prepare_schedule

    start = experiment.learner.init_from
    if start:
        check_start(Path(start))
    dtype = getattr(torch, experiment.model.dtype)
    layout = parallel.layout()
    model = build_model(experiment.model.path, layout, dtype, checkpoint=start).requires_grad_(False)
    prepare_schedule(get_model_config(model))
    return model
