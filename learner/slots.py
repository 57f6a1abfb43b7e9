"""Which Hugging Face tensors make up which Megatron parameter, and how a layout cuts it and deals it out.

Imports no torch before tensors are touched: the command line compares a folder's headers with this list.
Shapes: h hidden size, f ffn size; of this rank: H query heads, G key-value heads; D head size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from learner.config import ParallelConfig
from learner.families import Family

if TYPE_CHECKING:
    from torch import Tensor

    from learner.safetensors_folder import WholeTensors

ALL = slice(None)


class Whole(NamedTuple):
    """A tensor in Hugging Face's layout."""

    name: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """What a tensor rank's shard holds of its parameter, where that is not cut."""

    start: tuple[int, ...]
    """First row, and column, in the uncut parameter."""
    shape: tuple[int, ...]
    row: int
    """First row in the shard."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter. This class is the uncut kind, the same on every tensor rank."""

    parameter: str
    """Its name in the stage that holds it."""
    stage: int
    whole: tuple[Whole, ...]
    tensor: int
    """Tensor-parallel size."""
    groups: int = 1
    """Into how many equal groups of rows several tensors are dealt, group by group."""
    expert: int | None = None
    """Which of its layer's experts it belongs to; None: to none."""
    holder: int = 0
    """The first rank of the stage that has a shard: for an expert's, the one expert-parallel rank."""

    @property
    def is_split(self) -> bool:
        return False

    @property
    def owners(self) -> range:
        """Ranks of the stage that have the shards, in their order; others have copies at most."""
        return range(self.holder, self.holder + (self.tensor if self.is_split else 1))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.whole[0].shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of the parameter if it were not cut; a vocabulary keeps the padding of this tensor size."""
        return self.whole[0].shape

    def parts(self, rank: int) -> list[Part]:
        """Where one tensor rank's shard lies in the uncut parameter; of equal copies rank 0's counts."""
        return [] if rank else [Part((0,) * len(self.full_shape), self.full_shape, 0)]

    def read(self, folder: "WholeTensors", rank: int) -> "Tensor":
        """The shard of one tensor rank."""
        return folder.read(self.whole[0].name, ALL)

    def join(self, shards: "list[Tensor]") -> "list[Tensor]":
        """The whole tensors, from every rank's shard."""
        return [shards[0]]


class RowSlot(Slot):
    """[out, in] cut along in: output and down projections."""

    @property
    def is_split(self) -> bool:
        return self.tensor > 1

    @property
    def shard_shape(self) -> tuple[int, ...]:
        rows, columns = self.whole[0].shape
        return rows, columns // self.tensor

    def parts(self, rank: int) -> list[Part]:
        return [Part((0, rank * self.shard_shape[1]), self.shard_shape, 0)]

    def read(self, folder: "WholeTensors", rank: int) -> "Tensor":
        width = self.shard_shape[1]
        return folder.read(self.whole[0].name, ALL, slice(rank * width, (rank + 1) * width))

    def join(self, shards: "list[Tensor]") -> "list[Tensor]":
        import torch

        return [torch.cat(shards, dim=1)]


