"""What crosses between the learner and a model on ranks of its own, in bytes: the one file that knows.

A request is a msgpack header, which names the schema, the run, the weights, who asks and what; the frames
of each of its micro-batches follow (`learner/apart/work.py`). A reply's header repeats the request's id and
bears its numbers; raw frames of float32 follow. Every request carries the whole introduction, so that a job
that was restarted answers a learner that never noticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.envelope import Envelope
from buffer.errors import BadMessage, Refusal, WrongRun
from buffer.fields import choice, integer, label, mapping, pack, text, unpack
from buffer.groups import Frame
from learner.apart.work import FLOAT, MAX_HEADER_BYTES, Limits, Work, decode_work, encode_work, frames_of

SCHEMA = 2
HELLO = "hello"
VALUE_METRICS = ("loss", "clipped", "tokens")
"""Sums of an update of the value model."""


class OutOfStep(Refusal):
    """The model is not where the learner takes it to be: it is of another start, or of another update."""

    kind = "out_of_step"


class Failed(Refusal, ValueError):
    """What was asked cannot be done, and asking again would not help."""

    kind = "failed"


KINDS: dict[str, type[Refusal]] = {c.kind: c for c in (Refusal, BadMessage, WrongRun, OutOfStep, Failed)}


@dataclass(frozen=True, slots=True)
class Verb:
    """What belongs to a request of this kind, beside its session."""

    numbers: tuple[str, ...] = ()
    """Whole ones, from 0."""
    works: bool = False
    """Whether it has micro-batches."""
    known: int = 0
    """Arrays of what is known of each micro-batch's targets."""
    answers: tuple[str, ...] = ()
    """Numbers of its answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A model that may have ranks of its own, and what is asked of it."""

    name: str
    """What it is called in messages."""
    verbs: Mapping[str, Verb]
    same: str
    """What learner and job must agree on, for the message where they do not."""

    @property
    def envelope(self) -> Envelope:
        return Envelope(self.name, "learner", SCHEMA, KINDS, MAX_HEADER_BYTES, MAX_HEADER_BYTES)


REFERENCE = Kind(
    "reference",
    {HELLO: Verb(), "logprobs": Verb(works=True)},
    "model.path, learner.init_from and model.dtype",
)
VALUE = Kind(
    "value model",
    {
        HELLO: Verb(),
        "follow": Verb(),
        "load": Verb(("step", "number"), answers=("number", "loaded", "place")),
        "values": Verb(("number",), works=True),
        "train": Verb(
            ("number", "index", "copy", "copies", "tokens"),
            works=True,
            known=2,
            answers=(*VALUE_METRICS, "grad_norm", "made"),
        ),
        "save": Verb(("number", "step", "attempt")),
        "export": Verb(("number",)),
    },
    "seed, model, and of the section learner steps, recompute and value",
)


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of the model."""

    verb: str
    works: tuple[Work, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    session: str = ""
    """Of a model that is trained: which start of the learner it follows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    arrays: tuple[NDArray[np.float32], ...] = ()
    """Of each micro-batch, [N]."""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """Made by the learner, read by the job."""

    request_id: str
    """Names the request over its retries; an answer carries it back."""
    run_id: str
    weights: str
    """Fingerprint of those that the job must have started from."""
    name: str
    """Who asks."""
    task: Task


@dataclass(frozen=True, slots=True)
class Served:
    """What a job answers for."""

    kind: Kind
    run_id: str
    weights: str
    limits: Limits


def encode_request(kind: Kind, request: Request) -> list[Frame]:
    about = {"run_id": request.run_id, "weights": request.weights, "name": request.name}
    return encode_task(request.task, kind.envelope.request(request.request_id, about))


def encode_task(task: Task, header: Mapping[str, Any] | None = None) -> list[Frame]:
    """Alone, as the job's ranks hand it on to each other; or with a request's header."""
    fields = {"verb": task.verb, "session": task.session, "works": len(task.works), **task.numbers}
    return [
        pack({**(header or {}), **fields}),
        *(frame for work in task.works for frame in encode_work(work)),
    ]


def decode_task(frames: Sequence[Frame], served: Served) -> Task:
    """The reverse. Raises as `decode_request`."""
    return _task(unpack(frames[0], "header", MAX_HEADER_BYTES), frames[1:], served)


def decode_request(frames: Sequence[Frame], served: Served) -> Request:
    """Check a request.

    Raises:
        WrongRun: Another schema, another run, or a learner that started from other weights.
        BadMessage: Any other fault, naming the field.
    """
    kind = served.kind
    request_id, header = kind.envelope.open_request(frames[0] if frames else b"")
    theirs = text(header, "run_id")
    if theirs != served.run_id:
        raise WrongRun(f"run_id: this {kind.name} serves run {served.run_id!r}, the learner is of {theirs!r}")
    weights = text(header, "weights", 64)
    if weights != served.weights:
        raise WrongRun(
            f"weights: this {kind.name} has {served.weights}, the learner's run started from {weights}; give "
            f"both the same {kind.same}"
        )
    return Request(request_id, theirs, weights, label(header, "name"), _task(header, frames[1:], served))


def _task(header: dict[str, Any], frames: Sequence[Frame], served: Served) -> Task:
    name = choice(header, "verb", tuple(served.kind.verbs))
    verb, count = served.kind.verbs[name], integer(header, "works")
    if count and not verb.works:
        raise BadMessage(f"works: {name} has no micro-batches, got {count}")
    each = frames_of(verb.known)
    if len(frames) != count * each:
        raise BadMessage(f"frames: {count} micro-batches have {count * each}, got {len(frames)}")
    works = (decode_work(frames[n * each : (n + 1) * each], served.limits) for n in range(count))
    numbers = {key: integer(header, key) for key in verb.numbers}
    if numbers.get("copy", 0) >= numbers.get("copies", 1):
        raise BadMessage(f"copy: expected one below copies, {numbers['copies']}, got {numbers['copy']}")
    session = "" if header.get("session", "") == "" else text(header, "session", 64)
    return Task(name, tuple(works), numbers, session)


def encode_answer(kind: Kind, request_id: str, answer: Answer) -> list[Frame]:
    arrays = [array.astype(FLOAT, copy=False).tobytes() for array in answer.arrays]
    return [kind.envelope.reply(request_id, {"numbers": dict(answer.numbers)}), *arrays]


def decode_answer(kind: Kind, verb: str, header: dict[str, Any], frames: Sequence[Frame]) -> Answer:
    """
    Args:
        verb: Of the request.

    Raises:
        Refusal: The one that the job answered with; BadMessage, where the reply breaks the schema.
    """
    kind.envelope.raise_if_refused(header)
    numbers = mapping(header, "numbers")
    for key, value in numbers.items():
        # A norm or a loss may well be none that is finite.
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadMessage(f"numbers: expected numbers, got {key}={value!r:.80}")
    if missing := [name for name in kind.verbs[verb].answers if name not in numbers]:
        raise BadMessage(f"numbers: the answer to {verb} lacks {', '.join(missing)}")
    arrays: list[NDArray[np.float32]] = []
    for frame in frames:
        if (size := memoryview(frame).nbytes) % FLOAT.itemsize:
            raise BadMessage(f"arrays: expected float32, got {size} bytes")
        arrays.append(np.frombuffer(frame, FLOAT).astype(np.float32))
    return Answer(tuple(arrays), {key: float(value) for key, value in numbers.items()})
