import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.errors import BadMessage, Refusal, WrongRun
from buffer.fields import check_row, one_line
from buffer.groups import decode_delivery, decode_group, encode_group
from buffer.records import Group, Lease, Prompt, Trajectory
from buffer.wire import (
    ENVELOPE,
    SCHEMA,
    Request,
    decode_leases,
    decode_request,
    encode_leases,
    encode_request,
)

LEASE = Lease("l", Prompt("0/1", {"prompt": "p"}), "train", 3)

GOLDEN_META = (
    "87a867726f75705f6964a167a86c656173655f6964a16ca970726f6d70745f6964a3302f31a46b696e64a5747261696ea76c656e6774"
    "68739103a472756e7302ac7472616a6563746f726965739186a5696e64657800a6726577617264cb3fe0000000000000ac7265776172"
    "645f706172747381a161cb3fe0000000000000ad66696e6973685f726561736f6ea473746f70a57475726e7301a86d6574616461746180"
)
GOLDEN_ARRAYS = "07000000080000000900000000000000000000bf000080bf01000000020000000000000003000000"


def same(a: Group, b: Group) -> bool:
    def plain(t: Trajectory):
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in dataclasses.asdict(t).items()}

    return dataclasses.replace(a, trajectories=()) == dataclasses.replace(b, trajectories=()) and [
        plain(t) for t in a.trajectories
    ] == [plain(t) for t in b.trajectories]


def test_a_group_comes_back_as_it_went(group):
    sent = group(LEASE, versions=(3, 3, 5, 5), rewards=(0.0, 0.5, 1.0))
    got = decode_delivery(*encode_group(sent))
    assert same(got.group, sent)
    assert got.oldest_version == sent.oldest_version == 3
    assert got.trained_tokens == 12
    first = got.group.trajectories[0]
    assert (first.token_ids.dtype, first.loss_mask.dtype) == (np.int32, np.uint8)
    assert (first.behavior_logprobs.dtype, first.versions.dtype) == (np.float32, np.int32)


def test_a_stored_group_of_this_schema_still_decodes():
    got = decode_delivery(bytes.fromhex(GOLDEN_META), bytes.fromhex(GOLDEN_ARRAYS))
    (trajectory,) = got.group.trajectories
    assert trajectory.token_ids.tolist() == [7, 8, 9]
    assert trajectory.loss_mask.tolist() == [0, 1, 1]
    assert trajectory.behavior_logprobs.tolist() == [0.0, -0.5, -1.0]
    assert trajectory.versions.tolist() == [0, 2, 2]
    assert encode_group(got.group)[1] == bytes.fromhex(GOLDEN_ARRAYS)


