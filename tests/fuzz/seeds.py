"""Good messages, near to which those that are thrown at readers are made, and what must hold of a value."""

import math
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from buffer import groups, wire
from buffer.errors import BadMessage
from buffer.records import GivenUp, Group, Lease, Prompt, Trajectory
from buffer.wire import Request
from learner.apart import wire as apart_wire
from learner.apart.work import Limits, Work
from rollout.scorer import wire as scorer_wire
from sync import wire as sync_wire
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec

FIELDS = {
    "hello": ("rollout", {}),
    "status": ("observer", {}),
    "start": ("rollout", {}),
    "lease": ("rollout", {"max_groups": 4, "wait_s": 1.5}),
    "renew": ("rollout", {"lease_ids": ["a", "b"]}),
    "deliver": ("rollout", {}),
    "give_up": ("rollout", {"lease_id": "a", "reason": "why", "requeue": True}),
    "batch": ("learner", {"index": 0, "dp_rank": 0, "dp_size": 2, "wait_s": 1.0}),
    "published": ("learner", {"version": 3}),
    "committed": ("learner", {"index": 3}),
    "finished": ("learner", {"version": 3}),
}
REQUESTS = [
    msgpack.unpackb(wire.encode_request(Request("id", role, "name", "run", verb, fields)))
    for verb, (role, fields) in FIELDS.items()
]


def made_group() -> Group:
    mask = np.array([0, 1, 1, 0, 1], np.uint8)
    trajectories = tuple(
        Trajectory(
            index=i,
            token_ids=np.arange(5, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=(-0.5 * mask).astype(np.float32),
            versions=(mask * (i + 1)).astype(np.int32),
            reward=1.0,
            reward_parts={"a": 0.5},
            finish_reason="stop",
            metadata={"text": "t"},
        )
        for i in range(2)
    )
    return Group("group", "lease", "0/1", "train", trajectories)


META, ARRAYS = groups.encode_group(made_group())
META_TREE = msgpack.unpackb(META)

MANIFEST = Manifest.layout([TensorSpec("a", "bfloat16", (3, 4)), TensorSpec("b", "float32", ())], BLOCK_BYTES)
CONTROL = [
    sync_wire.Join(sync_wire.SCHEMA, "run", "server-0", 2, "boot 4026531836 0"),
    sync_wire.Welcome(sync_wire.SCHEMA, 30.0),
    sync_wire.Refuse("no"),
    sync_wire.Prepare(3, 0, 2, "0123abcd", True, 1, 3, "gloo", "/proc/12/fd/34", 60.0, MANIFEST),
    sync_wire.Ready(3, {"0/1": b"address", "0/2": b""}),
    sync_wire.Meet(3, {"0/0": b"address", "0/1": b"another"}),
    sync_wire.Loaded(3, 0, -5, 1.0, 0.5, 0.25),
    sync_wire.Failed(3, "checksum", "bucket 1"),
    sync_wire.Abort(3, "lost"),
    sync_wire.Evict("silent"),
    sync_wire.Beat({"tokens": 120, "waiting_s/leases": 3.5}),
]
CONTROL_TREES = [msgpack.unpackb(sync_wire.encode(one)) for one in CONTROL]

SCORER = [
    msgpack.unpackb(scorer_wire.encode_request(scorer_wire.Request("id", "run", "helpful", "name", work))[0])
    for work in (
        None,
        scorer_wire.Ids("print", np.array([1, 2], np.int32)),
        scorer_wire.Words("prompt", "completion", ended=True),
    )
]
IDS = [np.array([1, 2], "<i4").tobytes()]

LIMITS = Limits(16, 9)
SERVED = [
    apart_wire.Served(kind, "run", "weights", LIMITS) for kind in (apart_wire.REFERENCE, apart_wire.VALUE)
]
PART = Work(
    ((2, 1, 2), (1, 1)),
    np.arange(7, dtype=np.int32),
    np.array([1, 1, 5], np.int32),
    np.array([2, 3, 6], np.int32),
    0.7,
)
KNOWN = tuple(np.array(values, np.float32) for values in ((0.5, 1, 2), (-1, 0, 1)))
UPDATE = dict.fromkeys(("number", "index", "copy", "tokens"), 0) | {"copies": 2}
TASKS = [
    (0, apart_wire.Task("hello")),
    (0, apart_wire.Task("logprobs", (PART,))),
    (1, apart_wire.Task("train", (replace(PART, known=KNOWN),) * 2, UPDATE, "session")),
    (1, apart_wire.Task("save", numbers={"number": 3, "step": 1, "attempt": 7}, session="session")),
]
APART = [
    apart_wire.encode_request(SERVED[kind].kind, apart_wire.Request("id", "run", "weights", "name", task))
    for kind, task in TASKS
]
APART_TREES = [msgpack.unpackb(bytes(frames[0])) for frames in APART]

ANSWERS = {
    "lease": wire.encode_leases([Lease("lease", Prompt("0/1", {"prompt": "p"}), "train", 2)] * 2),
    "renew": {"lost": ["a"]},
    "deliver": {"stored": True, "max_message_bytes": 1 << 20},
    "give_up": wire.encode_given_up(GivenUp(1, 3, True)),
    "status": {"status": {"over": False}},
    "batch": {"ready": True, "index": 1, "groups": 1, "shares": {"tokens": 3}},
}
REPLIES = {verb: {"schema": wire.SCHEMA, "id": "id", **fields} for verb, fields in ANSWERS.items()}
REFUSED = {"schema": wire.SCHEMA, "id": "id", "refused": "bad_message", "text": "why"}
GROUP = [META, bytes(ARRAYS)]

SCORE, WELCOME, UNSCORED = SCORES = [
    {"schema": scorer_wire.SCHEMA, "id": "id", "score": 1.5},
    {"schema": scorer_wire.SCHEMA, "id": "id", "model": "m", "tokenizer": "t", "max_length": 8},
    {"schema": scorer_wire.SCHEMA, "id": "id", "refused": "scoring_failed", "text": "why"},
]

APART_ENVELOPE = apart_wire.VALUE.envelope
FOUND, UNDONE = APART_REPLIES = [
    msgpack.unpackb(APART_ENVELOPE.reply("id", {"numbers": {"loss": 0.5}})),
    msgpack.unpackb(APART_ENVELOPE.refusal("id", BadMessage("why"))),
]
VALUES = np.array([0.5, math.nan], "<f4").tobytes()
"""What is not finite is for the loss to refuse."""

KIB = 4096
"""Far above what any of these small messages may take."""


def a_text(value: Any, longest: int = 512) -> bool:
    assert isinstance(value, str)
    assert 1 <= len(value) <= longest
    return True


def a_count(value: Any, highest: int = 2**31 - 1) -> int:
    assert type(value) is int
    assert 0 <= value <= highest
    return value


def a_number(value: Any) -> float:
    assert type(value) is float
    assert math.isfinite(value)
    return value


def of_schema(raw: bytes, schema: int) -> None:
    assert a_count(msgpack.unpackb(raw)["schema"]) == schema
