"""The scorer's messages: what goes in comes out, and what is wrong is told by its field's name."""

import msgpack
import numpy as np
import pytest

from buffer.errors import BadMessage, WrongRun
from rollout.scorer import wire
from rollout.scorer.wire import Ids, Request, ScoringFailed, Welcome, Words

IDS = Ids("f" * 32, np.array([5, 0, 2**31 - 1], np.int32))
WORDS = Words([{"role": "user", "content": "how?"}], "", ended=False)


def request(work):
    return Request("r1", "run", "helpful", "server-0", work)


def changed(work, **fields):
    header, *frames = wire.encode_request(request(work))
    known = msgpack.unpackb(header) | fields
    return [msgpack.packb({k: v for k, v in known.items() if v is not ...}), *frames]


@pytest.mark.parametrize("work", [None, WORDS, Words("how?", "so", ended=True)])
def test_a_request_comes_out_as_it_went_in(work):
    assert wire.decode_request(wire.encode_request(request(work)), "run", "helpful") == request(work)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4"])
def test_token_ids_are_four_little_endian_bytes_each(dtype):
    sent = wire.encode_request(request(Ids("f", np.array([1, 258], dtype))))
    assert bytes(sent[1]) == b"\1\0\0\0\2\1\0\0"
    work = wire.decode_request(sent, "run", "helpful").work
    assert isinstance(work, Ids)
    assert work.token_ids.tolist() == [1, 258]
    assert work.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("work", "fields", "told"),
    [
        (None, {"schema": 9}, "schema: the scorer speaks 1, the client 9"),
        (None, {"run_id": "other"}, "run_id: this scorer serves run 'run', the client belongs to 'other'"),
        (None, {"reward": "brief"}, "reward: this scorer serves 'helpful', the client wants 'brief'"),
    ],
)
def test_a_stranger_is_told_whose_scorer_it_is(work, fields, told):
    with pytest.raises(WrongRun) as refused:
        wire.decode_request(changed(work, **fields), "run", "helpful")
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("work", "fields", "told"),
    [
        (None, {"schema": "1"}, "schema: expected an integer"),
        (None, {"id": ...}, "id: missing"),
        (None, {"name": 7}, "name: expected a text"),
        (None, {"verb": "stop"}, "verb: expected one of hello, score_ids, score_text"),
        (IDS, {"tokenizer": ...}, "tokenizer: missing"),
        (IDS, {"verb": "hello"}, "frames: hello has 0 behind the header, got 1"),
        (None, {"verb": "score_ids"}, "frames: score_ids has 1 behind the header, got 0"),
        (WORDS, {"prompt": 3}, "prompt: expected a text"),
        (WORDS, {"completion": None}, "completion: expected a text"),
        (WORDS, {"ended": "yes"}, "ended: expected true or false"),
    ],
)
def test_a_bad_field_is_named(work, fields, told):
    with pytest.raises(BadMessage) as refused:
        wire.decode_request(changed(work, **fields), "run", "helpful")
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (b"", "token_ids: expected one or more int32, got 0 bytes"),
        (b"12345", "token_ids: expected one or more int32, got 5 bytes"),
        (np.array([4, -1], np.int32).tobytes(), "token_ids: expected no negative id, got -1"),
    ],
)
def test_bad_token_ids_are_named(frame, told):
    with pytest.raises(BadMessage) as refused:
        wire.decode_request([*changed(IDS)[:1], frame], "run", "helpful")
    assert str(refused.value) == told


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [msgpack.packb([1])], [b"\x81" * 3000]])
def test_what_is_no_header_is_a_bad_message(frames):
    with pytest.raises(BadMessage):
        wire.decode_request(frames, "run", "helpful")


def test_a_welcome_and_a_score_come_back_whole():
    welcome = Welcome("/models/reward", "f" * 32, 128)
    request_id, reply = wire.ENVELOPE.open_reply(wire.encode_welcome("r1", welcome))
    assert (request_id, wire.decode_welcome(reply)) == ("r1", welcome)
    score = float(np.float32(-12.3456789))
    assert wire.decode_score(wire.ENVELOPE.open_reply(wire.encode_score("r2", score))[1]) == score


@pytest.mark.parametrize("refusal", [BadMessage("x: wrong"), WrongRun("no"), ScoringFailed("too_long: 9")])
def test_a_refusal_is_raised_again_as_what_it_was(refusal):
    _, reply = wire.ENVELOPE.open_reply(wire.ENVELOPE.refusal("r1", refusal))
    with pytest.raises(type(refusal), match=str(refusal)):
        wire.ENVELOPE.raise_if_refused(reply)
