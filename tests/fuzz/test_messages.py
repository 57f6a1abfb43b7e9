"""Whatever comes over a wire is read, or refused with its reader's documented error, in little memory."""

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from counting import fuzzed, within
from hypothesis import strategies as st
from mutations import damaged, messages, mutated, packed, trees
from seeds import ARRAYS, CONTROL_TREES, MANIFEST, META, META_TREE, REQUESTS

from buffer import groups, wire
from buffer.client import _batch
from buffer.errors import BadMessage, Refusal
from buffer.records import Lease, Prompt
from learner.apart import wire as apart_wire
from learner.apart.work import Limits, Work
from learner.feed import decode_batch, encode_batch
from rollout.scorer import wire as scorer_wire
from sync import wire as sync_wire
from sync.manifest import Manifest

KIB = 4096
"""Far above what any of these small messages may take."""


@fuzzed(
    150,
    messages(*REQUESTS),
    st.sampled_from([None, "learner", "rollout", "scorer", "reference", "value", "nobody"]),
)
def test_buffer_requests(raw, key):
    with within(KIB):
        assert len(wire.ENVELOPE.request_id(raw)) <= 64
        try:
            request = wire.decode_request(raw, "run", key)
        except Refusal:
            return
    assert request.run_id == "run"
    assert request.verb in wire.VERBS[request.role]
    assert key is None or request.role in wire.ROLES_OF_KEY[key]
    for value in request.fields.values():
        assert isinstance(value, list | str) or 0 <= value < 2**31, "nothing negative, NaN or infinite"


LEASES = wire.encode_leases([Lease("lease", Prompt("0/1", {"prompt": "p"}), "train", 2)] * 2)
REPLIES = [
    {"schema": wire.SCHEMA, "id": "id", **fields}
    for fields in (
        LEASES,
        {"lost": ["a"]},
        {"stored": True},
        {"status": {"over": False}},
        {"refused": "bad_message", "text": "why"},
        {"ready": True, "index": 1, "groups": 1, "shares": {"tokens": 3}},
    )
]


@fuzzed(60, messages(*REPLIES))
def test_buffer_replies(raw):
    """A buffer that talks nonsense ends its client in order, with a reason."""
    with within(KIB):
        try:
            _, reply = wire.ENVELOPE.open_reply(raw)
            wire.ENVELOPE.raise_if_refused(reply)
            for lease in wire.decode_leases(reply):
                assert lease.version >= 0
        except Refusal:
            pass


numbers = st.sampled_from([0, 1, 2, 5, -1, 2**31 - 1, -(2**31)])
floats = st.sampled_from([0.0, -0.5, 1.0, float("nan"), float("inf"), -float("inf"), 1e-4])


@st.composite
def arrays(draw):
    """The group's second frame with cells replaced: by NaN, infinity, what is negative or of the future."""
    raw = bytearray(ARRAYS)
    cells = len(raw) // 4
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, cells - 1))
        value = draw(st.one_of(numbers.map(np.int32), floats.map(np.float32)))
        raw[4 * place : 4 * place + 4] = value.tobytes()
    return bytes(raw)


metas = st.one_of(st.just(META), messages(META_TREE))


@fuzzed(150, metas, st.one_of(st.just(bytes(ARRAYS)), arrays(), damaged(bytes(ARRAYS))))
def test_groups(meta, frame):
    with within(KIB):
        try:
            found = groups.decode_delivery(meta, frame)
        except BadMessage:
            return
    assert found.oldest_version >= 0
    assert found.trained_tokens > 0
    total = 0
    for t in found.group.trajectories:
        total += int(t.loss_mask.sum())
        assert t.token_ids.min() >= 0
        assert np.isfinite(t.behavior_logprobs).all()
        assert np.isfinite(t.reward)
        assert t.versions.min() >= 0
        assert not t.versions[t.loss_mask == 0].any()
    assert total == found.trained_tokens
    again = groups.decode_delivery(*groups.encode_group(found.group))
    assert again.oldest_version == found.oldest_version


@fuzzed(30, messages(REPLIES[-1]), st.lists(st.one_of(metas, st.just(bytes(ARRAYS))), max_size=4))
def test_batches_from_a_buffer_that_talks_nonsense(raw, frames):
    with within(KIB):
        try:
            _, reply = wire.ENVELOPE.open_reply(raw)
            _batch(reply, [memoryview(frame) for frame in frames])
        except Refusal:
            pass


@fuzzed(150, messages(*CONTROL_TREES))
def test_control_messages(raw):
    with within(KIB):
        try:
            message = sync_wire.decode(raw)
        except sync_wire.WireError:
            return
    assert sync_wire.decode(sync_wire.encode(message)) == message


@fuzzed(60, st.one_of(mutated(MANIFEST.to_wire()), trees()))
def test_manifests(value):
    with within(KIB):
        try:
            manifest = Manifest.from_wire(value)
        except ValueError:
            return
    assert 0 <= manifest.stream_bytes <= len(manifest.tensors) << 46
    ends = [o + s.size_bytes for o, s in zip(manifest.offsets, manifest.tensors, strict=True)]
    assert all(end <= start for end, start in zip(ends, manifest.offsets[1:], strict=False)), "none overlap"


