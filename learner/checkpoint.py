"""Checkpoints in Megatron's own distributed format, complete or not there at all.

    run_dir/checkpoints/step-000010/   Megatron's files, rng-<rank>.safetensors, value/ with the value model's
                                       and ema/ with the averaged weights where there are any, and meta.json,
                                       written last: step, layout, dtype, config digest, and every file's size
                                       and digest

A checkpoint is written under a temporary name, synced to disk and renamed; a resume takes the newest one
whose files are all as meta.json says. It loads under another tensor, pipeline or data-parallel layout.
"""

import logging
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from buffer.handles import wait_for_handles
from learner import collectives, generators, parallel
from learner.checkpoint_files import (
    EMA,
    VALUE,
    DamagedCheckpoint,
    Digest,
    being_written,
    complete,
    digests,
    files_in,
    found_in,
    leftovers,
    named_meta,
    of_step,
    read_meta,
    step_of,
    verify,
)
from learner.checkpoint_parts import load_part, make, reason_of, save_part
from learner.optimizer import Trainable
from learner.resuming import Terms, obstacle

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
    value_lora: dict[str, Any] | None = None
    """Of its adapters, as of the policy's."""
    value_start: str | None = None
    """Fingerprint of the weights below them."""
    value_distributed_optimizer: bool | None = None
    """Of the value model's own ranks; as the policy's where it shares those, or is not there."""
    start: str | None = None
    """Fingerprint of the weights that the run started from; None where nobody asks."""
    needs_start: bool = False
    """Whether the run still looks at those weights: in its reference, or below its adapters."""
    shape: dict[str, Any] | None = None
    """What the model is (`resuming.shape_of`), where a resume is to compare it."""

    def terms(self, value: bool, ema: bool) -> Terms:
        return Terms(
            dtype=self.dtype,
            distributed_optimizer=self.distributed_optimizer,
            lora=self.lora,
            shape=self.shape,
            start=self.start if self.needs_start else None,
            start_at=self.init_from or self.model,
            value=value,
            value_lora=self.value_lora,
            value_start=self.value_start,
            value_distributed_optimizer=self.value_distributed_optimizer,
            ema=ema,
        )


class ValueElsewhere(Protocol):
    """A value model on ranks of its own, which writes and reads its part of a checkpoint itself. Every call
    is collective."""

    def begin_save(self, step: int) -> None:
        """Have it write its state into the folder of `step` that is being written."""
        ...

    def end_save(self) -> None:
        """Wait until it has.

        Raises:
            OSError: It has not, and why.
        """
        ...

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        ...

    def load(self, step: int) -> None:
        """Have it go on from there; from the run's start where `step` is 0."""
        ...