class VocabSlot(RowSlot):
    """[vocabulary, h] cut along the vocabulary, the last shards padded with zeros."""

    @property
    def shard_shape(self) -> tuple[int, ...]:
        rows, columns = self.whole[0].shape
        return -(-rows // self.tensor), columns

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shard_shape[0] * self.tensor, self.shard_shape[1]

    def parts(self, rank: int) -> list[Part]:
        return [Part((rank * self.shard_shape[0], 0), self.shard_shape, 0)]

    def read(self, folder: "WholeTensors", rank: int) -> "Tensor":
        from torch.nn.functional import pad

        vocab, height = self.whole[0].shape[0], self.shard_shape[0]
        rows = folder.read(
            self.whole[0].name, slice(min(rank * height, vocab), min((rank + 1) * height, vocab))
        )
        return pad(rows, (0, 0, 0, height - len(rows)))

    def join(self, shards: "list[Tensor]") -> "list[Tensor]":
        import torch

        return [torch.cat(shards)[: self.whole[0].shape[0]]]


class StackedSlot(RowSlot):
    """Several [out, h] tensors, or [out] biases, stacked in groups of rows, and cut along out.

    q, k and v lie by key-value head: its queries, its key, its value. A shard is some whole groups, or, where
    there are more tensor ranks than groups, an equal part of one, wherever in it that begins and ends; its
    ranks then gather the products with all of the group (`megatron.core.transformer.attention`).
    """

    @property
    def splits_groups(self) -> bool:
        return self.tensor > self.groups

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.full_shape[0] // self.tensor, *self.full_shape[1:]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return sum(w.shape[0] for w in self.whole), *self.whole[0].shape[1:]

    def parts(self, rank: int) -> list[Part]:
        rows, *columns = self.shard_shape
        return [Part((rank * rows, *(0 for _ in columns)), self.shard_shape, 0)]

    def read(self, folder: "WholeTensors", rank: int) -> "Tensor":
        # Of whole groups: as many as this rank has, or the one that it has a part of.
        first = rank * self.groups // self.tensor
        end = first + max(1, self.groups // self.tensor)
        heights = [shape[0] // self.groups for _, shape in self.whole]
        parts = [
            folder.read(whole.name, slice(first * height, end * height))
            for whole, height in zip(self.whole, heights, strict=True)
        ]
        return self.part_of(self.stack(parts), rank)

    def join(self, shards: "list[Tensor]") -> "list[Tensor]":
        import torch

        rows = [shape[0] // self.groups for _, shape in self.whole]
        parts = torch.cat(shards).unflatten(0, (self.groups, -1)).split(rows, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def stack(self, parts: "list[Tensor]") -> "Tensor":
        """Rows of each tensor, of the same groups, dealt into those."""
        import torch

        groups = parts[0].shape[0] * self.groups // self.whole[0].shape[0]
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def part_of(self, groups: "Tensor", rank: int) -> "Tensor":
        """A rank's own rows, of whole groups that begin where its own begin."""
        rows = self.shard_shape[0]
        start = rank * rows % len(groups)
        return groups[start : start + rows]


class GateUpSlot(StackedSlot):
    """Gate and up, one after another in each shard, which is a group, and so too in the uncut parameter."""

    def parts(self, rank: int) -> list[Part]:
        found, row = [], 0
        for number, (_, (rows, columns)) in enumerate(self.whole):
            height = rows // self.tensor
            found.append(Part((number * rows + rank * height, 0), (height, columns), row))
            row += height
        return found


def slots(family: Family, layout: ParallelConfig) -> list[Slot]:
    """Every parameter of the whole model, in Hugging Face's order."""
    tensor, pipeline = layout.tensor, layout.pipeline
    vocab = (family.vocab, family.hidden)
    last = pipeline - 1
    found: list[Slot] = [
        VocabSlot("embedding.word_embeddings.weight", 0, (Whole("model.embed_tokens.weight", vocab),), tensor)
    ]
    for stage in range(pipeline):
        for number, layer in enumerate(family.stage_layers(stage, pipeline)):
            found += _layer(family, layer, stage, f"decoder.layers.{number}.", layout)
    norm = Whole("model.norm.weight", (family.hidden,))
    found.append(Slot("decoder.final_layernorm.weight", last, (norm,), tensor))
    if family.head == "score":
        found.append(Slot("score.weight", last, (Whole("score.weight", (1, family.hidden)),), tensor))
    elif not family.tied:
        found.append(VocabSlot("output_layer.weight", last, (Whole("lm_head.weight", vocab),), tensor))
    return found


def _layer(family: Family, layer: int, stage: int, home: str, layout: ParallelConfig) -> list[Slot]:
    hidden, head, tensor = family.hidden, family.head_dim, layout.tensor
    queries, keys = family.heads * head, family.kv_heads * head
    source = f"model.layers.{layer}."

    def whole(name: str, *shape: int) -> Whole:
        return Whole(source + name, shape)

    qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    weights = tuple(whole(f"self_attn.{name}.weight", rows, hidden) for name, rows in qkv)
    home_qkv = home + "self_attention.linear_qkv."
    found: list[Slot] = [StackedSlot(home_qkv + "weight", stage, weights, tensor, family.kv_heads)]
    if family.qkv_bias:
        biases = tuple(whole(f"self_attn.{name}.bias", rows) for name, rows in qkv)
        found.append(StackedSlot(home_qkv + "bias", stage, biases, tensor, family.kv_heads))
    output = whole("self_attn.o_proj.weight", hidden, queries)
    found.append(RowSlot(home + "self_attention.linear_proj.weight", stage, (output,), tensor))
    if family.qk_norm:
        for name in ("q", "k"):
            norm = whole(f"self_attn.{name}_norm.weight", head)
            found.append(Slot(home + f"self_attention.{name}_layernorm.weight", stage, (norm,), tensor))
    before = whole("input_layernorm.weight", hidden)
    between = whole("post_attention_layernorm.weight", hidden)
    return [
        *found,
        *_mlps(family, source, stage, home + "mlp.", layout),
        Slot(home + "input_layernorm.weight", stage, (before,), tensor),
        Slot(home + "pre_mlp_layernorm.weight", stage, (between,), tensor),
    ]


def _mlps(family: Family, source: str, stage: int, home: str, layout: ParallelConfig) -> list[Slot]:
    """A layer's MLP, or its router and its experts, each uncut on one rank."""
    hidden, ffn, mixture = family.hidden, family.ffn, family.mixture

    def mlp(source: str, home: str, names: tuple[str, str, str], tensor: int, **of: int) -> list[Slot]:
        *gate_up, down = (f"{source}{name}.weight" for name in names)
        columns = tuple(Whole(name, (ffn, hidden)) for name in gate_up)
        return [
            GateUpSlot(home + "linear_fc1.weight", stage, columns, tensor, tensor, **of),
            RowSlot(home + "linear_fc2.weight", stage, (Whole(down, (hidden, ffn)),), tensor, **of),
        ]

    if mixture is None:
        return mlp(source + "mlp.", home, ("gate_proj", "up_proj", "down_proj"), layout.tensor)
    source = f"{source}{mixture.home}."
    router = Whole(source + "gate.weight", (mixture.experts, hidden))
    found = [Slot(home + "router.weight", stage, (router,), layout.tensor)]
    each = mixture.experts // layout.expert
    for number in range(mixture.experts):
        holder, local = divmod(number, each)
        inside = f"{home}experts.local_experts.{local}."
        place = {"expert": number, "holder": holder}
        found += mlp(f"{source}experts.{number}.", inside, mixture.projections, 1, **place)
    return found