SCORER = [
    msgpack.unpackb(scorer_wire.encode_request(scorer_wire.Request("id", "run", "helpful", "name", work))[0])
    for work in (
        None,
        scorer_wire.Ids("print", np.array([1, 2], np.int32)),
        scorer_wire.Words("prompt", "completion", ended=True),
    )
]


@fuzzed(100, messages(*SCORER), st.lists(st.one_of(st.binary(max_size=9), st.just(b"\1\0\0\0")), max_size=2))
def test_scorer_requests(raw, frames):
    with within(KIB):
        assert len(scorer_wire.ENVELOPE.request_id(raw)) <= 64
        try:
            request = scorer_wire.decode_request([raw, *frames], "run", "helpful")
        except Refusal:
            return
    assert (request.run_id, request.reward) == ("run", "helpful")
    if isinstance(request.work, scorer_wire.Ids):
        assert request.work.token_ids.min() >= 0


SCORES = [
    {"schema": scorer_wire.SCHEMA, "id": "id", "score": 1.5},
    {"schema": scorer_wire.SCHEMA, "id": "id", "model": "m", "tokenizer": "t", "max_length": 8},
    {"schema": scorer_wire.SCHEMA, "id": "id", "refused": "scoring_failed", "text": "why"},
]


@fuzzed(30, messages(*SCORES))
def test_scorer_replies(raw):
    for read in (scorer_wire.decode_score, scorer_wire.decode_welcome):
        with within(KIB):
            try:
                _, reply = scorer_wire.ENVELOPE.open_reply(raw)
                scorer_wire.ENVELOPE.raise_if_refused(reply)
                read(reply)
            except Refusal:
                pass


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
apart_frames = st.one_of(
    *(st.just(frames[1:]) for frames in APART),
    *(st.tuples(*(damaged(bytes(frame)) for frame in frames[1:])) for frames in APART[1:3]),
    st.lists(st.one_of(st.binary(max_size=9), st.just(b"\1\0\0\0")), max_size=5),
)


@fuzzed(100, messages(*APART_TREES), apart_frames, st.sampled_from(SERVED))
def test_requests_to_models_on_ranks_of_their_own(raw, frames, served):
    with within(KIB):
        assert len(served.kind.envelope.request_id(raw)) <= 64
        try:
            request = apart_wire.decode_request([raw, *frames], served)
        except Refusal:
            return
    assert (request.run_id, request.weights) == ("run", "weights")
    verb = served.kind.verbs[request.task.verb]
    assert all(request.task.numbers[name] >= 0 for name in verb.numbers)
    for work in request.task.works:
        assert len(work.token_ids) == sum(map(sum, work.segments)) <= 16
        assert 0 <= work.target_positions.min() <= work.target_positions.max() < len(work.token_ids)
        assert len(work.target_positions) == len(work.target_ids)
        for ids in (work.token_ids, work.target_ids):
            assert 0 <= ids.min() <= ids.max() < 9
        assert work.temperature > 0
        assert [len(values) for values in work.known] == [len(work.target_ids)] * verb.known


ENVELOPE = apart_wire.VALUE.envelope
APART_REPLIES = [
    msgpack.unpackb(ENVELOPE.reply("id", {"numbers": {"loss": 0.5}})),
    msgpack.unpackb(ENVELOPE.refusal("id", BadMessage("why"))),
]


@fuzzed(30, messages(*APART_REPLIES), st.lists(st.binary(max_size=12), max_size=2))
def test_replies_of_models_on_ranks_of_their_own(raw, frames):
    with within(KIB):
        try:
            _, reply = ENVELOPE.open_reply(raw)
            answer = apart_wire.decode_answer(apart_wire.VALUE, reply, frames)
        except Refusal:
            return
    assert len(answer.arrays) == len(frames)
    assert all(isinstance(value, float) for value in answer.numbers.values())


def test_a_header_that_would_unpack_into_gigabytes_is_refused_first():
    """A byte of msgpack may be an empty mapping of 64."""
    raw = b"\xdd" + (5 << 20).to_bytes(4, "big") + b"\x80" * (5 << 20)
    with within(KIB):
        assert wire.ENVELOPE.request_id(raw) == ""
        with pytest.raises(BadMessage, match="header: 5242885 bytes"):
            wire.decode_request(raw, "run")


def test_what_is_good_is_read():
    """The seeds are what the readers take: else nothing would come past the first check."""
    for header in REQUESTS:
        assert wire.decode_request(packed(header), "run").verb == header["verb"]
    assert len(wire.decode_leases(REPLIES[0])) == 2
    for header, frames in zip(SCORER, ([], [b"\1\0\0\0"], []), strict=True):
        assert scorer_wire.decode_request([packed(header), *frames], "run", "helpful").reward == "helpful"
    for frames, (kind, task) in zip(APART, TASKS, strict=True):
        assert apart_wire.decode_request(frames, SERVED[kind]).task.verb == task.verb
    batch = _batch(REPLIES[-1], [memoryview(META), memoryview(ARRAYS)])
    assert decode_batch([bytes(f) for f in encode_batch(batch)]).shares == {"tokens": 3}
