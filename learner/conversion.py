"""Between Hugging Face folders and the learner's Megatron checkpoints, and from one layout to another.

One process, no GPU, no torchrun. Tensors stream: one parameter of one layer is in memory at a time, however
large the model. Every conversion is bit-exact unless another dtype is asked for.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from learner import families
from learner.checkpoint_files import EMA, VALUE, check, complete, disk_error, named_meta, refuse_existing
from learner.checkpoint_weights import open_checkpoint, open_value, stored_head
from learner.config import ParallelConfig
from learner.families import Family
from learner.megatron_folder import (
    COMMON,
    Chunk,
    Object,
    Piece,
    StoredTensors,
    cut,
    write_checkpoint,
)
from learner.safetensors_folder import SafetensorsFolder, WholeTensors, write_folder
from learner.slots import Part, Slot, slots
from sync.expected import untied
from sync.manifest import TensorSpec


def hf_to_megatron(source: Path, target: Path, layout: ParallelConfig, dtype: str | None = None) -> None:
    """Write a Hugging Face folder's weights as a checkpoint that `learner.init_from` takes.

    Args:
        source: A language model or a reward model.
        layout: The chunks are cut for it; the checkpoint loads under every other one too.
        dtype: Torch's name; None keeps the folder's.

    Raises:
        ValueError: The folder or its architecture is not supported, the layout does not fit it, the types
            are mixed, or `target` exists.
    """
    refuse_existing(target)
    family = families.read(source, families.own_head(source))
    family.check_layout(layout)
    folder = SafetensorsFolder(source)
    wholes = [whole for slot in slots(family, ParallelConfig()) for whole in slot.whole]
    for name, shape in wholes:
        folder.check(name, shape)
    folder.refuse_others({name for name, _ in wholes})
    if family.tied and (reason := untied(source)):
        raise ValueError(f"{source}: {reason}")
    dtype = dtype or _only_dtype(source, {folder.dtype(name) for name, _ in wholes})
    shards = _Shards(folder)
    ranks = [
        [
            Piece(chunk, getattr(torch, dtype), partial(shards.part, slot, rank, part, chunk))
            for slot, rank, chunk, part in cell
        ]
        for cell in _cells(family, layout)
    ]
    with _whole_or_not_at_all(target) as temporary:
        write_checkpoint(temporary, ranks, common=None)
        facts = {"step": 0, "weights_only": True, "dtype": dtype, "model": str(source.resolve())}
        complete(temporary, target, facts | _sizes(layout))


def megatron_to_hf(
    checkpoint: Path,
    target: Path,
    model: Path | None = None,
    dtype: str | None = None,
    averaged: bool = False,
    value: bool = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder; adapters are fused with what they belong to.

    Args:
        checkpoint: Of a run or of `hf_to_megatron`; under whatever layout it was written.
        model: Folder with the config and the tokenizer; None takes the one that meta.json names.
        dtype: Torch's name; None keeps the checkpoint's.
        averaged: Instead of the weights their moving average, of a run with `learner.ema`.
        value: Instead of the policy its value model, of a run with `learner.value`.

    Raises:
        ValueError: It is no checkpoint, is damaged, has no average or no value model, or does not fit the
            model's config, or `target` exists.
    """
    refuse_existing(target)
    named_meta(checkpoint)
    if averaged and not (checkpoint / EMA).is_dir():
        raise ValueError(f"{checkpoint}: no average of the weights in it; its run had no learner.ema")
    if value and not (checkpoint / VALUE).is_dir():
        raise ValueError(f"{checkpoint}: no value model in it; its run had no learner.value")
    source = _model_folder(checkpoint, model, "value_model" if value else "model", "--model")
    meta = check(checkpoint)
    family = families.read(source, "score" if value else stored_head(checkpoint))
    folder: WholeTensors = (
        open_value(checkpoint, family, source)
        if value
        else open_checkpoint(checkpoint, family, model, averaged)
    )
    specs: list[TensorSpec] = []
    for name, shape in (whole for slot in slots(family, ParallelConfig()) for whole in slot.whole):
        folder.check(name, shape)
        specs.append(TensorSpec(name, dtype or meta["dtype"], shape))
    tensors = ((spec.name, folder.read(spec.name, slice(None))) for spec in specs)
    amend = partial(families.score_config, family) if family.head == "score" else None
    write_folder(target, source, specs, tensors, amend)


