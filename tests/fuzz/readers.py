"""The readers of bytes. Each refuses what it is given with its documented error, or what it read of it says
the same when it is written again; in little memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from counting import within
from seeds import (
    APART,
    APART_ENVELOPE,
    APART_REPLIES,
    ARRAYS,
    CONTROL,
    GROUP,
    IDS,
    KIB,
    META,
    REFUSED,
    REPLIES,
    REQUESTS,
    SCORER,
    SCORES,
    SERVED,
    TASKS,
    VALUES,
)

from buffer import groups, wire
from buffer.client import _batch
from buffer.envelope import Envelope
from buffer.errors import BadMessage, Refusal
from learner.apart import wire as apart_wire
from rollout.scorer import wire as scorer_wire
from sync import wire as sync_wire

Frames = list[bytes]

SEAM = b"\xc1" * 4
"""Between the frames of a message, where the bytes are one piece: msgpack has no use for this byte."""


@dataclass(frozen=True)
class Reader:
    seeds: list[Frames]
    read: Callable[[Frames], Any]
    write: Callable[[Any], Frames]
    refusal: type[Exception] = Refusal
    """What it may raise; nothing else."""
    seams: int = 0
    """At the most; -1 for any number of frames."""
    spelled: Callable[[Frames], Frames] = lambda frames: frames
    """The one way to say it, where there are several."""

    def check(self, raw: bytes) -> None:
        sent = raw.split(SEAM, self.seams)
        with within(KIB):
            try:
                found = self.read(sent)
            except self.refusal:
                return
        again = self.write(found)
        for one, other in zip(self.spelled(sent), self.spelled(again), strict=True):
            assert one == other or repeats(msgpack.unpackb(one), msgpack.unpackb(other)), (one, other)
        assert self.write(self.read(again)) == again


def repeats(sent: Any, again: Any) -> bool:
    """Whether all that was read is as it was sent; a mapping may have more that nobody reads."""
    if msgpack.packb(sent) == msgpack.packb(again):
        return True
    match again:
        case dict():
            return isinstance(sent, dict) and all(
                key in sent and repeats(sent[key], value) for key, value in again.items()
            )
        case list():
            return isinstance(sent, list) and len(sent) == len(again) and all(map(repeats, sent, again))
        case float():
            return type(sent) is int and float(sent) == again
    return False


def packed(trees: list[dict[str, Any]], *frames: bytes) -> list[Frames]:
    return [[msgpack.packb(tree), *frames] for tree in trees]


def known(envelope: Envelope, frames: Frames) -> Frames:
    """A request; to one that is refused goes an answer under its id."""
    assert len(envelope.request_id(frames[0])) <= 64
    return frames


def answer(envelope: Envelope, frames: Frames) -> tuple[str, dict[str, Any]]:
    """A reply's id and fields, as a client has them that waits for it."""
    request_id, reply = envelope.open_reply(frames[0])
    if not request_id:
        raise BadMessage("id: nobody waits for it")
    envelope.raise_if_refused(reply)
    return request_id, reply


def buffer_reply(frames: Frames) -> tuple[str, dict[str, Any]]:
    """What only the verb's own reader can tell; a reply does not say which verb it is of."""
    request_id, reply = answer(wire.ENVELOPE, frames)
    if "leases" in reply:
        return request_id, wire.encode_leases(wire.decode_leases(reply))
    return request_id, wire.encode_given_up(wire.decode_given_up(reply))


def scorer_reply(frames: Frames) -> tuple[str, float | scorer_wire.Welcome]:
    request_id, reply = answer(scorer_wire.ENVELOPE, frames)
    read = scorer_wire.decode_score if "score" in reply else scorer_wire.decode_welcome
    return request_id, read(reply)


def written_score(found: tuple[str, float | scorer_wire.Welcome]) -> Frames:
    request_id, said = found
    if isinstance(said, float):
        return [scorer_wire.encode_score(request_id, said)]
    return [scorer_wire.encode_welcome(request_id, said)]


def batch_reply(frames: Frames) -> tuple[str, Any]:
    request_id, reply = answer(wire.ENVELOPE, frames)
    return request_id, _batch(reply, [memoryview(frame) for frame in frames[1:]])


