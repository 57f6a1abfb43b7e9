"""How token sequences lie in a micro-batch: completions behind their shared prompt, up to a token budget.

Shapes: S tokens laid out in a micro-batch, N of them targets. Pure: numpy arrays in, CPU tensors out. What is
known of the targets beside their ids is added by `learner/packing.py` for reinforcement learning and by
`learner/offline/packing.py` for the offline stages; `learner/model.py` computes on the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt and the completions behind it: prompt, completion 1, completion 2…

    Token positions restart after the prompt for each completion; each completion attends to the prompt and,
    causally, to itself. The last prompt position predicts the first token of every completion.
    """

    start: int
    """Index of the prompt's first token in the micro-batch."""
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.completion_lengths)


@dataclass(frozen=True, slots=True)
class Layout:
    """What one forward pass computes on. A completion always lies wholly in one micro-batch."""

    token_ids: Tensor
    """int64 [1, S]."""
    position_ids: Tensor
    """int64 [1, S]."""
    segments: list[Segment]
    target_positions: Tensor
    """int64 [N]: index into S of the hidden state that the output layer reads for the target: the one that
    predicts it, or for a score its own."""
    target_ids: Tensor
    """int64 [N]: the targets themselves."""
    weights: Tensor
    """float32 [N]: 1, or 0 for the one target of an empty micro-batch, which counts nowhere."""
    sequence_index: Tensor
    """int64 [N]: which completion it belongs to."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    def to(self, device: torch.device) -> Self:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


@dataclass(frozen=True, slots=True)
class Row:
    """One completion with at least one target, cut behind its last one."""

    sequence: int
    """Its number in `Layout.sequence_index`."""
    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    targets: NDArray[np.int64]
    """Indices into the completion, rising."""


R = TypeVar("R", bound=Row)


def segment_length(rows: Sequence[Row]) -> int:
    """Tokens of a segment: its rows share the prompt."""
    return len(rows[0].prompt) + sum(len(r.completion) for r in rows)


def fill(segments: Sequence[list[R]], tokens_per_microbatch: int) -> list[list[list[R]]]:
    """Deal segments into as few micro-batches as first-fit decreasing finds.

    One longer than the budget gets a micro-batch of its own. The same for the same arguments: Python's sort
    is stable, so equal lengths stay in order.
    """
    return fill_together([[segment] for segment in segments], tokens_per_microbatch)


def fill_together(bundles: Sequence[list[list[R]]], tokens_per_microbatch: int) -> list[list[list[R]]]:
    """As `fill`, of bundles of segments that must lie in the same micro-batch."""
    bins: list[tuple[int, list[list[R]]]] = []
    for bundle in sorted(bundles, key=_bundle_length, reverse=True):
        length = _bundle_length(bundle)
        home = next((i for i, (used, _) in enumerate(bins) if used + length <= tokens_per_microbatch), None)
        if home is None:
            bins.append((length, bundle))
        else:
            used, held = bins[home]
            bins[home] = (used + length, [*held, *bundle])
    return [held for _, held in bins]


def _bundle_length(bundle: Sequence[Sequence[Row]]) -> int:
    return sum(segment_length(segment) for segment in bundle)


def lay_out(segments: Sequence[Sequence[Row]], at_target: bool = False) -> Layout:
    """Lay segments out one behind the other; targets come in the order of their rows.

    Args:
        segments: The rows of each share their prompt, which has a token.
        at_target: Target positions are those of the targets themselves, not of what predicts them.
    """
    token_ids: list[NDArray[np.int32]] = []
    position_ids: list[NDArray[np.int64]] = []
    placed: list[Segment] = []
    read_from: list[NDArray[np.int64]] = []
    start = 0
    for rows in segments:
        prompt = rows[0].prompt
        token_ids.append(prompt)
        position_ids.append(np.arange(len(prompt)))
        at = start + len(prompt)
        for row in rows:
            token_ids.append(row.completion)
            position_ids.append(np.arange(len(prompt), len(prompt) + len(row.completion)))
            positions = at + row.targets
            if not at_target:
                # The first token of every completion is predicted from the end of the shared prompt.
                positions = np.where(row.targets == 0, start + len(prompt) - 1, positions - 1)
            read_from.append(positions)
            at += len(row.completion)
        placed.append(Segment(start, len(prompt), tuple(len(r.completion) for r in rows)))
        start = at
    flat = [row for rows in segments for row in rows]
    counts = torch.tensor([len(row.targets) for row in flat])
    target_ids = np.concatenate([row.completion[row.targets] for row in flat])
    return Layout(
        token_ids=torch.from_numpy(np.concatenate(token_ids)).to(torch.int64)[None],
        position_ids=torch.from_numpy(np.concatenate(position_ids)).to(torch.int64)[None],
        segments=placed,
        target_positions=torch.from_numpy(np.concatenate(read_from)).to(torch.int64),
        target_ids=torch.from_numpy(target_ids).to(torch.int64),
        weights=torch.ones(len(target_ids)),
        sequence_index=torch.tensor([row.sequence for row in flat]).repeat_interleave(counts),
    )


def empty_layout() -> Layout:
    """One that adds nothing: ranks with fewer micro-batches run it so that all have equally many."""
    zero, two = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    return Layout(
        token_ids=two,
        position_ids=torch.tensor([[0, 1]]),
        segments=[Segment(start=0, prompt_length=1, completion_lengths=(1,))],
        target_positions=zero,
        target_ids=zero,
        weights=torch.zeros(1),
        sequence_index=zero,
    )


def shallow(layout: Layout) -> dict[str, Any]:
    """The layout's fields by name, for a micro-batch that adds some."""
    return {f.name: getattr(layout, f.name) for f in fields(layout)}