def reshard(
    checkpoint: Path,
    target: Path,
    layout: ParallelConfig,
    model: Path | None = None,
    value_model: Path | None = None,
) -> None:
    """Write a checkpoint again, optimizer state and value model too, cut for another layout.

    It would load there as it is. Cut anew each rank reads its own chunks and nothing else; a chunk is always
    read whole.

    Args:
        model: As for `megatron_to_hf`; `value_model` the same for the value model.

    Raises:
        ValueError: As `megatron_to_hf`, or the layout does not fit the model, or `target` exists, or it
            holds adapters.
    """
    refuse_existing(target)
    folders = {"": _model_folder(checkpoint, model, "model", "--model")}
    if (checkpoint / VALUE).is_dir():
        folders[VALUE] = _model_folder(checkpoint, value_model, "value_model", "--value-model")
    meta = check(checkpoint)
    if meta.get("lora") or meta.get("value_lora"):
        raise ValueError(
            f"{checkpoint}: of a model with adapters it holds these alone, which are not cut anew; resume "
            "from it as it is, it loads under every layout"
        )
    held = {part: families.read(folder, stored_head(checkpoint / part)) for part, folder in folders.items()}
    for family in held.values():
        family.check_layout(layout)
    with _whole_or_not_at_all(target) as temporary:
        for part, family in held.items():
            (temporary / part).mkdir(exist_ok=True)
            ranks = _recut(StoredTensors(checkpoint / part), family, layout)
            write_checkpoint(temporary / part, ranks, checkpoint / part / COMMON)
        if (checkpoint / EMA).is_dir():
            # It loads under every layout as it is.
            shutil.copytree(checkpoint / EMA, temporary / EMA)
        # No data size fits it: the generators' states are of the old layout's ranks and are left behind.
        facts = {k: v for k, v in meta.items() if k != "files"} | {"data": None}
        complete(temporary, target, facts | _sizes(layout))


def _sizes(layout: ParallelConfig) -> dict[str, int]:
    return {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}


def _model_folder(
    checkpoint: Path, given: Path | None, key: Literal["model", "value_model"], option: str
) -> Path:
    """The folder with config and tokenizer: given with `option`, or named by meta.json under `key`."""
    if given is not None:
        return given
    named = named_meta(checkpoint).get(key)
    if not named or not Path(named).is_dir():
        what = "the model's" if key == "model" else "the value model's"
        raise ValueError(
            f"{checkpoint}: {what} folder is {named or 'not told in it'}"
            f"{' and not there' if named else ''}; give {option} FOLDER, for its config and tokenizer"
        )
    return Path(named)


def _only_dtype(source: Path, found: set[str]) -> str:
    if len(found) > 1:
        raise ValueError(f"{source}: the tensors are {' and '.join(sorted(found))}; choose one with --dtype")
    return found.pop()


@contextmanager
def _whole_or_not_at_all(target: Path) -> Iterator[Path]:
    """A folder to write into, removed if that fails; the caller gives it its name."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except RuntimeError as error:
        raise disk_error(error) or error from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cells(family: Family, layout: ParallelConfig) -> list[list[tuple[Slot, int, Chunk, Part]]]:
    """For each rank of one model copy, stage by stage, what it stores, with the number of its shard."""
    places = slots(family, layout)
    return [
        [
            (slot, rank - slot.holder, chunk, part)
            for slot in places
            if slot.stage == stage and rank in slot.owners
            for chunk, part in cut(slot, rank - slot.holder, family, layout.pipeline)
        ]
        for stage in range(layout.pipeline)
        for rank in range(max(layout.tensor, layout.expert))
    ]


class _Shards:
    """Tensor ranks' shards out of a folder; the last one is kept, since gate and up are two chunks of one."""

    def __init__(self, folder: WholeTensors) -> None:
        self._folder = folder
        self._held: tuple[object, Tensor] = (None, torch.empty(0))

    def part(self, slot: Slot, rank: int, part: Part, chunk: Chunk) -> Tensor:
        if self._held[0] != (slot, rank):
            self._held = (None, torch.empty(0))
            self._held = ((slot, rank), slot.read(self._folder, rank))
        return self._held[1][part.row : part.row + part.shape[0]].view(chunk.shape)


def _recut(stored: StoredTensors, family: Family, layout: ParallelConfig) -> list[list[Piece | Object]]:
    """Everything a checkpoint holds: parameters and their optimizer states cut for the layout, the rest as
    it is in the first rank's file."""
    cells = _cells(family, layout)
    known = {chunk.key: len(chunk.whole) for cell in cells for *_, chunk, _ in cell}
    prefixes: dict[str, list[str]] = {}
    rest: list[str] = []
    for key, shape in stored.shapes.items():
        names = (name for name in known if key == name or key.endswith("." + name))
        home = next((name for name in names if known[name] == len(shape)), None)
        if home is None:
            rest.append(key)
        else:
            prefixes.setdefault(home, []).append(key.removesuffix(home))
    ranks: list[list[Piece | Object]] = []
    for cell in cells:
        of_model = [chunk for *_, chunk, _ in cell]
        pieces = [
            Chunk(prefix + chunk.key, chunk.whole, chunk.start, chunk.shape)
            for chunk in of_model
            for prefix in prefixes.get(chunk.key, ())
        ]
        ranks.append([_piece(stored, chunk) for chunk in pieces])
    ranks[0] += [_piece(stored, chunk) for key in rest for chunk in stored.stored(key)]
    ranks[0] += [Object(key, partial(stored.read_object, key)) for key in stored.objects]
    return ranks


def _piece(stored: StoredTensors, chunk: Chunk) -> Piece:
    make: Callable[[], Tensor] = partial(stored.read, chunk)
    return Piece(chunk, stored.dtype(chunk.key), make)
