"""Whatever comes over a wire is read, or refused with its reader's documented error, in little memory."""

import msgpack
import numpy as np
import pytest
from counting import fuzzed, within
from hypothesis import strategies as st
from mutations import cell_faults, damaged, faults, messages, mutated, packed, trees
from seeds import (
    APART,
    APART_TREES,
    ARRAYS,
    CONTROL_TREES,
    FIELDS,
    IDS,
    KIB,
    LIMITS,
    MANIFEST,
    META,
    META_TREE,
    REQUESTS,
    SCORER,
    SERVED,
    TASKS,
    a_count,
    a_number,
    a_text,
    of_schema,
)

from buffer import groups, wire
from buffer.errors import BadMessage, Refusal
from learner.apart import wire as apart_wire
from rollout.scorer import wire as scorer_wire
from sync import wire as sync_wire
from sync.manifest import ITEM_BYTES, Manifest

KEYS = ("learner", "rollout", "scorer", "reference", "value", "nobody")
LOWEST = {"dp_size": 1}
HIGHEST = {"max_groups": 1 << 16, "dp_size": 1 << 16, "dp_rank": (1 << 16) - 1}


@fuzzed(
    150,
    messages(*REQUESTS),
    st.sampled_from([None, *KEYS]),
    faults=[
        *((packed(tree), None) for header in REQUESTS for tree in faults(header)),
        *((packed(header), key) for header in REQUESTS for key in KEYS),
        (packed(REQUESTS[3] | {"lease_ids": ["a"] * ((1 << 16) + 1)}), None),
    ],
)
def test_buffer_requests(raw, key):
    with within(KIB):
        assert len(wire.ENVELOPE.request_id(raw)) <= 64
        try:
            request = wire.decode_request(raw, "run", key)
        except Refusal:
            return
    of_schema(raw, wire.SCHEMA)
    assert request.run_id == "run"
    assert request.verb in wire.VERBS[request.role]
    assert key is None or request.role in wire.ROLES_OF_KEY[key]
    a_text(request.request_id, 64)
    a_text(request.name)
    assert request.fields.keys() == FIELDS[request.verb][1].keys()
    for name, value in request.fields.items():
        if name == "lease_ids":
            assert isinstance(value, list)
            assert len(value) <= 1 << 16
            for one in value:
                a_text(one)
        elif name in ("lease_id", "reason"):
            a_text(value)
        elif name == "wait_s":
            assert 0 <= a_number(value) <= wire.LONGEST_WAIT_S
        elif name == "requeue":
            assert isinstance(value, bool)
        else:
            assert LOWEST.get(name, 0) <= a_count(value) <= HIGHEST.get(name, 2**31 - 1)
    assert request.fields.get("dp_rank", 0) < request.fields.get("dp_size", 1)


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


def group_faults():
    """A fault in one of the two frames; and one in the first, with the second as long as that then says."""
    frame = bytes(ARRAYS)
    for tree in faults(META_TREE):
        yield packed(tree), frame
        if (fitting := as_long_as_it_says(tree, frame)) != frame:
            yield packed(tree), fitting
    for fault in cell_faults(frame):
        yield META, fault
    tokens, runs = sum(META_TREE["lengths"]), META_TREE["runs"]
    unsampled = 4 * tokens
    yield META, frame[:unsampled] + bytes(unsampled) + frame[2 * unsampled : -4 * runs] + bytes(4 * runs)


def as_long_as_it_says(tree, frame):
    try:
        size = 8 * (sum(tree["lengths"]) + tree["runs"])
    except (TypeError, KeyError):
        return frame
    return frame[:size].ljust(size, b"\0") if isinstance(size, int) and 0 <= size < 1000 else frame


