"""Encoded examples into micro-batches, by `learner/layout.py`: a prompt once, its responses behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.layout import Layout, Row, empty_layout, fill, lay_out, shallow
from learner.offline.encoding import Encoded


@dataclass(frozen=True, slots=True)
class ExampleBatch(Layout):
    """A layout of B responses; `sequence_index` counts them from 0. An example lies wholly in one."""

    prompts: Tensor
    """int64 [B]: which example each response belongs to."""
    scores: Tensor
    """float64 [B]; 0 where the data has none."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: log π of the frozen model; None for stages without one."""


@dataclass(frozen=True, slots=True)
class _Response(Row):
    example: int
    score: float


def pack(
    examples: Sequence[Encoded], tokens_per_microbatch: int, only_ends: bool = False
) -> list[ExampleBatch]:
    """Lay examples out in as few micro-batches as first-fit decreasing finds.

    Args:
        examples: Of this rank.
        tokens_per_microbatch: Budget; a longer example goes alone.
        only_ends: Targets are the last token of each response, read where they stand, instead of all that
            are trained, read where they are predicted.
    """
    segments: list[list[_Response]] = []
    for number, example in enumerate(examples):
        scores = example.scores or (0.0,) * len(example.responses)
        segments.append(
            [
                _Response(0, example.prompt, response, targets[-1:] if only_ends else targets, number, score)
                for response, targets, score in zip(example.responses, example.targets, scores, strict=True)
            ]
        )
    return [_lay_out(held, only_ends) for held in fill(segments, tokens_per_microbatch)]


def _lay_out(segments: list[list[_Response]], only_ends: bool) -> ExampleBatch:
    rows = [row for segment in segments for row in segment]
    numbers = iter(range(len(rows)))
    numbered = [[replace(row, sequence=next(numbers)) for row in segment] for segment in segments]
    return ExampleBatch(
        **shallow(lay_out(numbered, at_target=only_ends)),
        prompts=torch.tensor([row.example for row in rows]),
        scores=torch.tensor([row.score for row in rows], dtype=torch.float64),
    )


def empty() -> ExampleBatch:
    """A micro-batch that adds nothing: one response, which has nobody to be compared with."""
    return ExampleBatch(
        **shallow(empty_layout()),
        prompts=torch.zeros(1, dtype=torch.int64),
        scores=torch.zeros(1, dtype=torch.float64),
    )
