"""Checkpoints in Megatron's own distributed format, complete or not there at all.

    run_dir/checkpoints/step-000010/   Megatron's files, rng-<rank>.safetensors, value/ with the value model's
                                       and ema/ with the averaged weights where there are any, and meta.json,
                                       written last: step, layout, dtype, config digest, and every file's size
                                       and digest

A checkpoint is written under a temporary name, synced to disk and renamed; a resume takes the newest one
whose files are all as meta.json says. It loads under another tensor, pipeline or data-parallel layout.
"""

import logging
import queue
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from buffer.handles import wait_for_handles
from learner import collectives, generators, optimizer_resume, parallel
from learner.checkpoint_files import EMA, META, VALUE, DamagedCheckpoint, complete, read_meta, verify
from learner.optimizer import Trainable
from learner.resuming import obstacle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a checkpoint must agree with, or is told apart by, when it is loaded."""

    dtype: str
    distributed_optimizer: bool
    tensor: int
    pipeline: int
    expert: int
    data: int
    config_digest: str
    model: str
    """Hugging Face folder with its config and tokenizer."""
    lora: dict[str, Any] | None = None
    """Of the adapters, which are then all that it holds; None where every weight is trained."""
    init_from: str | None = None
    """The checkpoint that the weights were first read from; None: the model's folder."""
    value_model: str | None = None
    """Folder that the value model started from, if there is one."""
    start: str | None = None
    """Fingerprint of the weights that the run started from; None where nobody asks."""
    needs_start: bool = False
    """Whether the run still looks at those weights: in its reference, or below its adapters."""
    shape: dict[str, Any] | None = None
    """What the model is (`resuming.shape_of`), where a resume is to compare it."""


class CheckpointNotWritten(OSError):
    """The disk is full, or gone: what was on it before is whole."""


