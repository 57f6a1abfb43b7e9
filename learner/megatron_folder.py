"""A Megatron checkpoint read and written one tensor at a time, in one process without Megatron's groups.

In a checkpoint every parameter is one tensor of the whole model: not cut by tensor rank, and the same
parameter of all layers stacked, so that `decoder.layers.mlp.linear_fc2.weight` is [layers, h, f], and of all
experts too: `decoder.layers.mlp.experts.experts.linear_fc2.weight` is [layers, experts, h, f]. It is stored
in chunks, each what one rank held of one layer. Optimizer states are stacked and cut the same way, under
names that end with the parameter's. Megatron's `.metadata` and `common.pt` are pickles, as it defines them: a
checkpoint from somebody you do not trust must not be opened.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from learner.config import ParallelConfig
from learner.families import Family
from learner.slots import Part, Slot, VocabSlot, slots

LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.\d+")

COMMON = "common.pt"
"""What is not a tensor: for an optimizer its groups and step; nothing for weights."""

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""metadata.json, by which Megatron knows how to read a checkpoint."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one tensor of a checkpoint."""

    key: str
    whole: tuple[int, ...]
    """The tensor's shape."""
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies in a checkpoint: in which tensor, and where in what is stacked there."""

    key: str
    stacked: tuple[int, ...] = ()
    """How many layers, and experts of each."""
    number: tuple[int, ...] = ()
    """Which of them."""

    def chunk(self, whole: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
        """A piece of the slot's parameter, as one of the tensor."""
        ones = (1,) * len(self.stacked)
        return Chunk(self.key, self.stacked + whole, self.number + start, ones + shape)


def place(slot: Slot, family: Family, pipeline: int) -> Place:
    """Where a slot of a layout with so many stages lies in a checkpoint."""
    found = LAYER.match(slot.parameter)
    if found is None:
        return Place(slot.parameter)
    layer = family.stage_layers(slot.stage, pipeline)[int(found[2])]
    key = LAYER.sub(r"\1", slot.parameter)
    if slot.expert is None or family.mixture is None:
        return Place(key, (family.layers,), (layer,))
    return Place(EXPERT.sub(".experts", key), (family.layers, family.mixture.experts), (layer, slot.expert))


def uncut(slot: Slot, family: Family) -> Chunk:
    """All of a slot that no tensor or pipeline size cuts."""
    shape = slot.full_shape
    return place(slot, family, 1).chunk(shape, (0,) * len(shape), shape)


def cut(slot: Slot, rank: int, family: Family, pipeline: int) -> Iterator[tuple[Chunk, Part]]:
    """What a tensor rank stores of a slot, each with where it is in the rank's shard."""
    home = place(slot, family, pipeline)
    for part in slot.parts(rank):
        yield home.chunk(slot.full_shape, part.start, part.shape), part


