"""Groups into micro-batches: what reinforcement learning trains on, laid out by `learner/layout.py`.

Shapes: N trained tokens (targets) of a micro-batch. Pure: numpy records in, CPU tensors out. Called by
`learner/step.py`; `learner/model.py` computes on the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.records import Group, Trajectory
from learner.layout import Layout, Row, empty_layout, fill, fill_together, lay_out, segment_length, shallow


@dataclass(frozen=True, slots=True)
class MicroBatch(Layout):
    """A layout whose targets are the trained tokens; `sequence_index` counts the shard's trajectories."""

    behavior_logprobs: Tensor
    """float32 [N]: log μ, of the engine when it sampled."""
    advantages: Tensor
    """float32 [N]."""
    versions: Tensor
    """int32 [N]: policy version that sampled the token."""
    proximal_logprobs: Tensor | None = None
    """float32 [N]: log π of the learner at the start of the batch; None before they are computed."""
    proximal_share: Tensor | None = None
    """float32 [N]: where the proximal policy lies between μ and π, if it is estimated; None if it is not."""
    trusted: Tensor | None = None
    """bool [N]: whether loss m2po trains it; None before that is known, and under other losses."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: log π of the frozen model; None without a KL term."""
    old_values: Tensor | None = None
    """float32 [N]: V before the target is drawn, at the start of the batch; None without a value model."""
    returns: Tensor | None = None
    """float32 [N]: what V is trained towards; None before they are computed."""


@dataclass(frozen=True, slots=True)
class ValueBatch(Layout):
    """A layout with what a value model is trained on, and nothing else of a MicroBatch."""

    old_values: Tensor
    """float32 [N]."""
    returns: Tensor
    """float32 [N]."""


@dataclass(frozen=True, slots=True)
class _Row(Row):
    trajectory: Trajectory
    advantage: float


def pack(
    groups: Sequence[Group],
    advantages: Sequence[NDArray[np.floating]],
    tokens_per_microbatch: int,
    only_moving: bool = False,
    whole_groups: bool = False,
) -> list[MicroBatch]:
    """Lay the groups out in as few micro-batches as first-fit decreasing finds.

    Args:
        groups: The shard. Trajectories without a trained token are left out.
        advantages: Per group, one number per trajectory, in the group's order.
        tokens_per_microbatch: Budget of S. A group beyond it is split between completions, with the prompt
            repeated; a single trajectory beyond it gets a micro-batch of its own.
        only_moving: Leave out trajectories of advantage 0, whose policy loss has no gradient.
        whole_groups: A group lies wholly in one micro-batch, however long it is.

    Returns:
        The same micro-batches in the same order for the same arguments.

    Raises:
        ValueError: A trajectory whose first token is marked as sampled, or arrays of unequal length.
    """
    by_group = _segments(groups, advantages, only_moving)
    if whole_groups:
        filled = fill_together([segments for segments in by_group if segments], tokens_per_microbatch)
    else:
        whole = [segment for segments in by_group for segment in segments]
        split = [part for segment in whole for part in _split(segment, tokens_per_microbatch)]
        filled = fill(split, tokens_per_microbatch)
    return [_micro_batch(held) for held in filled]


def empty() -> MicroBatch:
    """A micro-batch that adds nothing."""
    nothing = torch.zeros(1)
    return MicroBatch(
        **shallow(empty_layout()), behavior_logprobs=nothing, advantages=nothing, versions=nothing.int()
    )


def _segments(
    groups: Sequence[Group], advantages: Sequence[NDArray[np.floating]], only_moving: bool
) -> list[list[list[_Row]]]:
    """Each group's trajectories, those with the same prompt, token for token, together."""
    segments: list[list[list[_Row]]] = []
    sequence = 0
    for group, values in zip(groups, advantages, strict=True):
        by_prompt: dict[bytes, list[_Row]] = {}
        for trajectory, value in zip(group.trajectories, values, strict=True):
            row = _row(group, trajectory, sequence, float(value))
            sequence += 1
            if row is not None and (value or not only_moving):
                by_prompt.setdefault(row.prompt.tobytes(), []).append(row)
        segments.append([*by_prompt.values()])
    return segments


def _row(group: Group, trajectory: Trajectory, sequence: int, advantage: float) -> _Row | None:
    where = f"group {group.group_id} trajectory {trajectory.index}"
    length = len(trajectory.token_ids)
    for name in ("loss_mask", "behavior_logprobs", "versions"):
        if len(getattr(trajectory, name)) != length:
            raise ValueError(
                f"{where}: {name} has {len(getattr(trajectory, name))} entries for {length} tokens; "
                "expected one for each token"
            )
    trained = np.flatnonzero(trajectory.loss_mask)
    if not len(trained):
        return None
    if trained[0] == 0:
        raise ValueError(
            f"{where}: its first token is marked as sampled; nothing comes before it to predict it from"
        )
    prompt, completion = np.split(trajectory.token_ids[: trained[-1] + 1], [trained[0]])
    return _Row(sequence, prompt, completion, trained - trained[0], trajectory, advantage)


def _split(rows: list[_Row], budget: int) -> list[list[_Row]]:
    """Cut a segment beyond the budget between completions, each part as full as their order allows."""
    parts: list[list[_Row]] = [[]]
    for row in rows:
        if parts[-1] and segment_length([*parts[-1], row]) > budget:
            parts.append([])
        parts[-1].append(row)
    return parts


def _micro_batch(segments: list[list[_Row]]) -> MicroBatch:
    layout = lay_out(segments)
    rows = [row for segment in segments for row in segment]

    def gather(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(row.trajectory, name)[len(row.prompt) + row.targets] for row in rows]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    counts = torch.tensor([len(row.targets) for row in rows])
    return MicroBatch(
        **shallow(layout),
        behavior_logprobs=gather("behavior_logprobs", torch.float32),
        advantages=torch.tensor([row.advantage for row in rows]).float().repeat_interleave(counts),
        versions=gather("versions", torch.int32),
    )
