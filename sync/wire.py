"""The control messages between the learner's publisher (ROUTER) and the rollout servers (DEALER). No torch.

One msgpack map a message, its kind under "kind". Every field is checked by type and range before use; the
weights themselves never pass here.

    server                                   publisher
    JOIN ───────────────────────────────────▶
      ◀──────────────── WELCOME | REFUSE | EVICT            the name is taken: join again, later
    BEAT ◀──────────────────────────────────▶ BEAT        both ways, all the time; a server's with counts
      ◀──────────────────────────────── PREPARE
    READY ──────────────────────────────────▶
      ◀─────────────────────────────────── MEET            of a new group; then the buckets go over it
    LOADED | FAILED ────────────────────────▶
      ◀────────────────────────────────── ABORT            the group broke
    DROPPED ────────────────────────────────▶
      ◀────────────────────────────────── EVICT            join again
    LEAVE ──────────────────────────────────▶
"""

import re
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from sync.errors import CAUSES
from sync.manifest import Manifest

SCHEMA = 6
"""Grows whenever a message changes; a server of another schema is refused with the reason."""

MAX_MESSAGE_BYTES = 256 << 20

MEMORY_PATH = re.compile(r"/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9}")
"""A server opens no other file at a learner's word."""


Entries = dict[str, bytes]
"""What ranks of a broadcast group left for the others, by torch's keys: how each is reached."""

GLOO_ADDRESS_BYTES = 136
"""A socket's address in the kernel's form and a number."""
MOST_ENTRIES = 1 << 16
LONGEST_KEY = 64
LONGEST_ENTRY_BYTES = 1024

COUNTED = (
    *("tokens", "wasted_tokens"),
    *("waiting_s/weights", "waiting_s/scorers", "waiting_s/leases", "publish_s/pause"),
)
"""What a server may count, from its start on, and tell with each BEAT: tokens of completions that ended,
tokens sampled for nothing, and seconds in which it did not generate, by what it waited for."""

HIGHEST_COUNT = 1e15


def member_beat_s(heartbeat_timeout_s: float) -> float:
    """Between two BEATs of a member."""
    return min(1.0, heartbeat_timeout_s / 5)


class WireError(ValueError):
    """A message that is not what this file describes; the text names the field."""


@dataclass(frozen=True, slots=True)
class Join:
    """Made by the receiver, read by the publisher: this server wants every version from now on."""

    schema: int
    run_id: str
    name: str
    world_size: int
    place: str
    """`shared_memory.place_of_this_process`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Made by the publisher, read by the receiver."""

    schema: int
    heartbeat_timeout_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Made by the publisher, read by the receiver: never, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Made by the publisher, read by the receiver: version `version` comes as laid out in `manifest`.

    `attempt` names this one try and is in every answer. `epoch` names the broadcast group; with `fresh` it is
    to be built (this server's ranks are `first_rank` and up, rank 0 sends), else the one of the last PREPARE
    is used again. `nonce` is the epoch's secret: only members are told, and by it they know the learner in
    the group. `memory` is where the learner shares the version's stream; empty where the buckets are
    broadcast.
    """

    attempt: int
    version: int
    epoch: int
    nonce: str = field(repr=False)
    fresh: bool
    first_rank: int
    group_size: int
    backend: str
    memory: str
    timeout_s: float
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Ready:
    """Made by the receiver, read by the publisher: the engine took the manifest, staging begins.

    `entries` is what this server's ranks left for the others of a new group; with a kept one nothing.
    """

    attempt: int
    entries: Entries = field(repr=False)


@dataclass(frozen=True, slots=True)
class Meet:
    """Made by the publisher, read by the receiver: every member is ready, and this is what all ranks left."""

    attempt: int
    entries: Entries = field(repr=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Made by the receiver, read by the publisher: every rank of this server generates with `version`.

    `checksum` is of all buckets as they were staged.
    """

    attempt: int
    version: int
    checksum: int
    stage_seconds: float
    load_seconds: float
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Made by the receiver, read by the publisher. Causes: `errors.CAUSES`; "transfer" blames nobody."""

    attempt: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Made by the publisher, read by the receiver: forget what is staged and the group; answer DROPPED."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Made by the receiver, read by the publisher: ready for another PREPARE."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Made by the publisher, read by the receiver: not a member (any more); JOIN again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Made by both, read by both: alive."""

    counts: dict[str, float] = field(default_factory=dict[str, float])
    """A server's, by names out of `COUNTED`; the publisher has none."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Made by the receiver, read by the publisher: a clean goodbye."""


Message = (
    Join | Welcome | Refuse | Prepare | Ready | Meet | Loaded | Failed | Abort | Dropped | Evict | Beat
    | Leave
)  # fmt: skip

KINDS: dict[str, type[Message]] = {
    "JOIN": Join, "WELCOME": Welcome, "REFUSE": Refuse, "PREPARE": Prepare, "READY": Ready, "MEET": Meet,
    "LOADED": Loaded, "FAILED": Failed, "ABORT": Abort, "DROPPED": Dropped, "EVICT": Evict, "BEAT": Beat,
    "LEAVE": Leave,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}

_INTEGERS = {
    "schema": (0, 1 << 31),
    "world_size": (1, 1 << 16),
    "attempt": (1, 1 << 62),
    "version": (0, 1 << 62),
    "epoch": (1, 1 << 62),
    "first_rank": (1, 1 << 20),
    "group_size": (2, 1 << 20),
    "checksum": (-(1 << 63), (1 << 63) - 1),
}
_SECONDS = ("heartbeat_timeout_s", "timeout_s", "stage_seconds", "load_seconds", "pause_seconds")
_TEXTS = {"run_id": 256, "name": 256, "nonce": 64, "place": 256, "reason": 4096}


def is_gloo_entry(entry: bytes) -> bool:
    """Whether it is what a rank leaves with gloo: a host's name and an address, each behind its length. gloo
    reads it without a look at these, and beyond its end."""
    at = 0
    for length in (None, GLOO_ADDRESS_BYTES):
        said = int.from_bytes(entry[at : at + 8], sys.byteorder)
        if length not in (None, said):
            return False
        at += 8 + said
    return at == len(entry)


def encode(message: Message) -> bytes:
    values: dict[str, Any]
    if isinstance(message, Prepare):
        values = {each.name: getattr(message, each.name) for each in fields(message)}
        values["manifest"] = message.manifest.to_wire()
    else:
        values = asdict(message)
        if "reason" in values:
            values["reason"] = values["reason"][: _TEXTS["reason"]]
    return cast(bytes, msgpack.packb({"kind": _NAMES[type(message)], **values}))  # pyright: ignore


def decode(raw: bytes) -> Message:
    """Read a message.

    Raises:
        WireError: Not a message of this schema; the text names the field.
    """
    if len(raw) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(raw)} bytes: expected at most {MAX_MESSAGE_BYTES}")
    try:
        value = cast(object, msgpack.unpackb(raw, strict_map_key=True))  # pyright: ignore
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"message: not msgpack: {error}") from None
    try:
        return _message(value)
    except RecursionError:  # as an error that shows it would have to
        raise WireError("message: nested too deeply") from None


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise WireError(f"message: expected a map, found {type(value).__name__}")
    values = cast(dict[object, object], value)
    kind = KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise WireError("kind: unknown")
    if "schema" in values and values["schema"] != SCHEMA:
        raise WireError(
            f"schema: {values['schema']!r}: this side speaks {SCHEMA}; install one version on both"
        )
    names = [each.name for each in fields(kind)]
    if set(values) != set(names):
        raise WireError(f"{_NAMES[kind]}: expected the fields {names}, found {sorted(map(str, values))}")
    return kind(**{name: _check(name, values[name]) for name in names})