class Checkpoints:
    """The checkpoints of one run. `save` and `resume` are collective."""

    def __init__(self, run_dir: Path, keep: int, setup: Setup) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._setup = setup

    def save(
        self,
        step: int,
        trainable: Trainable,
        position: dict[str, Any] | None = None,
        value: Trainable | None = None,
    ) -> None:
        """Write the state after `step` batches; remove all but the newest `keep`.

        Args:
            position: What goes on from here beside weights and moments, as plain JSON: where the data is,
                for a learner that reads it itself, or a coefficient that moves.
            value: The value model, where there is one.

        Raises:
            CheckpointNotWritten: With the reason.
        """
        wait_for_handles(f"the checkpoint of step {step}")
        target = self._root / f"step-{step:06d}"
        temporary = self._root / f".{target.name}.tmp"
        try:
            self._write(temporary, trainable, value)
            if parallel.rank() == 0:
                self._complete(temporary, target, step, position)
                for old in self.found()[: -self._keep]:
                    shutil.rmtree(old)
                logger.info("checkpoint of step %d is at %s", step, target)
        except (CheckpointException, SafetensorError, OSError) as error:
            raise CheckpointNotWritten(f"{target} cannot be written: {reason_of(error)}") from error
        dist.barrier()

    def _write(self, temporary: Path, trainable: Trainable, value: Trainable | None) -> None:
        """Every rank's part of the state."""
        from megatron.core import dist_checkpointing

        if parallel.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        _write_without_a_manager()
        for folder, part in _parts(temporary, trainable, value):
            _make(folder)
            optimizer_resume.complete(part.optimizer)
            dist_checkpointing.save(self._state(part, loading=False), str(folder))
        if trainable.ema is not None:
            _make(temporary / EMA)
            dist_checkpointing.save(trainable.ema.sharded_state(loading=False), str(temporary / EMA))
        generators.save(temporary)
        dist.barrier()

    def _complete(
        self, temporary: Path, target: Path, step: int, position: dict[str, Any] | None = None
    ) -> None:
        # One of this step may lie there damaged: this one was made again from an older checkpoint.
        complete(temporary, target, {"step": step, "position": position, **asdict(self._setup)})

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self._root.glob("step-*") if (p / META).exists())

    def safe_step(self) -> int:
        """Batches below this are in every state a resume may fall back to; 0 while that may be the start."""
        found = self.found()
        return _step(found[0]) if len(found) >= self._keep else 0

    def resume(self, trainable: Trainable, value: Trainable | None = None) -> int:
        """Load the newest checkpoint that is whole.

        Returns:
            The number of batches it was trained on; 0 where there is no checkpoint.

        Raises:
            ValueError: There are checkpoints and none is whole, or it does not fit this setup.
        """
        step = self._newest_whole() if parallel.rank() == 0 else 0
        (step,) = collectives.broadcast_numbers([step])
        if step:
            self._load(self._root / f"step-{step:06d}", trainable, value)
        return step

    def position(self, step: int) -> dict[str, Any]:
        """What `save` was told to keep beside weights and moments; empty if nothing."""
        return read_meta(self._root / f"step-{step:06d}").get("position") or {}

    def _newest_whole(self) -> int:
        for leftover in self._root.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        found = self.found()
        for path in reversed(found):
            try:
                verify(path)
            except DamagedCheckpoint as error:
                logger.error("DAMAGED CHECKPOINT %s: the one before it is used", error)
                continue
            return _step(path)
        if found:
            raise ValueError(
                f"{self._root}: every checkpoint is damaged; restore one, or start again in another run_dir"
            )
        return 0

    def _load(self, path: Path, trainable: Trainable, value: Trainable | None) -> None:
        from megatron.core import dist_checkpointing

        meta = read_meta(path)
        setup = self._setup
        why = obstacle(
            path,
            meta,
            dtype=setup.dtype,
            distributed_optimizer=setup.distributed_optimizer,
            lora=setup.lora,
            shape=setup.shape,
            start=setup.start if setup.needs_start else None,
            start_at=setup.init_from or setup.model,
            value=value is not None,
            ema=trainable.ema is not None,
        )
        if why is not None:
            raise ValueError(why)
        if meta["config_digest"] != self._setup.config_digest and parallel.rank() == 0:
            logger.warning("%s was written under another configuration; this run's is used", path)
        if trainable.ema is not None:
            average: Any = dist_checkpointing.load(trainable.ema.sharded_state(loading=True), str(path / EMA))
            trainable.ema.load(average)
        for folder, part in _parts(path, trainable, value):
            if self._setup.distributed_optimizer:
                optimizer_resume.prepare(part.optimizer)
            state: Any = dist_checkpointing.load(self._state(part, loading=True), str(folder))
            _fill(_unwrapped(part), state["model"])
            optimizer_resume.complete_loaded(part.optimizer, state["optimizer"])
            part.optimizer.load_state_dict(state["optimizer"])
        # Checkpoints of before there were experts do not tell how many ranks shared them.
        sizes = {"expert": 1, **meta}
        if all(sizes[n] == getattr(self._setup, n) for n in ("tensor", "pipeline", "expert", "data")):
            generators.load(path)
        if parallel.rank() == 0:
            logger.info("resumed from %s", path)

    def _state(self, trainable: Trainable, loading: bool) -> dict[str, Any]:
        """What is saved, described shard by shard."""
        model = _described(_unwrapped(trainable))
        fields: dict[str, Any] = {}
        if self._setup.distributed_optimizer:
            fields["metadata"] = {
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
        optimizer = trainable.optimizer.sharded_state_dict(model, is_loading=loading, **fields)
        return {"model": model, "optimizer": optimizer}


def _described(model: Any) -> dict[str, Any]:
    """A model's weights as the format describes them; the frozen ones of a model with adapters are left out,
    since the run's start has them."""
    described = model.sharded_state_dict(prefix="")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = len(trained) == sum(1 for _ in model.parameters())
    return described if whole else {name: place for name, place in described.items() if name in trained}


def _fill(model: Any, state: dict[str, Any]) -> None:
    """The reverse."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    missing, unknown = model.load_state_dict(state, strict=not frozen)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not unknown, unknown
    assert not trained & set(missing), missing


def reason_of(error: BaseException) -> str:
    """The line that says it, out of what torch and Megatron wrap around it."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_without_a_manager() -> None:
    """Give Megatron's writer a plain queue for its results.

    Its own is served by a manager process, meant for writing in the background. A learner killed with SIGKILL
    leaves that process behind for ever, with the learner's pipes open; and we write in the foreground.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert hasattr(filesystem_async, "_results_queue"), "megatron-core moved its writer's queue"
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.SimpleQueue()


def _parts(path: Path, trainable: Trainable, value: Trainable | None) -> list[tuple[Path, Trainable]]:
    """What lies where in a checkpoint."""
    return [(path, trainable)] if value is None else [(path, trainable), (path / VALUE, value)]


def _make(folder: Path) -> None:
    """Collective."""
    if parallel.rank() == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()


def _unwrapped(trainable: Trainable) -> Any:
    """The model inside the data-parallel wrapper."""
    return trainable.model.module
