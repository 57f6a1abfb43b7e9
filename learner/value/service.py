"""PPO's value model as a process on ranks of its own: values, updates, and its part of every checkpoint."""

import gc
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from learner import collectives, convert, families, parallel
from learner.apart import job
from learner.apart.job import targets_of_all
from learner.apart.layouts import layout_of
from learner.apart.wire import VALUE, Answer, Failed, Served, Task
from learner.apart.work import Work
from learner.checkpoint_files import META, being_written, of_step, sync
from learner.checkpoint_files import VALUE as PART
from learner.checkpoint_parts import load_part, reason_of, save_part
from learner.config import LearnerExperiment, ValueRanksConfig
from learner.layout import empty_layout, shallow
from learner.losses import Denominators
from learner.packing import ValueBatch
from learner.passes import equal_counts
from learner.service import value_model
from learner.value.ranks import FOUND
from learner.value.server import ValueServer
from learner.value.start import start_of_value

logger = logging.getLogger(__name__)


def run(experiment: LearnerExperiment) -> None:
    """As `job.run`."""
    job.run(lambda: serve(experiment), "value model")


def serve(experiment: LearnerExperiment) -> None:
    """Everything of `run` but its last resort."""
    value = experiment.learner.value
    of = value.ranks if value is not None else None
    if value is None or of is None:
        raise ValueError(
            "learner.value.ranks: missing; without it the value model is on the learner's own ranks"
        )

    def prepare() -> tuple[Served, job.Compute]:
        family = families.read(value.path, "score")
        family.check_layout(of.parallel, "learner.value.ranks.parallel")
        apart = ValueJob(experiment, of)
        limits = job.limits_of(experiment, apart.vocabulary)
        return Served(VALUE, experiment.name, start_of_value(experiment), limits), apart.compute

    job.serve(experiment, "value", "learner.value.ranks", of, prepare, ValueServer)


class ValueJob:
    """One rank of it. Which update it is at, its server keeps."""

    def __init__(self, experiment: LearnerExperiment, of: ValueRanksConfig) -> None:
        self._experiment = experiment
        self._layout = of.parallel
        self._run_dir = Path(experiment.run_dir)
        self._critic = value_model(experiment, of.parallel)
        self._fresh = True
        """Whether it is as the run starts with it."""

    @property
    def vocabulary(self) -> int:
        return self._critic.trainable.model.module.family.vocab

    def compute(self, tasks: list[Task]) -> list[Answer | Failed]:
        """What the learner asks for. Collective.

        Raises:
            ValueError, OSError: After which there is no going on.
        """
        if tasks[0].verb == "values":
            works = [task.works[0] for task in tasks]
            found = targets_of_all(works, lambda layouts, _: self._critic.values_of(layouts))
            return [Answer((values,)) for values in found]
        (task,) = tasks
        do = {"train": self._train, "load": self._load, "save": self._save, "export": self._export}
        return [do[task.verb](task)]

    def _train(self, task: Task) -> Answer:
        """One optimizer step on the micro-batches of all the learner's copies, shared by this model's."""
        self._fresh = False
        mine = [_batch_of(work) for work in task.works[parallel.dp_rank() :: parallel.dp_size()]]
        nothing = torch.zeros(1)
        filler = ValueBatch(**shallow(empty_layout()), old_values=nothing, returns=nothing)
        report = self._critic.begin(task.numbers["index"])
        total = Denominators(task.numbers["tokens"], 0.0, 0)
        self._critic.update(equal_counts(mine, filler), total, report)
        found = {**report.sums, "grad_norm": report.grad_norms[0], "made": 1.0 - report.skipped}
        return Answer(numbers={name: found[name] for name in FOUND})

    def _load(self, task: Task) -> Answer | Failed:
        """The state of a checkpoint, or of the run's start, in place of this one."""
        step = task.numbers["step"]
        folder = of_step(self._run_dir / "checkpoints", step)
        if step and not _is_there(folder / META):
            return Failed(
                f"{folder}: not there; the value model's ranks see another run_dir than the learner"
            )
        if not self._fresh:
            # Anew, as after a start: an optimizer that has made steps holds more than a checkpoint does.
            del self._critic
            gc.collect()
            self._critic = value_model(self._experiment, self._layout)
        self._fresh = not step
        if step:
            try:
                load_part(folder / PART, self._critic.trainable, self._layout.distributed_optimizer)
            except CheckpointException as error:
                raise ValueError(f"{folder / PART} cannot be read: {reason_of(error)}") from error
        if parallel.rank() == 0:
            logger.info("the value model goes on from %s", folder if step else "its start")
        return Answer()

    def _save(self, task: Task) -> Answer | Failed:
        """Into the folder that the learner is writing, which it completes."""
        folder = being_written(self._run_dir / "checkpoints", task.numbers["step"])
        if not _is_there(folder):
            return Failed(
                f"{folder}: not there; the value model's ranks see another run_dir than the learner"
            )
        if parallel.rank() == 0:
            shutil.rmtree(folder / PART, ignore_errors=True)
        try:
            save_part(folder / PART, self._critic.trainable, self._layout.distributed_optimizer)
        except CheckpointException as error:
            return Failed(f"{folder / PART} cannot be written: {reason_of(error)}")
        sync(folder / PART)
        dist.barrier()  # with the answer the learner completes the folder: it is renamed
        return Answer()

    def _export(self, task: Task) -> Answer:
        of = self._experiment.learner.value
        assert of is not None
        convert.save_hf(self._critic.trainable.model.module, of.path, self._run_dir / "value_model")
        return Answer()


def _batch_of(work: Work) -> ValueBatch:
    old_values, returns = (torch.from_numpy(values) for values in work.known)
    return ValueBatch(**shallow(layout_of(work)), old_values=old_values, returns=returns)


def _is_there(path: Path) -> bool:
    """As rank 0 sees it."""
    return bool(collectives.broadcast_numbers([path.exists()])[0])
