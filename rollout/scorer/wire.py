"""What crosses between rollout servers and a scorer, in bytes: the one file that knows.

A request is a msgpack header, which names the schema, the run, the reward, who asks and what; for the ids of
a completion one raw frame follows. A reply's header repeats the request's id. Every request carries the whole
introduction, so that a scorer that was restarted answers a client that never noticed. Every field is checked,
by name and range, before it is used; an error names the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from buffer.envelope import Envelope
from buffer.errors import BadMessage, Refusal, WrongRun
from buffer.fields import choice, flag, integer, label, number, pack, text
from buffer.groups import Frame

SCHEMA = 1
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT = 16 << 20
"""Characters of a prompt or a completion."""
IDS = np.dtype("<i4")

VERBS = ("hello", "score_ids", "score_text")


class ScoringFailed(Refusal):
    """This one cannot be scored; the scorer lives."""

    kind: ClassVar[str] = "scoring_failed"


KINDS: dict[str, type[Refusal]] = {c.kind: c for c in (Refusal, BadMessage, WrongRun, ScoringFailed)}
ENVELOPE = Envelope("scorer", "client", SCHEMA, KINDS)


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt and its completion as the engine was given and sampled them."""

    tokenizer: str
    """Fingerprint of the tokenizer that they are of; the scorer's own must be the same."""
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Words:
    """A prompt and its completion as text, for a scorer with another tokenizer."""

    prompt: str | list[Any]
    """A text or a list of chat messages, as the row has it."""
    completion: str
    ended: bool
    """Whether the policy ended it, so that an end mark belongs behind it."""


@dataclass(frozen=True, slots=True)
class Request:
    """Made by a client, read by the scorer."""

    request_id: str
    """Names the request over its retries; an answer carries it back."""
    run_id: str
    reward: str
    """Name of the reward that the scorer must be of."""
    name: str
    """Who asks."""
    work: Ids | Words | None
    """None only says hello."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Made by the scorer, read by a client: the answer to hello."""

    model: str
    tokenizer: str
    """Its fingerprint."""
    max_length: int


def encode_request(request: Request) -> list[Frame]:
    fields = {"run_id": request.run_id, "reward": request.reward, "name": request.name}
    header = ENVELOPE.request(request.request_id, fields)
    match request.work:
        case None:
            return [pack(header | {"verb": "hello"})]
        case Ids(tokenizer, token_ids):
            frame = token_ids.astype(IDS).tobytes()
            return [pack(header | {"verb": "score_ids", "tokenizer": tokenizer}), frame]
        case Words(prompt, completion, ended):
            words = {"prompt": prompt, "completion": completion, "ended": ended}
            return [pack(header | {"verb": "score_text"} | words)]


def decode_request(frames: Sequence[Frame], run_id: str, reward: str) -> Request:
    """Check a request.

    Raises:
        WrongRun: Another schema, another run, or another reward's scorer.
        BadMessage: Any other fault, naming the field.
    """
    request_id, header = ENVELOPE.open_request(frames[0] if frames else b"")
    theirs = text(header, "run_id")
    if theirs != run_id:
        raise WrongRun(f"run_id: this scorer serves run {run_id!r}, the client belongs to {theirs!r}")
    asked = text(header, "reward")
    if asked != reward:
        raise WrongRun(f"reward: this scorer serves {reward!r}, the client wants {asked!r}")
    return Request(request_id, theirs, asked, label(header, "name"), _work(header, frames[1:]))


def _work(header: dict[str, Any], frames: Sequence[Frame]) -> Ids | Words | None:
    verb = choice(header, "verb", VERBS)
    wanted = 1 if verb == "score_ids" else 0
    if len(frames) != wanted:
        raise BadMessage(f"frames: {verb} has {wanted} behind the header, got {len(frames)}")
    match verb:
        case "score_ids":
            return Ids(text(header, "tokenizer", 64), _token_ids(frames[0]))
        case "score_text":
            return Words(_prompt(header), _long_text(header, "completion"), flag(header, "ended"))
        case _:
            return None


def _token_ids(frame: Frame) -> NDArray[np.int32]:
    size = memoryview(frame).nbytes
    if size == 0 or size % IDS.itemsize:
        raise BadMessage(f"token_ids: expected one or more int32, got {size} bytes")
    ids = np.frombuffer(frame, IDS)
    if ids.min() < 0:
        raise BadMessage(f"token_ids: expected no negative id, got {int(ids.min())}")
    return ids.astype(np.int32, copy=False)


def _prompt(header: dict[str, Any]) -> str | list[Any]:
    value = header.get("prompt")
    if isinstance(value, list):
        return value
    return _long_text(header, "prompt")


def _long_text(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadMessage(f"{name}: expected a text of at most {MAX_TEXT} characters")
    return value


def encode_welcome(request_id: str, welcome: Welcome) -> bytes:
    fields = {"model": welcome.model, "tokenizer": welcome.tokenizer, "max_length": welcome.max_length}
    return ENVELOPE.reply(request_id, fields)


def encode_score(request_id: str, score: float) -> bytes:
    return ENVELOPE.reply(request_id, {"score": score})


def decode_welcome(reply: dict[str, Any]) -> Welcome:
    return Welcome(text(reply, "model", 4096), text(reply, "tokenizer", 64), integer(reply, "max_length", 1))


def decode_score(reply: dict[str, Any]) -> float:
    return number(reply, "score")
