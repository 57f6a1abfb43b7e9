"""What crosses between the learner and the reference's own ranks, in bytes: the one file that knows.

A request is a msgpack header, which names the schema, the run, the weights, who asks and what; for a
micro-batch three raw frames follow. A reply's header repeats the request's id; one raw frame of logprobs
follows. Every request carries the whole introduction, so that a reference that was restarted answers a
learner that never noticed. Every field is checked, by name and range, before it is used; an error names the
field. Shapes: S tokens laid out in the micro-batch, N targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from buffer.envelope import Envelope
from buffer.errors import BadMessage, Refusal, WrongRun
from buffer.fields import choice, integer, number, pack, sequence, text, unpack
from buffer.groups import Frame

SCHEMA = 1
MAX_HEADER_BYTES = 1 << 20
VERBS = ("hello", "logprobs")
INT = np.dtype("<i4")
FLOAT = np.dtype("<f4")

KINDS: dict[str, type[Refusal]] = {c.kind: c for c in (Refusal, BadMessage, WrongRun)}
ENVELOPE = Envelope("reference", "learner", SCHEMA, KINDS, MAX_HEADER_BYTES, MAX_HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch, as far as a frozen model looks at it."""

    segments: tuple[tuple[int, ...], ...]
    """Lengths of each prompt and of the completions behind it, in the order in which they lie."""
    token_ids: NDArray[np.int32]
    """[S]."""
    target_positions: NDArray[np.int32]
    """[N]: where the hidden state lies that predicts the target."""
    target_ids: NDArray[np.int32]
    """[N]."""
    temperature: float
    """Divides the logits."""


@dataclass(frozen=True, slots=True)
class Request:
    """Made by the learner, read by the reference."""

    request_id: str
    """Names the request over its retries; an answer carries it back."""
    run_id: str
    weights: str
    """Fingerprint of those that the reference must have."""
    name: str
    """Who asks."""
    work: Work | None
    """None only says hello."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a reference answers for."""

    run_id: str
    weights: str
    max_tokens: int
    """Of a micro-batch."""
    vocabulary: int

    @property
    def max_message_bytes(self) -> int:
        """Of a frame: a micro-batch has no more targets than tokens."""
        return max(MAX_HEADER_BYTES, INT.itemsize * self.max_tokens)


def encode_request(request: Request) -> list[Frame]:
    fields = {"run_id": request.run_id, "weights": request.weights, "name": request.name}
    header = ENVELOPE.request(request.request_id, fields)
    if request.work is None:
        return [pack(header | {"verb": "hello"})]
    return encode_work(request.work, header | {"verb": "logprobs"})


def encode_work(work: Work, header: dict[str, Any] | None = None) -> list[Frame]:
    """A micro-batch alone, as the reference's ranks hand it on to each other; or with a request's header."""
    segments = [list(lengths) for lengths in work.segments]
    fields = {**(header or {}), "segments": segments, "temperature": work.temperature}
    arrays = (work.token_ids, work.target_positions, work.target_ids)
    return [pack(fields), *(a.astype(INT, copy=False).tobytes() for a in arrays)]


def decode_work(frames: Sequence[Frame], served: Served) -> Work:
    """The reverse. Raises as `decode_request`."""
    return _work(unpack(frames[0], "header", MAX_HEADER_BYTES), frames[1:], served)


def decode_request(frames: Sequence[Frame], served: Served) -> Request:
    """Check a request.

    Raises:
        WrongRun: Another schema, another run, or a learner that started from other weights.
        BadMessage: Any other fault, naming the field.
    """
    request_id, header = ENVELOPE.open_request(frames[0] if frames else b"")
    theirs = text(header, "run_id")
    if theirs != served.run_id:
        raise WrongRun(f"run_id: this reference serves run {served.run_id!r}, the learner is of {theirs!r}")
    weights = text(header, "weights", 64)
    if weights != served.weights:
        raise WrongRun(
            f"weights: this reference has {served.weights}, the learner's run started from {weights}; give "
            "both the same model.path, learner.init_from and model.dtype"
        )
    verb = choice(header, "verb", VERBS)
    wanted = 3 if verb == "logprobs" else 0
    if len(frames) != 1 + wanted:
        raise BadMessage(f"frames: {verb} has {wanted} behind the header, got {len(frames) - 1}")
    work = _work(header, frames[1:], served) if wanted else None
    return Request(request_id, theirs, weights, text(header, "name"), work)


def _work(header: dict[str, Any], frames: Sequence[Frame], served: Served) -> Work:
    segments = tuple(_lengths(value) for value in sequence(header, "segments"))
    tokens = sum(map(sum, segments))
    if not 1 <= tokens <= served.max_tokens:
        raise BadMessage(f"segments: {tokens} tokens, expected 1 to {served.max_tokens}")
    token_ids = _array(frames[0], "token_ids", served.vocabulary)
    if len(token_ids) != tokens:
        raise BadMessage(f"token_ids: {len(token_ids)} of them, and the segments have {tokens}")
    positions = _array(frames[1], "target_positions", tokens)
    target_ids = _array(frames[2], "target_ids", served.vocabulary)
    if not 1 <= len(positions) <= tokens or len(positions) != len(target_ids):
        raise BadMessage(
            f"target_positions: {len(positions)}, and {len(target_ids)} target_ids; expected as many, "
            f"1 to {tokens}"
        )
    temperature = number(header, "temperature", 1e-6, 1e6)
    return Work(segments, token_ids, positions, target_ids, temperature)


def _lengths(value: object) -> tuple[int, ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if len(items) < 2:
        raise BadMessage("segments: expected lists of a prompt's length and those of its completions")
    return tuple(integer({"segments": item}, "segments", 1) for item in items)


def _array(frame: Frame, name: str, below: int) -> NDArray[np.int32]:
    size = memoryview(frame).nbytes
    if size == 0 or size % INT.itemsize:
        raise BadMessage(f"{name}: expected one or more int32, got {size} bytes")
    found = np.frombuffer(frame, INT)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= below:
        raise BadMessage(f"{name}: expected 0 to {below - 1}, got {low if low < 0 else high}")
    return found.astype(np.int32, copy=False)


def encode_logprobs(request_id: str, logprobs: NDArray[np.float32]) -> list[Frame]:
    return [ENVELOPE.reply(request_id), logprobs.astype(FLOAT, copy=False).tobytes()]


def decode_logprobs(frames: Sequence[Frame], count: int) -> NDArray[np.float32]:
    """As many as there were targets; what is not finite is for the loss to refuse, with its place."""
    size = memoryview(frames[0]).nbytes if len(frames) == 1 else -1
    if size != FLOAT.itemsize * count:
        raise BadMessage(
            f"logprobs: expected one frame of {count} float32, got {len(frames)} of {size} bytes"
        )
    return np.frombuffer(frames[0], FLOAT).astype(np.float32)