class StoredTensors:
    """The tensors of a checkpoint by Megatron's names, read piece by piece."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: It is no checkpoint.
        """
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            metadata: Metadata = self._reader.read_metadata()
        except OSError as error:
            raise ValueError(f"{path}: no Megatron checkpoint: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        found = metadata.state_dict_metadata
        self._tensors = {key: one for key, one in found.items() if isinstance(one, TensorStorageMetadata)}
        self.objects = [key for key in found if key not in self._tensors]
        """Names of what is stored as bytes and is no tensor."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(found.size) for key, found in self._tensors.items()}

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def stored(self, key: str) -> list[Chunk]:
        """The pieces a tensor is stored in."""
        found = self._tensors[key]
        return [Chunk(key, tuple(found.size), tuple(c.offsets), tuple(c.sizes)) for c in found.chunks]

    def read(self, chunk: Chunk) -> Tensor:
        """A piece; zeros where it reaches beyond the tensor's end, as a padded vocabulary's does.

        Raises:
            ValueError: The tensor is missing, or nobody stored some of it.
        """
        stored = self._tensors.get(chunk.key)
        if stored is None:
            raise ValueError(f"{self.path}: the checkpoint has no tensor {chunk.key}")
        target = torch.zeros(chunk.shape, dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape))
        items = create_read_items_for_chunk_list(chunk.key, stored, [wanted])
        ends = zip(chunk.start, chunk.shape, stored.size, strict=True)
        there = prod(max(0, min(start + length, size) - start) for start, length, size in ends)
        if sum(prod(item.lengths) for item in items) != there:
            raise ValueError(f"{self.path}: {chunk.key} is not stored whole")
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target

    def read_object(self, key: str) -> io.BytesIO:
        """What is stored under a name of `objects`, as it is."""
        nowhere, index = torch.Size((0,)), MetadataIndex(key)
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        planner = _Into(torch.empty(0))
        self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.held


class MegatronFolder:
    """`WholeTensors` of a checkpoint's weights: by Hugging Face's names, whatever layout wrote them."""

    def __init__(self, path: Path, family: Family, places: Sequence[Slot] | None = None) -> None:
        """Args:
        places: What is in it, uncut; None for all the family's weights.
        """
        self.path = path
        self._stored = StoredTensors(path)
        self._shapes = self._stored.shapes
        self._homes = {
            whole.name: (slot, uncut(slot, family))
            for slot in (slots(family, ParallelConfig()) if places is None else places)
            for whole in slot.whole
        }
        self._held: tuple[Slot | None, dict[str, Tensor]] = (None, {})

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        slot, chunk = self._homes[name]
        found = self._shapes.get(chunk.key)
        if found is None:
            raise ValueError(f"{self.path}: the checkpoint has no tensor {chunk.key}")
        # A vocabulary may be longer than config.json says: it is padded to its writer's tensor size.
        padded = isinstance(slot, VocabSlot) and found[0] > chunk.whole[0] and found[1:] == chunk.whole[1:]
        if found != chunk.whole and not padded:
            raise ValueError(
                f"{self.path}: {chunk.key} has shape {found}; config.json asks for {chunk.whole}"
            )

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        slot, chunk = self._homes[name]
        if self._held[0] is not slot:
            self._held = (None, {})
            parameter = self._stored.read(chunk).view(slot.full_shape)
            names = (whole.name for whole in slot.whole)
            self._held = (slot, dict(zip(names, slot.join([parameter]), strict=True)))
        part = self._held[1][name]
        return part[rows] if columns is None else part[rows, columns]


class _Into(DefaultLoadPlanner):
    """Where the reader puts what it reads."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target
        self.held = io.BytesIO()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in ends)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.held = value


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk to write, and what makes it."""

    chunk: Chunk
    dtype: torch.dtype
    make: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Object:
    """Bytes to write under a name, and what makes them."""

    key: str
    make: Callable[[], io.BytesIO]


def write_checkpoint(path: Path, ranks: Sequence[Sequence[Piece | Object]], common: Path | None) -> None:
    """Write Megatron's files into an empty folder, each tensor as it is made.

    Args:
        ranks: For each rank of the layout what its file holds.
        common: A `common.pt` to take over; without one nothing but tensors is stored.
    """
    writer = FileSystemWriter(path)
    plans, metadata = create_default_global_save_plan([SavePlan([*map(_item, rank)]) for rank in ranks])
    planner = _From({_item(one).index: one for rank in ranks for one in rank})
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)
    if common is None:
        torch.save({}, path / COMMON)
    else:
        shutil.copyfile(common, path / COMMON)
    (path / "metadata.json").write_text(json.dumps(BACKENDS))


def _item(one: Piece | Object) -> WriteItem:
    if isinstance(one, Object):
        return WriteItem(MetadataIndex(one.key), WriteItemType.BYTE_IO)
    chunk = one.chunk
    place = ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape))
    told = TensorWriteData(place, TensorProperties(one.dtype), torch.Size(chunk.whole))
    return WriteItem(MetadataIndex(chunk.key, chunk.start), WriteItemType.SHARD, tensor_data=told)


class _From(DefaultSavePlanner):
    """Makes each piece when the writer comes to it."""

    def __init__(self, pieces: dict[MetadataIndex, Piece | Object]) -> None:
        super().__init__()
        self._pieces = pieces

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        one = self._pieces[write_item.index]
        if isinstance(one, Object):
            return one.make()
        made = one.make().to(one.dtype).contiguous()
        assert tuple(made.shape) == one.chunk.shape, one.chunk
        return made
