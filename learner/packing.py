"""Groups into micro-batches: completions behind their shared prompt, groups up to a token budget.

Shapes: S tokens laid out in a micro-batch, N trained tokens (targets) in it. Pure: numpy records in, CPU
tensors out. Called by `learner/step.py`; `learner/model.py` computes on the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.records import Group, Trajectory


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
class MicroBatch:
    """What one forward pass computes on. A trajectory always lies wholly in one micro-batch."""

    token_ids: Tensor
    """int64 [1, S]."""
    position_ids: Tensor
    """int64 [1, S]."""
    segments: list[Segment]
    target_positions: Tensor
    """int64 [N]: index into S of the hidden state that predicts the trained token."""
    target_ids: Tensor
    """int64 [N]: the trained tokens."""
    behavior_logprobs: Tensor
    """float32 [N]: log μ, of the engine when it sampled."""
    advantages: Tensor
    """float32 [N]."""
    weights: Tensor
    """float32 [N]: 1, or 0 for the one target of an empty micro-batch, which counts nowhere."""
    sequence_index: Tensor
    """int64 [N]: which trajectory of the shard."""
    versions: Tensor
    """int32 [N]: policy version that sampled the token."""
    proximal_logprobs: Tensor | None = None
    """float32 [N]: log π of the learner at the start of the batch; None before they are computed."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: log π of the frozen model; None without a KL term."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    def to(self, device: torch.device) -> "MicroBatch":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


@dataclass(frozen=True, slots=True)
class _Row:
    """One trajectory with at least one trained token, cut behind its last one."""

    sequence: int
    prompt: NDArray[np.int32]
    """Tokens before the first trained one."""
    trajectory: Trajectory
    end: int
    """Index behind the last trained token."""
    advantage: float

    @property
    def completion_length(self) -> int:
        return self.end - len(self.prompt)


@dataclass(slots=True)
class _Bin:
    rows: list[list[_Row]] = field(default_factory=list)
    """Rows by segment; the rows of a segment share their prompt."""
    tokens: int = 0


def pack(
    groups: Sequence[Group],
    advantages: Sequence[NDArray[np.floating]],
    tokens_per_microbatch: int,
    only_moving: bool = False,
) -> list[MicroBatch]:
    """Lay the groups out in as few micro-batches as first-fit decreasing finds.

    Args:
        groups: The shard. Trajectories without a trained token are left out.
        advantages: Per group, one number per trajectory, in the group's order.
        tokens_per_microbatch: Budget of S. A group beyond it is split between completions, with the prompt
            repeated; a single trajectory beyond it gets a micro-batch of its own.
        only_moving: Leave out trajectories of advantage 0, whose policy loss has no gradient.

    Returns:
        The same micro-batches in the same order for the same arguments.

    Raises:
        ValueError: A trajectory whose first token is marked as sampled, or arrays of unequal length.
    """
    whole = _segments(groups, advantages, only_moving)
    segments = [part for segment in whole for part in _split(segment, tokens_per_microbatch)]
    # Python's sort is stable: equal lengths stay in the shard's order.
    bins: list[_Bin] = []
    for segment in sorted(segments, key=_segment_length, reverse=True):
        length = _segment_length(segment)
        home = next((b for b in bins if b.tokens + length <= tokens_per_microbatch), None)
        if home is None:
            home = _Bin()
            bins.append(home)
        home.rows.append(segment)
        home.tokens += length
    return [_lay_out(b.rows) for b in bins]


def empty() -> MicroBatch:
    """A micro-batch that adds nothing: ranks with fewer run it so that all have equally many."""
    zero, two = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    nothing = torch.zeros(1)
    return MicroBatch(
        token_ids=two,
        position_ids=torch.tensor([[0, 1]]),
        segments=[Segment(start=0, prompt_length=1, completion_lengths=(1,))],
        target_positions=zero,
        target_ids=zero,
        behavior_logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        sequence_index=zero,
        versions=zero.int(),
    )


def pad(micro_batches: list[MicroBatch], count: int) -> list[MicroBatch]:
    """Empty micro-batches behind the given ones, up to `count`."""
    assert len(micro_batches) <= count
    return micro_batches + [empty() for _ in range(count - len(micro_batches))]


def _segments(
    groups: Sequence[Group], advantages: Sequence[NDArray[np.floating]], only_moving: bool
) -> list[list[_Row]]:
    """The shard's trajectories, those of one group with the same prompt, token for token, together."""
    segments: list[list[_Row]] = []
    sequence = 0
    for group, values in zip(groups, advantages, strict=True):
        by_prompt: dict[bytes, list[_Row]] = {}
        for trajectory, value in zip(group.trajectories, values, strict=True):
            row = _row(group, trajectory, sequence, float(value))
            sequence += 1
            if row is not None and (value or not only_moving):
                by_prompt.setdefault(row.prompt.tobytes(), []).append(row)
        segments.extend(by_prompt.values())
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
    return _Row(sequence, trajectory.token_ids[: trained[0]], trajectory, int(trained[-1]) + 1, advantage)


def _segment_length(rows: list[_Row]) -> int:
    return len(rows[0].prompt) + sum(r.completion_length for r in rows)


def _split(rows: list[_Row], budget: int) -> list[list[_Row]]:
    """Cut a segment beyond the budget between completions, each part as full as their order allows."""
    parts: list[list[_Row]] = [[]]
    for row in rows:
        if parts[-1] and _segment_length([*parts[-1], row]) > budget:
            parts.append([])
        parts[-1].append(row)
    return parts


def _lay_out(segments_of_rows: list[list[_Row]]) -> MicroBatch:
    token_ids: list[NDArray[np.int32]] = []
    position_ids: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    targets: list[tuple[_Row, NDArray[np.int64], NDArray[np.int64]]] = []
    start = 0
    for rows in segments_of_rows:
        prompt = rows[0].prompt
        segment = Segment(start, len(prompt), tuple(r.completion_length for r in rows))
        token_ids.append(prompt)
        position_ids.append(np.arange(len(prompt)))
        at = start + len(prompt)
        for row in rows:
            token_ids.append(row.trajectory.token_ids[len(prompt) : row.end])
            position_ids.append(np.arange(len(prompt), row.end))
            trained = np.flatnonzero(row.trajectory.loss_mask)
            predicted_from = at + trained - len(prompt) - 1
            # The first token of every completion is predicted from the end of the shared prompt.
            predicted_from[trained == len(prompt)] = start + len(prompt) - 1
            targets.append((row, trained, predicted_from))
            at += row.completion_length
        segments.append(segment)
        start = at

    def gather(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(row.trajectory, name)[trained] for row, trained, _ in targets]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    counts = torch.tensor([len(trained) for _, trained, _ in targets])
    target_ids = gather("token_ids", torch.int64)
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(token_ids)).to(torch.int64)[None],
        position_ids=torch.from_numpy(np.concatenate(position_ids)).to(torch.int64)[None],
        segments=segments,
        target_positions=torch.from_numpy(np.concatenate([p for *_, p in targets])),
        target_ids=target_ids,
        behavior_logprobs=gather("behavior_logprobs", torch.float32),
        advantages=torch.tensor([row.advantage for row, *_ in targets]).float().repeat_interleave(counts),
        weights=torch.ones(len(target_ids)),
        sequence_index=torch.tensor([row.sequence for row, *_ in targets]).repeat_interleave(counts),
        versions=gather("versions", torch.int32),
    )
