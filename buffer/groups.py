"""A group in bytes: two frames, as they cross the wire and as they lie in the store.

`meta` is msgpack: ids, rewards, texts, lengths. `arrays` is the token arrays of all trajectories one after
the other, little-endian, N = Σ lengths tokens and R runs of tokens with one label:

    token_ids int32[N] | behavior_logprobs float32[N] | run_lengths int32[R] | run_labels int32[R]

A label says who sampled the token: 0 nobody, v + 1 the weights of version v; `loss_mask` and `versions` are
made of it again at the reader. As runs the two take no room, where spelled out they would be 5 of 13 bytes a
token, and the disk is what bounds the buffer's throughput. Every field is checked, by name and range, before
it is used.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import BadMessage
from buffer.fields import MAX_TEXT, choice, integer, mapping, number, pack, sequence, text, unpack
from buffer.records import MAX_REWARD, Group, Trajectory

Frame = bytes | bytearray | memoryview

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by this much: engines round."""
MAX_TRAJECTORIES = 4096
MAX_PARTS = 1024
"""Of a reward; each becomes a metric."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A group as it arrived, checked. Made by the server of a client's frames, kept by the store."""

    group: Group
    meta: Frame
    arrays: Frame
    oldest_version: int
    """Oldest version among the group's trained tokens."""
    newest_version: int
    trained_tokens: int


def encode_group(group: Group) -> tuple[bytes, memoryview]:
    """`meta` and `arrays` of a group; its token arrays are copied once, into `arrays`.

    Raises:
        BadMessage: An array of the wrong dtype, shape, length or range, naming it.
    """
    lengths = [_length(i, t) for i, t in enumerate(group.trajectories)]
    if not lengths:
        raise BadMessage("trajectories: expected 1 or more, got none")
    total = sum(lengths)
    mask = np.concatenate([t.loss_mask for t in group.trajectories])
    versions = np.concatenate([t.versions for t in group.trajectories])
    if int(mask.max(initial=0)) > 1:
        raise BadMessage(f"loss_mask: expected 0 or 1, got {int(mask.max())}")
    if int(versions.min(initial=0)) < 0:
        raise BadMessage(f"versions: expected 0 or more, got {int(versions.min())}")
    if np.logical_and(versions, mask == 0).any():
        # A label where nothing was sampled means that the arrays are shifted against each other.
        raise BadMessage("versions: expected 0 where loss_mask is 0")
    labels = (versions + 1) * mask
    starts = np.flatnonzero(np.diff(labels, prepend=labels[:1] + 1))
    runs = len(starts)
    arrays = bytearray(8 * total + 8 * runs)
    fields = _views(memoryview(arrays), total, runs)
    np.concatenate([t.token_ids for t in group.trajectories], out=fields.token_ids)
    np.concatenate([t.behavior_logprobs for t in group.trajectories], out=fields.behavior_logprobs)
    fields.run_lengths[:] = np.diff(starts, append=total)
    fields.run_labels[:] = labels[starts]
    meta = {
        "group_id": group.group_id,
        "lease_id": group.lease_id,
        "prompt_id": group.prompt_id,
        "kind": group.kind,
        "lengths": lengths,
        "runs": runs,
        "trajectories": [
            {
                "index": t.index,
                "reward": float(t.reward),
                "reward_parts": {k: float(v) for k, v in t.reward_parts.items()},
                "finish_reason": t.finish_reason,
                "turns": t.turns,
                "metadata": t.metadata,
            }
            for t in group.trajectories
        ],
    }
    return pack(meta), memoryview(arrays)


def decode_group(meta: Frame, arrays: Frame) -> Group:
    """The group of two frames; see `decode_delivery`."""
    return decode_delivery(meta, arrays).group


def decode_delivery(meta: Frame, arrays: Frame) -> Delivery:
    """The group of two frames, every field checked. Token ids and logprobs are read-only views of `arrays`.

    Raises:
        BadMessage: Naming the field.
    """
    fields = unpack(meta, "meta")
    raw = sequence(fields, "lengths", MAX_TRAJECTORIES)
    lengths = [integer({"lengths": n}, "lengths", 1) for n in raw]
    entries = sequence(fields, "trajectories", MAX_TRAJECTORIES)
    if not lengths or len(entries) != len(lengths):
        raise BadMessage(
            f"trajectories: expected {max(1, len(lengths))}, as `lengths` says, got {len(entries)}"
        )
    total, runs = sum(lengths), integer(fields, "runs", 1)
    size = memoryview(arrays).nbytes
    if size != 8 * (total + runs):
        raise BadMessage(
            f"arrays: expected {8 * (total + runs)} bytes for {total} tokens in {runs} runs, got {size}"
        )
    tokens = _views(memoryview(arrays), total, runs)
    sampled = _check_runs(tokens, total)
    labels = np.repeat(tokens.run_labels, tokens.run_lengths)
    mask = (labels > 0).view(np.uint8)
    versions = labels - mask  # label v + 1 is version v, label 0 is version 0 unsampled
    _check_ranges(tokens, mask)
    trajectories: list[Trajectory] = []
    start = 0
    for number_, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        cut = slice(start, start + length)
        start += length
        arrays_ = (tokens.token_ids[cut], mask[cut], tokens.behavior_logprobs[cut], versions[cut])
        trajectories.append(_trajectory(number_, entry, arrays_))
    group = Group(
        text(fields, "group_id"),
        text(fields, "lease_id"),
        text(fields, "prompt_id"),
        choice(fields, "kind", ("train", "eval")),
        tuple(trajectories),
    )
    versions_ = tokens.run_labels[sampled] - 1
    trained = int(tokens.run_lengths[sampled].sum(dtype=np.int64))
    return Delivery(group, meta, arrays, int(versions_.min()), int(versions_.max()), trained)