def test_token_ids_are_read_where_they_arrived():
    _, arrays = bytes.fromhex(GOLDEN_META), bytearray(bytes.fromhex(GOLDEN_ARRAYS))
    got = decode_group(bytes.fromhex(GOLDEN_META), arrays)
    arrays[0] = 99
    assert got.trajectories[0].token_ids[0] == 99


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=12), min_size=1, max_size=4
    )
)
def test_any_interleaving_of_sampled_and_given_tokens_survives(labels):
    labels = [[None, *each] for each in labels]  # nothing comes before a first token to sample it from
    if all(v is None for each in labels for v in each):
        return
    trajectories = tuple(
        Trajectory(
            index=i,
            token_ids=np.arange(len(each), dtype=np.int32),
            loss_mask=np.array([v is not None for v in each], np.uint8),
            behavior_logprobs=np.array([0.0 if v is None else -1.5 for v in each], np.float32),
            versions=np.array([v or 0 for v in each], np.int32),
            reward=0.0,
            reward_parts={},
            finish_reason="length",
        )
        for i, each in enumerate(labels)
    )
    sent = Group("g", "l", "0/0", "train", trajectories)
    assert same(decode_group(*encode_group(sent)), sent)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", np.arange(7, dtype=np.int64)),
        ("token_ids", np.array([-1] * 7, np.int32)),
        ("loss_mask", np.array([0, 0, 0, 2, 1, 1, 1], np.uint8)),
        ("loss_mask", np.zeros(7, np.uint8)),
        ("loss_mask", np.ones(6, np.uint8)),
        ("loss_mask", np.array([1, 0, 0, 1, 1, 1, 1], np.uint8)),
        ("behavior_logprobs", np.array([0, 0, 0, np.nan, -1, -1, -1], np.float32)),
        ("behavior_logprobs", np.array([0, 0, 0, -np.inf, np.inf, -1, -1], np.float32)),
        ("behavior_logprobs", np.array([0, 0, 0, 0.5, -1, -1, -1], np.float32)),
        ("behavior_logprobs", np.array([0, 0, -1, -1, -1, -1, -1], np.float32)),
        ("behavior_logprobs", np.zeros((1, 7), np.float32)),
        ("versions", np.array([0, 0, 1, 1, 1, 1, 1], np.int32)),
        ("versions", np.array([0, 0, 0, -2, 1, 1, 1], np.int32)),
        ("reward", float("nan")),
        ("reward", float("inf")),
        ("reward", 1e150),
        ("reward", -1e31),
        ("reward_parts", {"a": float("nan")}),
        ("reward_parts", {"a": 1e308}),
        ("reward_parts", {"a\0": 1.0}),
        ("reward_parts", {"a\nb": 1.0}),
        ("reward_parts", {"a" * 513: 1.0}),
        ("reward_parts", dict.fromkeys(map(str, range(1025)), 1.0)),
        ("finish_reason", ""),
        ("turns", 0),
        ("index", -1),
    ],
)
def test_a_bad_field_is_named(group, field, value):
    good = group(LEASE)
    bad = dataclasses.replace(good.trajectories[1], **{field: value})
    # One trajectory alone, so that nothing else of the group makes up for it.
    with pytest.raises(
        BadMessage, match="loss_mask|versions" if field in ("loss_mask", "versions") else field
    ):
        decode_group(*encode_group(dataclasses.replace(good, trajectories=(bad,))))


def test_a_reward_part_may_have_any_name_and_is_told_by_it(group):
    good = group(LEASE)
    parts = {"style.length [x]": 1.0, "a": 0.5}
    named = dataclasses.replace(good.trajectories[0], reward_parts=parts)
    got = decode_group(*encode_group(dataclasses.replace(good, trajectories=(named,))))
    assert got.trajectories[0].reward_parts == parts
    bad = dataclasses.replace(named, reward_parts={"style.length": float("nan")})
    with pytest.raises(BadMessage, match=r"trajectories\[0\].reward_parts.style.length: expected a finite"):
        decode_group(*encode_group(dataclasses.replace(good, trajectories=(bad,))))


def test_metadata_that_is_not_plain_is_refused_at_the_sender(group):
    good = group(LEASE)
    bad = dataclasses.replace(good.trajectories[0], metadata={"object": object()})
    with pytest.raises(BadMessage, match="plain"):
        encode_group(dataclasses.replace(good, trajectories=(bad,)))


@pytest.mark.parametrize("key", [b"\xff", 7], ids=str)
@pytest.mark.parametrize(
    "around",
    [lambda odd: odd, lambda odd: {"a": odd}, lambda odd: {"a": [[{"b": odd}]]}],
    ids=["top", "in", "far"],
)
def test_a_key_that_is_no_text_is_refused_wherever_it_stands(group, key, around):
    """msgpack has such keys and JSON has not: neither eval.jsonl nor samples.jsonl could be written."""
    good = group(LEASE)
    bad = dataclasses.replace(good.trajectories[0], metadata=around({key: 1}))
    with pytest.raises(BadMessage, match="key"):
        decode_group(*encode_group(dataclasses.replace(good, trajectories=(bad,))))


@pytest.mark.parametrize("key", [b"\xff", 7], ids=str)
def test_a_row_with_a_key_that_is_no_text_is_not_sent(key):
    with pytest.raises(BadMessage, match="row: expected text keys, got"):
        check_row({"prompt": "p", "metadata": {"a": [{key: 1}]}})


