"""Whether a run that was stopped can go on under the configuration of now; told before anything starts."""

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from buffer import belongings
from buffer.database import read_only
from buffer.prompts import EVAL_SEED, load_rows, open_prompts
from launch.experiment import SERVICES, WholeExperiment
from learner import ending
from learner.checkpoint_files import DamagedCheckpoint, read_meta
from learner.offline.config import OfflineExperiment
from learner.resuming import Terms, measures_from_start, newest, obstacle, shape_of, sharded_apart


def check(e: WholeExperiment, services: Collection[str] = SERVICES) -> None:
    """Look at what the run left, as far as it lies on this machine.

    Args:
        services: Those about to start here.

    Raises:
        ValueError: The run cannot go on under this configuration: why, and what to do.
    """
    run_dir = Path(e.run_dir)
    if "buffer" in services and (run_dir / "buffer.sqlite").is_file():
        queue = open_prompts(e.data, e.seed)
        rows = load_rows(e.eval.source, e.seed + EVAL_SEED) if e.eval else []
        belongings.check(run_dir, e.name, queue, rows, e.rollout.sampling.temperature)
    if "learner" in services:
        step = check_checkpoint(e)
        check_forgotten(run_dir, step)
        end = ending.read(run_dir)
        if end is not None and end.step == step and end.suffices(e.learner.steps, e.data.epochs):
            check_trained_from(e)


def check_checkpoint(e: WholeExperiment | OfflineExperiment) -> int:
    """The step that the learner goes on from, 0 for the start.

    Raises:
        ValueError: It cannot, under this configuration.
    """
    path, learner = newest(Path(e.run_dir)), e.learner
    stage = e.stage if isinstance(e, OfflineExperiment) else None
    if path is None:
        return 0
    try:
        meta = read_meta(path)
    except DamagedCheckpoint:
        return int(path.name.removeprefix("step-"))  # the learner tells of it, and takes the one before
    start = value_start = None
    if meta.get("start") and measures_from_start(learner, stage):
        from learner.reference.fingerprint import fingerprint  # imports torch

        start = fingerprint(e.model, learner.init_from)
    value = e.learner.value if isinstance(e, WholeExperiment) else None
    if meta.get("value_start") and value is not None and value.lora is not None:
        from learner.value.start import weights_of_value

        value_start = weights_of_value(value.path, e.model)
    terms = Terms(
        dtype=e.model.dtype,
        distributed_optimizer=learner.parallel.distributed_optimizer,
        lora=learner.lora.model_dump(mode="json") if learner.lora else None,
        shape=shape_of(e.model.path),
        start=start,
        start_at=learner.init_from or e.model.path,
        value=value is not None,
        value_lora=value.lora.model_dump(mode="json") if value is not None and value.lora else None,
        value_start=value_start,
        value_distributed_optimizer=sharded_apart(value),
        ema=learner.ema is not None,
    )
    why = obstacle(path, meta, terms)
    if why is not None:
        raise ValueError(why)
    return int(path.name.removeprefix("step-"))


def check_trained_from(e: WholeExperiment | OfflineExperiment) -> None:
    """Of a run that is finished: whether it is what this command would make, of the weights that it names.
    One that is not yet goes on with its own, and where it still measures from its start `check_checkpoint`
    compares that.

    Raises:
        ValueError: Those were trained again, or replaced, since it started.
    """
    path, learner = newest(Path(e.run_dir)), e.learner
    try:
        meta = read_meta(path) if path is not None else {}
    except DamagedCheckpoint:
        return  # nobody goes on from it: the run is over
    if not meta.get("start"):
        return
    from learner.reference.fingerprint import fingerprint  # imports torch

    model = e.model.model_copy(update={"dtype": meta["dtype"]})  # the type that they were used in
    if fingerprint(model, learner.init_from) != meta["start"]:
        raise ValueError(
            f"{e.run_dir}: finished, but started from other weights than {learner.init_from or e.model.path} "
            "has now; expected those that it was trained from: bring them back, or train again in another "
            "run_dir"
        )


def check_forgotten(run_dir: Path, step: int) -> None:
    """
    Args:
        step: That the learner goes on from.

    Raises:
        ValueError: The buffer does not have the batches behind it any more.
    """
    path = run_dir / "buffer.sqlite"
    if not path.is_file():
        return
    with closing(read_only(path)) as connection:
        try:
            found = connection.execute("SELECT value FROM facts WHERE name = 'committed'").fetchone()
        except sqlite3.OperationalError:
            return  # nothing in it yet; the buffer tells what is wrong with it, if anything is
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path}: damaged: {error}; restore it, or use another run_dir") from None
    if found is not None and step < found[0]:
        where = f"checkpoint step-{step:06d}" if step else "the start, for want of a checkpoint"
        raise ValueError(
            f"{path}: batches below {found[0]} are in a checkpoint and not kept, and the learner would go "
            f"on from {where}: bring back the checkpoint of step {found[0]} or later, or use another run_dir"
        )
