"""What crosses between the buffer and its clients, in bytes: the one file that knows.

A message is a msgpack header followed by raw frames. A request's header names the schema, the run, who asks
and what; a reply's header repeats the request's id. Every request carries the whole introduction, so that a
buffer that was restarted answers a client that never noticed. A group travels as two frames: `meta` (msgpack:
ids, rewards, texts, lengths) and `arrays`, the four token arrays of all its trajectories one after the other,
little-endian, with N = Σ lengths:

    token_ids int32[N] | behavior_logprobs float32[N] | versions int32[N] | loss_mask uint8[N]

The store keeps those two frames as they came and serves them as they are. Every field is checked, by name and
range, before it is used; an error names the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from buffer.errors import KINDS, BadMessage, Refusal, WrongRun
from buffer.fields import choice, flag, integer, mapping, number, pack, sequence, text, texts, unpack
from buffer.records import Group, Lease, Prompt, Trajectory

SCHEMA = 1
"""Raised by one whenever the bytes change their meaning; a peer with another number is refused."""
BYTES_PER_TOKEN = 13
LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by this much: engines round."""
LONGEST_WAIT_S = 60.0
MAX_TRAJECTORIES = 4096

Frame = bytes | bytearray | memoryview

ROLES = ("rollout", "learner", "observer")
ROLLOUT_VERBS = ("hello", "status", "lease", "renew", "deliver", "give_up")
LEARNER_VERBS = ("hello", "status", "batch", "published", "committed", "finished")
VERBS = {"rollout": ROLLOUT_VERBS, "learner": LEARNER_VERBS, "observer": ("hello", "status")}


@dataclass(frozen=True, slots=True)
class Request:
    """Made by a client, read by the server."""

    request_id: str
    """Names the request over its retries; an answer carries it back."""
    role: str
    name: str
    run_id: str
    verb: str
    fields: dict[str, Any]
    """The verb's own fields, checked."""


def encode_request(request: Request) -> bytes:
    header = {
        "schema": SCHEMA,
        "id": request.request_id,
        "role": request.role,
        "name": request.name,
        "run_id": request.run_id,
        "verb": request.verb,
        **request.fields,
    }
    return pack(header)


def request_id_of(frame: Frame) -> str:
    """The id of a request that may be broken in any other way; empty when it cannot be told."""
    try:
        return text(unpack(frame, "header"), "id", 64)
    except BadMessage:
        return ""


def decode_request(frame: Frame, run_id: str) -> Request:
    """Check a request's header.

    Raises:
        WrongRun: Another schema, or another run.
        BadMessage: Any other fault, naming the field.
    """
    header = unpack(frame, "header")
    schema = integer(header, "schema")
    if schema != SCHEMA:
        raise WrongRun(
            f"schema: the buffer speaks {SCHEMA}, the client {schema}; run the same version on both sides"
        )
    request_id = text(header, "id", 64)
    theirs = text(header, "run_id")
    if theirs != run_id:
        raise WrongRun(f"run_id: this buffer serves run {run_id!r}, the client belongs to {theirs!r}")
    role = choice(header, "role", ROLES)
    verb = choice(header, "verb", VERBS[role])
    return Request(request_id, role, text(header, "name"), theirs, verb, _fields(verb, header))


def _fields(verb: str, header: dict[str, Any]) -> dict[str, Any]:
    match verb:
        case "lease":
            return {
                "max_groups": integer(header, "max_groups", 1, 1 << 16),
                "wait_s": number(header, "wait_s", 0.0, LONGEST_WAIT_S),
            }
        case "renew":
            return {"lease_ids": texts(header, "lease_ids")}
        case "give_up":
            return {
                "lease_id": text(header, "lease_id"),
                "reason": text(header, "reason"),
                "requeue": flag(header, "requeue"),
            }
        case "batch":
            size = integer(header, "dp_size", 1, 1 << 16)
            return {
                "index": integer(header, "index"),
                "dp_rank": integer(header, "dp_rank", 0, size - 1),
                "dp_size": size,
                "wait_s": number(header, "wait_s", 0.0, LONGEST_WAIT_S),
            }
        case "published" | "finished":
            return {"version": integer(header, "version")}
        case "committed":
            return {"index": integer(header, "index")}
        case _:
            return {}


def encode_reply(request_id: str, fields: dict[str, Any]) -> bytes:
    return pack({"schema": SCHEMA, "id": request_id, **fields})


def encode_refusal(request_id: str, refusal: Refusal) -> bytes:
    return encode_reply(request_id, {"refused": refusal.kind, "text": str(refusal)})


def decode_reply(frame: Frame) -> tuple[str, dict[str, Any]]:
    """The request's id, and the reply's fields. Whether it is a refusal is for `raise_if_refused`."""
    header = unpack(frame, "reply")
    schema = integer(header, "schema")
    if schema != SCHEMA:
        raise WrongRun(
            f"schema: the client speaks {SCHEMA}, the buffer {schema}; run the same version on both sides"
        )
    identity = header.get("id")
    return (identity if isinstance(identity, str) else ""), header


def raise_if_refused(reply: dict[str, Any]) -> None:
    if "refused" in reply:
        raise KINDS.get(text(reply, "refused"), Refusal)(str(reply.get("text", "")))


def encode_leases(leases: Sequence[Lease]) -> dict[str, Any]:
    return {"leases": [[x.lease_id, x.prompt.prompt_id, x.prompt.row, x.kind, x.version] for x in leases]}