@dataclass(frozen=True, slots=True)
class _Tokens:
    token_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    run_lengths: NDArray[np.int32]
    run_labels: NDArray[np.int32]


def _views(arrays: memoryview, total: int, runs: int) -> _Tokens:
    # ZeroMQ may hand a small frame over at any address; only then does `require` copy.
    def view(dtype: str, count: int, start: int) -> NDArray[Any]:
        return np.require(np.frombuffer(arrays, dtype, count, start), requirements="A")

    ends = 8 * total
    return _Tokens(
        view("<i4", total, 0),
        view("<f4", total, 4 * total),
        view("<i4", runs, ends),
        view("<i4", runs, ends + 4 * runs),
    )


def _length(number_: int, trajectory: Trajectory) -> int:
    length = len(trajectory.token_ids)
    for name, dtype in (
        ("token_ids", "i4"),
        ("behavior_logprobs", "f4"),
        ("versions", "i4"),
        ("loss_mask", "u1"),
    ):
        array: NDArray[Any] = getattr(trajectory, name)
        if array.dtype != np.dtype(dtype) or array.shape != (length,):
            raise BadMessage(
                f"trajectories[{number_}].{name}: expected {np.dtype(dtype)}[{length}], "
                f"got {array.dtype}{list(array.shape)}"
            )
    return length


def _check_runs(tokens: _Tokens, total: int) -> NDArray[np.bool_]:
    """Which runs were sampled; at least one."""
    if int(tokens.run_lengths.min()) < 1 or int(tokens.run_lengths.sum(dtype=np.int64)) != total:
        raise BadMessage(f"run_lengths: expected 1 or more each, {total} in all")
    if int(tokens.run_labels.min()) < 0:
        raise BadMessage(f"versions: expected 0 or more, got {int(tokens.run_labels.min()) - 1}")
    sampled = tokens.run_labels > 0
    if not sampled.any():
        raise BadMessage("loss_mask: no token of the group was sampled")
    return sampled


def _check_ranges(tokens: _Tokens, mask: NDArray[np.uint8]) -> None:
    if int(tokens.token_ids.min()) < 0:
        raise BadMessage(f"token_ids: expected 0 or more, got {int(tokens.token_ids.min())}")
    if not np.isfinite(tokens.behavior_logprobs).all():
        raise BadMessage("behavior_logprobs: expected finite numbers, got NaN or infinity")
    highest = float(tokens.behavior_logprobs.max())
    if highest > LOGPROB_SLACK:
        raise BadMessage(f"behavior_logprobs: expected 0 or less, got {highest}")
    if np.logical_and(tokens.behavior_logprobs, mask == 0).any():
        raise BadMessage("behavior_logprobs: expected 0 where loss_mask is 0")


def _trajectory(number_: int, entry: Any, arrays: tuple[NDArray[Any], ...]) -> Trajectory:
    where = f"trajectories[{number_}]"
    fields = mapping({where: entry}, where)
    where += "."
    token_ids, loss_mask, behavior_logprobs, versions = arrays
    if loss_mask[0]:
        raise BadMessage(
            f"{where}loss_mask: its first token is marked as sampled; nothing comes before it to predict it "
            "from"
        )
    return Trajectory(
        index=integer(fields, "index", where=where),
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        versions=versions,
        reward=_reward(fields, "reward", where),
        reward_parts=_reward_parts(fields, where),
        finish_reason=text(fields, "finish_reason", where=where),
        turns=integer(fields, "turns", 1, where=where),
        metadata=mapping(fields, "metadata", where=where),
    )


def _reward(fields: dict[str, Any], name: str, where: str) -> float:
    return number(fields, name, -MAX_REWARD, MAX_REWARD, where=where)


def _reward_parts(fields: dict[str, Any], where: str) -> dict[str, float]:
    parts = mapping(fields, "reward_parts", where=where)
    where += "reward_parts"
    if len(parts) > MAX_PARTS:
        raise BadMessage(f"{where}: expected at most {MAX_PARTS}, got {len(parts)}")
    for name in parts:
        # Names become those of metrics, between ranks in fields of one width, filled up with zeros.
        if not name.isprintable() or len(name) > MAX_TEXT:
            raise BadMessage(
                f"{where}: expected printable names of at most {MAX_TEXT} characters, got {name!r:.80}"
            )
    return {name: _reward(parts, name, f"{where}.") for name in parts}