def written_batch(found: tuple[str, Any]) -> Frames:
    request_id, batch = found
    fields = {"index": batch.index, "groups": len(batch.groups), "shares": batch.shares}
    taken = [bytes(frame) for group in batch.groups for frame in groups.encode_group(group)]
    return [wire.ENVELOPE.reply(request_id, fields), *taken]


def apart_reply(frames: Frames) -> tuple[str, apart_wire.Answer]:
    request_id, reply = answer(APART_ENVELOPE, frames)
    return request_id, apart_wire.decode_answer(apart_wire.VALUE, "values", reply, frames[1:])


def spelled_group(frames: Frames) -> Frames:
    """Neighbours among its runs may have the same label: one label a token."""
    meta, arrays = frames
    tree = msgpack.unpackb(meta)
    del tree["runs"]
    place = 8 * sum(tree["lengths"])
    lengths, labels = np.frombuffer(arrays[place:], "<i4").reshape(2, -1)
    return [msgpack.packb(tree), arrays[:place], np.repeat(labels, lengths).tobytes()]


def in_one_line(frames: Frames) -> Frames:
    """A control message whose reason is fit to be logged, and no longer than it may be."""
    tree = msgpack.unpackb(frames[0])
    if isinstance(tree.get("reason"), str):
        tree["reason"] = sync_wire.one_line(tree["reason"])[:4096]
    return [msgpack.packb(tree)]


def spelled_batch(frames: Frames) -> Frames:
    header, *taken = frames
    return [
        header,
        *(part for pair in zip(*[iter(taken)] * 2, strict=True) for part in spelled_group([*pair])),
    ]


def spelled_task(frames: Frames) -> Frames:
    """A session that is not named is none."""
    header, *works = frames
    return [msgpack.packb({"session": ""} | msgpack.unpackb(header)), *works]


def of_ranks(served: apart_wire.Served) -> Reader:
    taken = [frames for frames, (kind, _) in zip(APART, TASKS, strict=True) if SERVED[kind] is served]
    return Reader(
        [[bytes(frame) for frame in frames] for frames in taken],
        lambda frames: apart_wire.decode_request(known(served.kind.envelope, frames), served),
        lambda request: [bytes(frame) for frame in apart_wire.encode_request(served.kind, request)],
        seams=-1,
        spelled=spelled_task,
    )


READERS = {
    "buffer_requests": Reader(
        packed(REQUESTS),
        lambda frames: wire.decode_request(known(wire.ENVELOPE, frames)[0], "run"),
        lambda request: [wire.encode_request(request)],
    ),
    "groups": Reader(
        [[META, bytes(ARRAYS)]],
        lambda frames: groups.decode_group(frames[0], b"".join(frames[1:])),
        lambda group: [bytes(frame) for frame in groups.encode_group(group)],
        BadMessage,
        seams=1,
        spelled=spelled_group,
    ),
    "buffer_replies": Reader(
        packed([REPLIES["lease"], REPLIES["give_up"], REFUSED]),
        buffer_reply,
        lambda found: [wire.ENVELOPE.reply(*found)],
    ),
    "batches": Reader(
        packed([REPLIES["batch"]], *GROUP), batch_reply, written_batch, seams=-1, spelled=spelled_batch
    ),
    "control_messages": Reader(
        [[sync_wire.encode(message)] for message in [*CONTROL, sync_wire.Dropped(3), sync_wire.Leave()]],
        lambda frames: sync_wire.decode(frames[0]),
        lambda message: [sync_wire.encode(message)],
        sync_wire.WireError,
        spelled=in_one_line,
    ),
    "scorer_requests": Reader(
        [*packed([SCORER[0], SCORER[2]]), *packed([SCORER[1]], *IDS)],
        lambda frames: scorer_wire.decode_request(known(scorer_wire.ENVELOPE, frames), "run", "helpful"),
        lambda request: [bytes(frame) for frame in scorer_wire.encode_request(request)],
        seams=-1,
    ),
    "scorer_replies": Reader(packed(SCORES), scorer_reply, written_score),
    "reference_requests": of_ranks(SERVED[0]),
    "value_requests": of_ranks(SERVED[1]),
    "replies_of_models_on_ranks": Reader(
        packed(APART_REPLIES, VALUES),
        apart_reply,
        lambda found: [bytes(frame) for frame in apart_wire.encode_answer(apart_wire.VALUE, *found)],
        seams=-1,
    ),
}