ValueState = Trainable | ValueElsewhere
"""What a checkpoint holds of the value model: its state here, or whoever has it."""


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
        value: ValueState | None = None,
    ) -> None:
        """Write the state after `step` batches; remove all but the newest `keep`, and never the one before
        that a value model elsewhere may be loading.

        Args:
            position: What goes on from here beside weights and moments, as plain JSON: where the data is,
                for a learner that reads it itself, or a coefficient that moves.
            value: The value model, where there is one.

        Raises:
            CheckpointNotWritten: With the reason.
        """
        wait_for_handles(f"the checkpoint of step {step}")
        target = of_step(self._root, step)
        temporary = being_written(self._root, step)
        keep = self._keep if value is None or isinstance(value, Trainable) else max(2, self._keep)
        try:
            self._write(temporary, step, trainable, value)
            found = shared_digests(temporary)
            if parallel.rank() == 0:
                facts = {"step": step, "position": position, **asdict(self._setup)}
                # One of this step may lie there damaged: this one was made again from an older checkpoint.
                complete(temporary, target, facts, found)
                for old in self.found()[:-keep]:
                    shutil.rmtree(old)
                logger.info("checkpoint of step %d is at %s", step, target)
        except (CheckpointException, SafetensorError, OSError) as error:
            raise CheckpointNotWritten(f"{target} cannot be written: {reason_of(error)}") from error
        dist.barrier()
        if value is not None and not isinstance(value, Trainable):
            value.saved(step)

    def _write(self, temporary: Path, step: int, trainable: Trainable, value: ValueState | None) -> None:
        """Every rank's part of the state."""
        from megatron.core import dist_checkpointing

        if parallel.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        if value is not None and not isinstance(value, Trainable):
            value.begin_save(step)
        save_part(temporary, trainable, self._setup.distributed_optimizer)
        if isinstance(value, Trainable):
            save_part(temporary / VALUE, value, self._setup.distributed_optimizer)
        if trainable.ema is not None:
            make(temporary / EMA)
            dist_checkpointing.save(trainable.ema.sharded_state(loading=False), str(temporary / EMA))
        generators.save(temporary)
        if value is not None and not isinstance(value, Trainable):
            value.end_save()
            if parallel.rank() == 0 and not (temporary / VALUE).is_dir():
                raise OSError(f"{VALUE}/ is not in it; the value model's ranks see another run_dir")
        dist.barrier()

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return found_in(self._root)

    def safe_step(self) -> int:
        """Batches below this are in every state a resume may fall back to; 0 while that may be the start."""
        found = self.found()
        return step_of(found[0]) if len(found) >= self._keep else 0

    def resume(self, trainable: Trainable, value: ValueState | None = None) -> int:
        """Load the newest checkpoint that is whole.

        Returns:
            The number of batches it was trained on; 0 where there is no checkpoint.

        Raises:
            ValueError: There are checkpoints and none is whole, or it does not fit this setup.
        """
        step = self._newest_whole()
        if step:
            self._load(of_step(self._root, step), trainable, value)
        if value is not None and not isinstance(value, Trainable):
            value.load(step)
        if parallel.rank() == 0:
            self._clear_leftovers()
        return step

    def _clear_leftovers(self) -> None:
        """Only once the value model has loaded: where it has ranks of its own, these outlive the learner, and
        may be writing into one that a killed one began."""
        for leftover in leftovers(self._root):
            shutil.rmtree(leftover, ignore_errors=True)

    def position(self, step: int) -> dict[str, Any]:
        """What `save` was told to keep beside weights and moments; empty if nothing."""
        return read_meta(of_step(self._root, step)).get("position") or {}

    def _newest_whole(self) -> int:
        """Its step, as rank 0 sees them; 0 where there is none. Collective."""
        found = self.found() if parallel.rank() == 0 else []
        (count,) = collectives.broadcast_numbers([len(found)])
        for number in range(count):
            (step,) = collectives.broadcast_numbers([step_of(found[~number]) if found else 0])
            path = of_step(self._root, step)
            files = shared_digests(path)
            if collectives.broadcast_numbers([parallel.rank() != 0 or _is_whole(path, files)])[0]:
                return step
        if count:
            raise ValueError(
                f"{self._root}: every checkpoint is damaged; restore one, or start again in another run_dir"
            )
        return 0

    def _load(self, path: Path, trainable: Trainable, value: ValueState | None) -> None:
        from megatron.core import dist_checkpointing

        meta = read_meta(path)
        why = obstacle(path, meta, self._setup.terms(value is not None, trainable.ema is not None))
        if why is not None:
            raise ValueError(why)
        if meta["config_digest"] != self._setup.config_digest and parallel.rank() == 0:
            logger.warning("%s was written under another configuration; this run's is used", path)
        if trainable.ema is not None:
            average: Any = dist_checkpointing.load(trainable.ema.sharded_state(loading=True), str(path / EMA))
            trainable.ema.load(average)
        load_part(path, trainable, self._setup.distributed_optimizer)
        if isinstance(value, Trainable):
            load_part(path / VALUE, value, self._setup.distributed_optimizer)
        # Checkpoints of before there were experts do not tell how many ranks shared them.
        sizes = {"expert": 1, **meta}
        if all(sizes[n] == getattr(self._setup, n) for n in ("tensor", "pipeline", "expert", "data")):
            generators.load(path)
        if parallel.rank() == 0:
            logger.info("resumed from %s", path)


def _is_whole(path: Path, found: dict[str, Digest]) -> bool:
    """What is not is told loudly."""
    try:
        verify(path, found)
    except DamagedCheckpoint as error:
        logger.error("DAMAGED CHECKPOINT %s: the one before it is used", error)
        return False
    return True


def check_start(path: Path) -> None:
    """See on all ranks that a checkpoint which the user named is whole. Collective.

    Raises:
        ValueError: On rank 0: it is no checkpoint, or it is damaged.
    """
    if parallel.rank() == 0:
        named_meta(path)
    found = shared_digests(path)
    if parallel.rank() == 0:
        verify(path, found)


def shared_digests(folder: Path) -> dict[str, Digest]:
    """Of the files in a checkpoint's folder, as rank 0 lists them; each rank reads its share. Collective.

    One rank alone would read for longer than the others' collective waits, where a checkpoint has terabytes.
    """
    listed = [name.encode() for name in files_in(folder)] if parallel.rank() == 0 else None
    names = [name.decode() for name in collectives.broadcast_frames(listed, 0, None)]
    mine = digests(folder, names[parallel.rank() :: parallel.world_size()])
    table = torch.zeros(len(names), 3, dtype=torch.int64)
    for row, name in zip(table, names, strict=True):
        if name in mine:
            size, digest = mine[name]
            row.copy_(torch.tensor([size, *struct.unpack("<qq", digest)]))
    dist.all_reduce(table)
    rows = zip(names, table.tolist(), strict=True)
    return {name: (size, struct.pack("<qq", *halves)) for name, (size, *halves) in rows}
