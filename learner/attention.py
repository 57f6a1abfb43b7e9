"""Attention over packed segments: prompts are computed once and shared by the completions behind them.

`PackedSegments` is made once per micro-batch and shared by all layers. It travels in the place of Megatron's
`packed_seq_params`, the one argument that reaches the core attention untouched, also through activation
recomputation. Each pipeline stage makes its own from its own micro-batch.

Shapes: S tokens of the micro-batch, H query heads and G key-value heads of this rank, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from learner.families import Rope


class SegmentLike(Protocol):
    """What attention needs of `learner.layout.Segment`."""

    @property
    def start(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def completion_lengths(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Block:
    """One call of attention: B rows of L queries over K keys each, padded to the longest row."""

    queries: Tensor
    """int64 [B, L]: tokens that ask."""
    keys: Tensor
    """int64 [B, K]: tokens they may see."""
    mask: Tensor | None
    """bool [L, K]: which of them each may see; None is plain causal, where queries and keys are the same."""
    real: Tensor
    """bool [B, L]: false where a query is padding."""


@dataclass
class PackedSegments(PackedSeqParams):
    """Everything the layers need to know of a micro-batch's layout."""

    blocks: tuple[Block, ...] = ()
    query_index: Tensor | None = None
    """int64 [Σ B · L]: the blocks' queries, one block after another; None when these are the S tokens."""
    key_index: Tensor | None = None
    """int64 [Σ B · K]."""
    kept: Tensor | None = None
    """int64 [S]: where the S tokens are among the queries; None when nothing is padded."""
    cos: Tensor | None = None
    """Float32 [S, 1, 1, D / 2], with sin: the rotation of each token's position, as the engine rounds it."""
    sin: Tensor | None = None


def pack_segments(
    segments: Sequence[SegmentLike], position_ids: Tensor, rope: Rope, head_dim: int, dtype: torch.dtype
) -> PackedSegments:
    """Lay out the attention of a micro-batch.

    Args:
        segments: They cover the S tokens without gaps, in order; every prompt has a token.
        position_ids: int64 [1, S].
        rope: Frequencies of the rotary embedding.
        head_dim: D.
        dtype: Of queries and keys; the engine's table of rotations is of that type too.
    """
    device = position_ids.device
    blocks = tuple(block for segment in segments for block in _blocks(segment, device))
    real = torch.cat([block.real.flatten() for block in blocks])
    assert int(real.sum()) == position_ids.shape[1], "segments do not cover the micro-batch"
    padded = not bool(real.all())
    angles = position_ids[0].float()[:, None] * rope.inverse_frequencies(head_dim).to(device)
    return PackedSegments(
        qkv_format="sbhd",
        blocks=blocks,
        query_index=torch.cat([block.queries.flatten() for block in blocks]) if padded else None,
        key_index=torch.cat([block.keys.flatten() for block in blocks]),
        kept=real.nonzero()[:, 0] if padded else None,
        cos=angles.cos().to(dtype).float()[:, None, None],
        sin=angles.sin().to(dtype).float()[:, None, None],
    )


def _blocks(segment: SegmentLike, device: torch.device) -> list[Block]:
    """The prompt attends to itself; each completion to the prompt and itself.

    One call for all completions with gathered keys beats one for the whole segment with a block mask, because
    it computes no hidden scores: measured with 8 completions, 2.3 times faster at 280 tokens, 5 times at
    1,800.
    """
    start, prompt = segment.start, segment.prompt_length
    lengths = torch.tensor([n for n in segment.completion_lengths if n], device=device)
    if len(lengths) <= 1:
        return [_causal(start, prompt + int(lengths.sum()), device)]
    longest = int(lengths.max())
    starts = start + prompt + lengths.cumsum(0) - lengths
    offsets = torch.arange(longest, device=device)
    real = offsets < lengths[:, None]
    # Padding repeats the completion's first token: a valid index, masked as a key, dropped as a query.
    queries = starts[:, None] + torch.where(real, offsets, 0)
    shared = start + torch.arange(prompt, device=device)
    keys = torch.cat([shared.expand(len(lengths), -1), queries], dim=1)
    mask = torch.ones(longest, prompt + longest, dtype=torch.bool, device=device).tril(prompt)
    return [_causal(start, prompt, device), Block(queries, keys, mask, real)]


def _causal(start: int, length: int, device: torch.device) -> Block:
    """Tokens that see themselves and those before them."""
    tokens = start + torch.arange(length, device=device)[None]
    return Block(tokens, tokens, None, torch.ones_like(tokens, dtype=torch.bool))


class SegmentAttention(torch.nn.Module):
    """Megatron's core attention: rotates queries and keys by position, then attends within segments."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **_: Any,
    ) -> Tensor:
        """[S, 1, H, D], [S, 1, G, D], [S, 1, G, D] → [S, 1, H · D]; `attention_mask` is unused."""
        packed = packed_seq_params
        assert packed.key_index is not None
        dtype = query.dtype
        query = Rotate.apply(query, packed.cos, packed.sin)[:, 0]
        key = Rotate.apply(key, packed.cos, packed.sin)[:, 0]
        value = value[:, 0]
        if query.device.type == "cpu":
            # torch's bfloat16 attention on CPU is four times slower than float32's.
            query, key, value = query.float(), key.float(), value.float()
        # One gather for all blocks: a gather's gradient is as large as its source, so one each would cost
        # blocks · S.
        if packed.query_index is not None:
            query = query.index_select(0, packed.query_index)
        queries = _split(query, [block.queries for block in packed.blocks])
        keys = _split(key.index_select(0, packed.key_index), [block.keys for block in packed.blocks])
        values = _split(value.index_select(0, packed.key_index), [block.keys for block in packed.blocks])
        outputs = map(self._attend, packed.blocks, queries, keys, values)
        output = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in outputs])
        if packed.kept is not None:
            output = output.index_select(0, packed.kept)
        return output.to(dtype).flatten(1).unsqueeze(1)

    def _attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, L, D], [B, G, K, D] twice → [B, H, L, D]."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=self.scale,
            enable_gqa=True,
        )


def _split(heads: Tensor, indices: list[Tensor]) -> list[Tensor]:
    """[Σ B · L, heads, D] → [B, heads, L, D] for each block."""
    parts = heads.split([index.numel() for index in indices])
    return [
        part.unflatten(0, index.shape).transpose(1, 2) for part, index in zip(parts, indices, strict=True)
    ]


class Rotate(torch.autograd.Function):
    """Rotary embedding of the two halves of each head; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[S, 1, heads, D], [S, 1, 1, D / 2] twice → [S, 1, heads, D]."""
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32, rounded once, as vLLM does: each further rounding is a difference to the engine."""
    wide = heads.float()
    output = torch.empty_like(wide, memory_format=torch.contiguous_format)
    first, second = wide.chunk(2, dim=-1)
    out_first, out_second = output.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return output.to(heads.dtype)