@fuzzed(
    150,
    metas,
    st.one_of(st.just(bytes(ARRAYS)), arrays(), damaged(bytes(ARRAYS))),
    faults=group_faults(),
)
def test_groups(meta, frame):
    with within(KIB):
        try:
            found = groups.decode_delivery(meta, frame)
        except BadMessage:
            return
    group = found.group
    for name in (group.group_id, group.lease_id, group.prompt_id):
        a_text(name)
    assert group.kind in ("train", "eval")
    for t in group.trajectories:
        a_trajectory(t)
    trained = np.concatenate([t.versions[t.loss_mask > 0] for t in group.trajectories])
    assert (found.oldest_version, found.newest_version) == (trained.min(), trained.max())
    assert found.trained_tokens == len(trained) > 0
    again = groups.decode_delivery(*groups.encode_group(group))
    assert (again.oldest_version, again.newest_version) == (found.oldest_version, found.newest_version)
    for one, other in zip(again.group.trajectories, group.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def a_trajectory(t):
    assert len(t.token_ids) == len(t.loss_mask) == len(t.behavior_logprobs) == len(t.versions) > 0
    assert t.token_ids.min() >= 0
    assert np.isfinite(t.behavior_logprobs).all()
    assert t.behavior_logprobs.max() <= groups.LOGPROB_SLACK
    assert t.versions.min() >= 0
    assert set(t.loss_mask.tolist()) <= {0, 1}
    assert not t.versions[t.loss_mask == 0].any()
    assert not t.behavior_logprobs[t.loss_mask == 0].any()
    a_count(t.index)
    assert a_count(t.turns) >= 1
    a_number(t.reward)
    for part, value in t.reward_parts.items():
        assert isinstance(part, str)
        a_number(value)
    a_text(t.finish_reason)
    assert all(isinstance(key, str) for key in t.metadata)


@fuzzed(
    150,
    messages(*CONTROL_TREES),
    faults=[(packed(tree),) for message in CONTROL_TREES for tree in faults(message)],
)
def test_control_messages(raw):
    with within(KIB):
        try:
            message = sync_wire.decode(raw)
        except sync_wire.WireError:
            return
    assert sync_wire.decode(sync_wire.encode(message)) == message


ROWS = MANIFEST.to_wire()
ONE_ROW = [["a", "bfloat16", [3, 4], 0]]


@fuzzed(
    60,
    st.one_of(mutated(ROWS), trees()),
    faults=[
        *((tree,) for tree in faults(ROWS)),
        ({"bucket_bytes": 4096, "tensors": [*ONE_ROW, ["a", "bfloat16", [3, 4], 256]]},),
        ({"bucket_bytes": 4096, "tensors": ONE_ROW * 1_000_001},),
        ({"bucket_bytes": 4096, "tensors": [["a" * 1025, "int8", [], 0]]},),
        ({"bucket_bytes": 4096, "tensors": [["a", "int8", [1] * 17, 0]]},),
        ({"bucket_bytes": 4096, "tensors": [["a", "int8", [-1], 0]]},),
        ({"bucket_bytes": 4096, "tensors": [["a", "int8", [1 << 23, (1 << 22) + 1], 0]]},),
    ],
)
def test_manifests(value):
    with within(KIB):
        try:
            manifest = Manifest.from_wire(value)
        except ValueError:
            return
    assert a_count(manifest.bucket_bytes, 1 << 64) > 0
    assert manifest.bucket_bytes % 4096 == 0
    assert len({spec.name for spec in manifest.tensors}) == len(manifest.tensors) <= 1_000_000
    end = 0
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        a_text(spec.name, 1024)
        assert len(spec.shape) <= 16
        elements = 1
        for size in spec.shape:
            elements *= a_count(size, 1 << 64)
        assert a_count(offset, 1 << 64) == end, "each lies behind the one before"
        assert elements * ITEM_BYTES[spec.dtype] <= 1 << 45
        end = -(-(end + elements * ITEM_BYTES[spec.dtype]) // 256) * 256
    assert end <= manifest.stream_bytes < end + 4096
    assert manifest.to_wire() == {key: value[key] for key in ("bucket_bytes", "tensors")}


@fuzzed(
    100,
    messages(*SCORER),
    st.lists(st.one_of(st.binary(max_size=9), st.just(b"\1\0\0\0")), max_size=2),
    faults=[
        *((packed(tree), frames) for header in SCORER for tree in faults(header) for frames in ([], IDS)),
        *((packed(SCORER[1]), [frame]) for frame in cell_faults(IDS[0])),
        *((packed(header), IDS * 2) for header in SCORER),
    ],
)
def test_scorer_requests(raw, frames):
    with within(KIB):
        assert len(scorer_wire.ENVELOPE.request_id(raw)) <= 64
        try:
            request = scorer_wire.decode_request([raw, *frames], "run", "helpful")
        except Refusal:
            return
    of_schema(raw, scorer_wire.SCHEMA)
    asked = {scorer_wire.Ids: "score_ids", scorer_wire.Words: "score_text", type(None): "hello"}
    assert msgpack.unpackb(raw)["verb"] == asked[type(request.work)]
    assert (request.run_id, request.reward) == ("run", "helpful")
    a_text(request.request_id, 64)
    a_text(request.name)
    match request.work:
        case scorer_wire.Ids(tokenizer, token_ids):
            a_text(tokenizer, 64)
            assert token_ids.min() >= 0
            assert [token_ids.astype("<i4").tobytes()] == frames
        case scorer_wire.Words(prompt, completion, ended):
            assert isinstance(prompt, str | list)
            assert isinstance(completion, str)
            assert isinstance(ended, bool)
            assert not frames
        case _:
            assert request.work is None
            assert not frames


apart_frames = st.one_of(
    *(st.just(frames[1:]) for frames in APART),
    *(st.tuples(*(damaged(bytes(frame)) for frame in frames[1:])) for frames in APART[1:3]),
    st.lists(st.one_of(st.binary(max_size=9), st.just(b"\1\0\0\0")), max_size=5),
)


def apart_faults():
    """A fault in the request's header, in a micro-batch's, in one of its arrays, or in their number."""
    for (header, *frames), (kind, _) in zip(APART, TASKS, strict=True):
        served = SERVED[kind]
        for tree in faults(msgpack.unpackb(bytes(header))):
            yield packed(tree), frames, served
        for place, frame in enumerate(frames):
            is_header = place % (len(frames) // 2 if kind else len(frames)) == 0
            wrong = map(packed, faults(msgpack.unpackb(frame))) if is_header else cell_faults(frame)
            for fault in wrong:
                yield header, [*frames[:place], fault, *frames[place + 1 :]], served
            yield header, frames[:place] + frames[place + 1 :], served
        yield header, [*frames, b""], served
        yield header, frames, SERVED[1 - kind]
    # What only another verb has; and frames that agree with each other on what must not be.
    hello, (header, part, *arrays) = APART_TREES[0], APART[1]
    yield packed(hello | {"works": 1}), [part, *arrays], SERVED[0]
    zeros = np.zeros(17, "<i4").tobytes()
    yield header, [part, arrays[0], *[zeros[: 4 * 8]] * 2], SERVED[0]
    for segments, token_ids in (([[2, 1, 2], [2]], arrays[0]), ([[8, 9]], zeros)):
        fault = packed(msgpack.unpackb(part) | {"segments": segments})
        yield header, [fault, token_ids, *arrays[1:]], SERVED[0]


@fuzzed(100, messages(*APART_TREES), apart_frames, st.sampled_from(SERVED), faults=apart_faults())
def test_requests_to_models_on_ranks_of_their_own(raw, frames, served):
    with within(KIB):
        assert len(served.kind.envelope.request_id(raw)) <= 64
        try:
            request = apart_wire.decode_request([raw, *frames], served)
        except Refusal:
            return
    of_schema(raw, apart_wire.SCHEMA)
    assert (request.run_id, request.weights) == ("run", "weights")
    a_text(request.request_id, 64)
    a_text(request.name)
    task, verb = request.task, served.kind.verbs[request.task.verb]
    assert task.session == msgpack.unpackb(raw).get("session", "")
    assert task.session == "" or a_text(task.session, 64)
    assert task.numbers.keys() == set(verb.numbers)
    for number in task.numbers.values():
        a_count(number)
    assert task.numbers.get("copy", 0) < task.numbers.get("copies", 1)
    assert verb.works or not task.works
    assert len(frames) == len(task.works) * (4 + verb.known)
    for work in task.works:
        a_work(work, verb.known)


def a_work(work, known):
    for lengths in work.segments:
        assert len(lengths) >= 2
        assert all(a_count(length) >= 1 for length in lengths)
    assert len(work.token_ids) == sum(map(sum, work.segments)) <= LIMITS.max_tokens
    assert 0 <= work.target_positions.min() <= work.target_positions.max() < len(work.token_ids)
    assert len(work.target_positions) == len(work.target_ids) <= len(work.token_ids)
    for ids in (work.token_ids, work.target_ids):
        assert 0 <= ids.min() <= ids.max() < LIMITS.vocabulary
    assert 1e-6 <= a_number(work.temperature) <= 1e6
    assert [len(values) for values in work.known] == [len(work.target_ids)] * known


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
    for header, frames in zip(SCORER, ([], [b"\1\0\0\0"], []), strict=True):
        assert scorer_wire.decode_request([packed(header), *frames], "run", "helpful").reward == "helpful"
    for frames, (kind, task) in zip(APART, TASKS, strict=True):
        assert apart_wire.decode_request(frames, SERVED[kind]).task.verb == task.verb


def test_more_than_a_group_may_have_is_refused():
    count = groups.MAX_TRAJECTORIES + 1
    entry = META_TREE["trajectories"][0]
    meta = packed(META_TREE | {"lengths": [1] * count, "runs": 1, "trajectories": [entry] * count})
    arrays = bytes(8 * count) + np.array([count, 1], "<i4").tobytes()
    with pytest.raises(BadMessage, match="lengths: expected a list of at most 4096"):
        groups.decode_delivery(meta, arrays)


@pytest.mark.parametrize("name", ["prompt", "completion"])
def test_a_text_that_is_too_long_to_be_scored_is_refused(name):
    raw = packed(SCORER[2] | {name: "x" * (scorer_wire.MAX_TEXT + 1)})
    with pytest.raises(BadMessage, match=f"{name}: expected a text of at most"):
        scorer_wire.decode_request([raw], "run", "helpful")
