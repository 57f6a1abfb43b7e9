"""Good messages, near to which those that are thrown at readers are made, and what must hold of a value."""

import math
from typing import Any

import msgpack
import numpy as np

from buffer import groups, wire
from buffer.records import Group, Trajectory
from buffer.wire import Request
from sync import wire as sync_wire
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec

FIELDS = {
    "hello": ("rollout", {}),
    "status": ("observer", {}),
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
    sync_wire.Prepare(3, 0, 2, "0123abcd", True, 4000, 1, 3, "gloo", "/proc/12/fd/34", 60.0, MANIFEST),
    sync_wire.Ready(3),
    sync_wire.Loaded(3, 0, -5, 1.0, 0.5, 0.25),
    sync_wire.Failed(3, "checksum", "bucket 1"),
    sync_wire.Abort(3, "lost"),
    sync_wire.Evict("silent"),
    sync_wire.Beat({"tokens": 120, "waiting_s/leases": 3.5}),
]
CONTROL_TREES = [msgpack.unpackb(sync_wire.encode(one)) for one in CONTROL]

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
