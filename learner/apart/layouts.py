"""From a micro-batch as the learner has it to what crosses the wire, and back."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.apart.work import Work
from learner.layout import Layout, Segment


def work_of(batch: Layout, temperature: float = 1.0, known: Sequence[Tensor] = ()) -> Work:
    """What such a model looks at of a micro-batch."""
    return Work(
        segments=tuple((s.prompt_length, *s.completion_lengths) for s in batch.segments),
        token_ids=_numbers(batch.token_ids[0]),
        target_positions=_numbers(batch.target_positions),
        target_ids=_numbers(batch.target_ids),
        temperature=temperature,
        known=tuple(values.cpu().numpy().astype(np.float32) for values in known),
    )


def _numbers(tensor: Tensor) -> NDArray[np.int32]:
    return tensor.cpu().numpy().astype(np.int32)


def layout_of(work: Work) -> Layout:
    """The micro-batch again, on the CPU. Which completion a target is of, it does not know: all are of the
    first."""
    segments, positions, start = [], [], 0
    for prompt, *completions in work.segments:
        segments.append(Segment(start, prompt, tuple(completions)))
        positions += [np.arange(prompt), *(prompt + np.arange(length) for length in completions)]
        start += prompt + sum(completions)
    targets = len(work.target_ids)
    return Layout(
        token_ids=torch.from_numpy(work.token_ids.astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        segments=segments,
        target_positions=torch.from_numpy(work.target_positions.astype(np.int64)),
        target_ids=torch.from_numpy(work.target_ids.astype(np.int64)),
        weights=torch.ones(targets),
        sequence_index=torch.zeros(targets, dtype=torch.int64),
    )