@pytest.mark.parametrize("cut", [0, 1, 17, -1])
def test_truncated_arrays_are_refused(group, cut):
    meta, arrays = encode_group(group(LEASE))
    with pytest.raises(BadMessage, match="arrays"):
        decode_group(meta, bytes(arrays)[:cut])


def test_run_lengths_that_overrun_are_refused_before_anything_is_made(group):
    meta, arrays = encode_group(group(LEASE))
    tampered = bytearray(arrays)
    runs = msgpack.unpackb(meta)["runs"]
    start = len(tampered) - 8 * runs
    tampered[start : start + 4] = (2**31 - 1).to_bytes(4, "little")
    with pytest.raises(BadMessage, match="run_lengths"):
        decode_group(meta, tampered)


@settings(max_examples=300, deadline=None)
@given(meta=st.binary(max_size=200), arrays=st.binary(max_size=64))
def test_noise_is_a_bad_message_and_nothing_else(meta, arrays):
    for read in (
        lambda: decode_group(meta, arrays),
        lambda: decode_request(meta, "run"),
        lambda: ENVELOPE.open_reply(meta),
    ):
        assert refused(read) != ""


def refused(read):
    """The refusal's text; None where the bytes happen to be a message."""
    try:
        read()
    except Refusal as refusal:
        return str(refusal)
    return None


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    field=st.sampled_from(["schema", "id", "role", "name", "run_id", "verb", "max_groups", "wait_s"]),
    value=JSONISH,
)
def test_any_value_in_a_request_is_taken_or_refused(field, value):
    frame = encode_request(Request("id", "rollout", "n", "run", "lease", {"max_groups": 1, "wait_s": 0.5}))
    told = ""
    try:
        decode_request(msgpack.packb({**msgpack.unpackb(frame), field: value}), "run")
    except WrongRun:
        told = field
    except Refusal as refusal:
        told = str(refusal)
    assert not told or field in told


def test_requests_replies_and_leases_come_back_as_they_went():
    request = Request(
        "id", "learner", "rank-0", "run", "batch", {"index": 4, "dp_rank": 1, "dp_size": 2, "wait_s": 1.0}
    )
    assert decode_request(encode_request(request), "run") == request
    eval_lease = Lease("m", Prompt("eval/0/1", {"prompt": [{"role": "user", "content": "x"}]}), "eval", 0)
    request_id, reply = ENVELOPE.open_reply(ENVELOPE.reply("id", encode_leases([LEASE, eval_lease])))
    ENVELOPE.raise_if_refused(reply)
    assert (request_id, decode_leases(reply)) == ("id", [LEASE, eval_lease])


def test_a_refusal_is_raised_again_as_itself():
    _, reply = ENVELOPE.open_reply(ENVELOPE.refusal("id", WrongRun("run_id: no")))
    with pytest.raises(WrongRun, match="run_id: no"):
        ENVELOPE.raise_if_refused(reply)


@pytest.mark.parametrize("odd", ["a\nb", "\x1b[2J", "a\u2028b", "a\0"])
def test_what_will_stand_in_logs_is_one_line_of_what_can_be_printed(odd):
    asked = Request("id", "rollout", "n", "run", "give_up", {"lease_id": "l", "reason": "r", "requeue": True})
    header = msgpack.unpackb(encode_request(asked))
    for field in ("name", "reason"):
        with pytest.raises(BadMessage, match=f"{field}: expected printable") as refused:
            decode_request(msgpack.packb({**header, field: odd}), "run")
        assert str(refused.value).isprintable()
    assert one_line(f"{odd}, höher") == f"{odd!r}"[1:-1] + ", höher"


def test_schema_run_role_and_verb_are_checked():
    good = Request("id", "rollout", "n", "run", "status", {})
    header = msgpack.unpackb(encode_request(good))
    with pytest.raises(WrongRun, match=f"speaks {SCHEMA}, the client {SCHEMA + 1}"):
        decode_request(msgpack.packb({**header, "schema": SCHEMA + 1}), "run")
    with pytest.raises(WrongRun, match=r"'other'.*'run'"):
        decode_request(encode_request(good), "other")
    with pytest.raises(BadMessage, match="verb"):
        decode_request(msgpack.packb({**header, "verb": "committed", "index": 1}), "run")