def _check(name: str, value: object) -> Any:
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise WireError(f"{name}: {value!r}: expected an integer in [{low}, {high}]")
    if name in _SECONDS:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
            return float(value)
        raise WireError(f"{name}: {value!r}: expected seconds")
    if name in _TEXTS:
        if isinstance(value, str) and len(value) <= _TEXTS[name]:
            return _printable(name, value)
        raise WireError(f"{name}: expected text of at most {_TEXTS[name]} characters")
    return _check_special(name, value)


def _printable(name: str, value: str) -> str:
    """Texts stand in logs: of a reason, which may have several lines, one is made; others are refused."""
    if name == "reason":
        return one_line(value)
    if not value.isprintable():
        raise WireError(f"{name}: {value!r:.80}: expected printable characters")
    return value


def one_line(told: object) -> str:
    """A text from elsewhere as one line that is fit to be logged."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(told))


_CHOICES: dict[str, tuple[str, ...]] = {"backend": ("gloo", "nccl"), "cause": CAUSES}


def _check_special(name: str, value: object) -> Any:
    if name == "manifest":
        try:
            return Manifest.from_wire(value)
        except ValueError as error:
            raise WireError(str(error)) from None
    if name == "fresh":
        if isinstance(value, bool):
            return value
        raise WireError(f"fresh: {value!r}: expected a boolean")
    if name == "memory":
        if isinstance(value, str) and (not value or MEMORY_PATH.fullmatch(value)):
            return value
        raise WireError("memory: expected a file handle of the learner's under /proc, or nothing")
    if name == "counts":
        return _counts(value)
    if name == "entries":
        return _entries(value)
    if value in _CHOICES[name]:
        return value
    raise WireError(f"{name}: {value!r}: expected one of {', '.join(_CHOICES[name])}")


def _counts(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise WireError(f"counts: expected a map, found {type(value).__name__}")
    found = cast(dict[object, object], value)
    for name, count in found.items():
        if name not in COUNTED:
            raise WireError(f"counts: {str(name)[:64]!r}: expected names out of {', '.join(COUNTED)}")
        if not isinstance(count, int | float) or isinstance(count, bool) or not 0 <= count < HIGHEST_COUNT:
            raise WireError(f"counts: {name}: {str(count)[:64]}: expected a number in [0, {HIGHEST_COUNT:g})")
    return cast(dict[str, float], found)


def _entries(value: object) -> Entries:
    if not isinstance(value, dict) or len(cast(dict[object, object], value)) > MOST_ENTRIES:
        raise WireError(f"entries: expected a map of at most {MOST_ENTRIES}")
    found = cast(dict[object, object], value)
    for key, entry in found.items():
        if not isinstance(key, str) or len(key) > LONGEST_KEY:
            raise WireError(f"entries: expected names of at most {LONGEST_KEY} characters")
        if not isinstance(entry, bytes) or len(entry) > LONGEST_ENTRY_BYTES:
            raise WireError(f"entries: {key!r}: expected at most {LONGEST_ENTRY_BYTES} bytes")
    return cast(Entries, found)