def decode_leases(reply: dict[str, Any]) -> list[Lease]:
    names = ("lease_id", "prompt_id", "row", "kind", "version")
    leases: list[Lease] = []
    for entry in sequence(reply, "leases"):
        item: dict[str, Any] = dict(zip(names, cast("list[Any]", entry), strict=True))
        prompt = Prompt(text(item, "prompt_id"), mapping(item, "row"))
        kind = choice(item, "kind", ("train", "eval"))
        leases.append(Lease(text(item, "lease_id"), prompt, kind, integer(item, "version")))
    return leases


def encode_group(group: Group) -> tuple[bytes, memoryview]:
    """`meta` and `arrays` of a group; its token arrays are copied once, into `arrays`.

    Raises:
        BadMessage: An array of the wrong dtype, shape or length, naming it.
    """
    lengths = [_length(i, t) for i, t in enumerate(group.trajectories)]
    arrays = bytearray(BYTES_PER_TOKEN * sum(lengths))
    fields = _views(memoryview(arrays), sum(lengths))
    np.concatenate([t.token_ids for t in group.trajectories], out=fields.token_ids)
    np.concatenate([t.behavior_logprobs for t in group.trajectories], out=fields.behavior_logprobs)
    np.concatenate([t.versions for t in group.trajectories], out=fields.versions)
    np.concatenate([t.loss_mask for t in group.trajectories], out=fields.loss_mask)
    meta = {
        "group_id": group.group_id,
        "lease_id": group.lease_id,
        "prompt_id": group.prompt_id,
        "kind": group.kind,
        "lengths": lengths,
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
    """The group of two frames, every field checked; its arrays are read-only views of `arrays`, not copies.

    Raises:
        BadMessage: Naming the field.
    """
    fields = unpack(meta, "meta")
    raw = sequence(fields, "lengths", MAX_TRAJECTORIES)
    lengths = [integer({"lengths": n}, "lengths", 1) for n in raw]
    entries = sequence(fields, "trajectories", MAX_TRAJECTORIES)
    if not lengths or len(entries) != len(lengths):
        raise BadMessage(
            f"trajectories: expected one for each of {len(lengths)} lengths (1 or more), got {len(entries)}"
        )
    total = sum(lengths)
    size = memoryview(arrays).nbytes
    if size != BYTES_PER_TOKEN * total:
        raise BadMessage(
            f"arrays: expected {BYTES_PER_TOKEN} bytes for each of {total} tokens, got {size} bytes"
        )
    tokens = _views(memoryview(arrays), total)
    _check_ranges(tokens)
    trajectories: list[Trajectory] = []
    start = 0
    for number_, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        trajectories.append(_trajectory(number_, entry, tokens.cut(start, start + length)))
        start += length
    return Group(
        text(fields, "group_id"),
        text(fields, "lease_id"),
        text(fields, "prompt_id"),
        choice(fields, "kind", ("train", "eval")),
        tuple(trajectories),
    )


@dataclass(frozen=True, slots=True)
class TokenArrays:
    token_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    def cut(self, start: int, end: int) -> "TokenArrays":
        return TokenArrays(
            self.token_ids[start:end],
            self.behavior_logprobs[start:end],
            self.versions[start:end],
            self.loss_mask[start:end],
        )


def _views(arrays: memoryview, total: int) -> TokenArrays:
    # ZeroMQ may hand a small frame over at any address; only then does `require` copy.
    def view(dtype: Any, start: int) -> NDArray[Any]:
        return np.require(np.frombuffer(arrays, dtype, total, start), requirements="A")

    return TokenArrays(view("<i4", 0), view("<f4", 4 * total), view("<i4", 8 * total), view("u1", 12 * total))


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


def _check_ranges(tokens: TokenArrays) -> None:
    if int(tokens.token_ids.min()) < 0:
        raise BadMessage(f"token_ids: expected 0 or more, got {int(tokens.token_ids.min())}")
    if int(tokens.loss_mask.max()) > 1:
        raise BadMessage(f"loss_mask: expected 0 or 1, got {int(tokens.loss_mask.max())}")
    if int(tokens.versions.min()) < 0:
        raise BadMessage(f"versions: expected 0 or more, got {int(tokens.versions.min())}")
    # One pass tells of NaN and of both infinities: their sum with anything is not finite.
    if not np.isfinite(tokens.behavior_logprobs.sum(dtype=np.float64)):
        raise BadMessage("behavior_logprobs: expected finite numbers, got NaN or infinity")
    highest = float(tokens.behavior_logprobs.max())
    if highest > LOGPROB_SLACK:
        raise BadMessage(f"behavior_logprobs: expected 0 or less, got {highest}")
    unsampled = tokens.loss_mask == 0
    if unsampled.all():
        raise BadMessage("loss_mask: no token of the group was sampled")
    # A label where nothing was sampled means that the arrays are shifted against each other.
    for name, array in (("behavior_logprobs", tokens.behavior_logprobs), ("versions", tokens.versions)):
        if np.logical_and(array, unsampled).any():
            raise BadMessage(f"{name}: expected 0 where loss_mask is 0")


def _trajectory(number_: int, entry: Any, tokens: TokenArrays) -> Trajectory:
    where = f"trajectories[{number_}]"
    fields = mapping({where: entry}, where)
    parts = mapping(fields, f"{where}.reward_parts")
    return Trajectory(
        index=integer(fields, f"{where}.index"),
        token_ids=tokens.token_ids,
        loss_mask=tokens.loss_mask,
        behavior_logprobs=tokens.behavior_logprobs,
        versions=tokens.versions,
        reward=number(fields, f"{where}.reward"),
        reward_parts={k: number(parts, f"{where}.reward_parts.{k}") for k in parts},
        finish_reason=text(fields, f"{where}.finish_reason"),
        turns=integer(fields, f"{where}.turns", 1),
        metadata=mapping(fields, f"{where}.metadata"),
    )
