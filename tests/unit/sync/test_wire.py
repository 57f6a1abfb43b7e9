"""Control messages: round trip, and refusal of anything else by the field's name."""

import msgpack
import pytest

from sync import wire
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec

MANIFEST = Manifest.layout([TensorSpec("a", "bfloat16", (3, 4))], BLOCK_BYTES)
MESSAGES = [
    wire.Join(wire.SCHEMA, "run", "server-0", 2, "boot 4026531836 0"),
    wire.Welcome(wire.SCHEMA, 30.0),
    wire.Refuse("no"),
    wire.Prepare(3, 0, 2, "0123abcd", True, 1, 3, "gloo", "/proc/12/fd/34", 60.0, MANIFEST),
    wire.Ready(3, {"0/1": bytes(range(256))}),
    wire.Meet(3, {"0/0": b"", "0/1": b"1"}),
    wire.Loaded(3, 0, -5, 1.0, 0.5, 0.25),
    wire.Failed(3, "checksum", "bucket 1"),
    wire.Abort(3, "lost"),
    wire.Dropped(3),
    wire.Evict("silent"),
    wire.Beat({"tokens": 120, "waiting_s/leases": 3.5}),
    wire.Leave(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message):
    assert wire.decode(wire.encode(message)) == message


def test_every_kind_has_an_example_above():
    assert {type(message) for message in MESSAGES} == set(wire.KINDS.values())


MEET = {"kind": "MEET", "attempt": 1}
JOIN = {"kind": "JOIN", "schema": 6, "run_id": "r", "name": "n", "world_size": 1, "place": ""}


def test_bytes_of_schema_6_still_decode():
    assert wire.decode(msgpack.packb(JOIN)) == wire.Join(6, "r", "n", 1, "")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kind": "JOIN", "schema": 1, "anything": 1}, "schema: 1"),
        ({k: v for k, v in JOIN.items() if k != "place"}, "JOIN: expected the fields"),
        (JOIN | {"run_id": 5}, "run_id"),
        (JOIN | {"name": "n" * 300}, "name"),
        (JOIN | {"name": "n\n"}, r"name: 'n\\n': expected printable"),
        (JOIN | {"place": "\x1b[2J"}, "place"),
        (JOIN | {"world_size": 0}, "world_size"),
        ({"kind": "READY", "attempt": True, "entries": {}}, "attempt"),
        ({"kind": "FAILED", "attempt": 1, "cause": "mood", "reason": ""}, "cause"),
        ({"kind": "WELCOME", "schema": 6, "heartbeat_timeout_s": -1}, "heartbeat_timeout_s"),
        ({"kind": "SHUTDOWN"}, "kind"),
        ({"kind": "BEAT", "counts": [1]}, "counts: expected a map"),
        ({"kind": "BEAT", "counts": {"mood": 1}}, "counts: 'mood'"),
        ({"kind": "BEAT", "counts": {"tokens": -1}}, "counts: tokens: -1"),
        ({"kind": "BEAT", "counts": {"tokens": float("nan")}}, "counts: tokens: nan"),
        ({"kind": "BEAT", "counts": {"tokens": 1e300}}, r"counts: tokens: 1e\+300"),
        ({"kind": "BEAT", "counts": {"tokens": True}}, "counts: tokens: True"),
        ({"kind": "READY", "attempt": 1}, "READY: expected the fields"),
        (MEET | {"entries": [1]}, "entries: expected a map"),
        (MEET | {"entries": {"0/1": "text"}}, "entries: '0/1': expected at most 1024 bytes"),
        (MEET | {"entries": {"0/1": bytes(1025)}}, "entries: '0/1': expected at most 1024 bytes"),
        (MEET | {"entries": {"k" * 65: b""}}, "entries: expected names of at most 64"),
        (MEET | {"entries": {str(i): b"" for i in range((1 << 16) + 1)}}, "entries: expected a map of at"),
        ([1, 2], "expected a map"),
    ],
)
def test_bad_messages_name_the_field(values, field):
    with pytest.raises(wire.WireError, match=field):
        wire.decode(msgpack.packb(values))


def test_a_reason_is_one_line_whatever_the_engine_said():
    told = wire.decode(wire.encode(wire.Failed(1, "load", "CUDA error\n\x1b[2Jat the gate")))
    assert told == wire.Failed(1, "load", "CUDA error\\n\\x1b[2Jat the gate")


def test_bytes_that_are_not_msgpack_are_refused():
    with pytest.raises(wire.WireError, match="not msgpack"):
        wire.decode(b"\xc1garbage")


@pytest.mark.parametrize("memory", ["/etc/passwd", "/proc/1/fd/2/../../environ", "/proc/self/fd/3", 3])
def test_a_server_is_sent_to_no_file_but_a_handle_of_a_process(memory):
    values = msgpack.unpackb(wire.encode(MESSAGES[3]))
    with pytest.raises(wire.WireError, match="memory"):
        wire.decode(msgpack.packb(values | {"memory": memory}))


def test_prepare_with_a_wrong_manifest_is_refused():
    values = msgpack.unpackb(wire.encode(MESSAGES[3]))
    values["manifest"]["tensors"][0][3] = 8
    with pytest.raises(wire.WireError, match="offset 8"):
        wire.decode(msgpack.packb(values))
