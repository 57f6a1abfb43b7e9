"""A micro-batch as it crosses to a model on ranks of its own, in bytes.

Shapes: S tokens laid out in the micro-batch, N targets. Every field is checked, by name and range, before it
is used; an error names the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from buffer.errors import BadMessage
from buffer.fields import integer, number, pack, sequence, unpack
from buffer.groups import Frame

MAX_HEADER_BYTES = 1 << 20
INT = np.dtype("<i4")
FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a micro-batch."""

    max_tokens: int
    vocabulary: int

    @property
    def max_message_bytes(self) -> int:
        """Of a frame: a micro-batch has no more targets than tokens."""
        return max(MAX_HEADER_BYTES, INT.itemsize * self.max_tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch, as far as a model looks at it that is no policy in training."""

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
    known: tuple[NDArray[np.float32], ...] = ()
    """[N] each: what is trained on; nothing for a pass without gradients."""


def frames_of(known: int) -> int:
    """How many a micro-batch takes on the wire."""
    return 4 + known


def encode_work(work: Work) -> list[Frame]:
    fields = {"segments": [list(lengths) for lengths in work.segments], "temperature": work.temperature}
    ids = [
        a.astype(INT, copy=False).tobytes() for a in (work.token_ids, work.target_positions, work.target_ids)
    ]
    return [pack(fields), *ids, *(a.astype(FLOAT, copy=False).tobytes() for a in work.known)]


def decode_work(frames: Sequence[Frame], limits: Limits) -> Work:
    """The reverse.

    Raises:
        BadMessage: Names the field.
    """
    header = unpack(frames[0], "header", MAX_HEADER_BYTES)
    segments = tuple(_lengths(value) for value in sequence(header, "segments"))
    tokens = sum(map(sum, segments))
    if not 1 <= tokens <= limits.max_tokens:
        raise BadMessage(f"segments: {tokens} tokens, expected 1 to {limits.max_tokens}")
    token_ids = _ids(frames[1], "token_ids", limits.vocabulary)
    if len(token_ids) != tokens:
        raise BadMessage(f"token_ids: {len(token_ids)} of them, and the segments have {tokens}")
    positions = _ids(frames[2], "target_positions", tokens)
    target_ids = _ids(frames[3], "target_ids", limits.vocabulary)
    if not 1 <= len(positions) <= tokens or len(positions) != len(target_ids):
        raise BadMessage(
            f"target_positions: {len(positions)}, and {len(target_ids)} target_ids; expected as many, "
            f"1 to {tokens}"
        )
    known = tuple(floats(frame, "known", len(positions)) for frame in frames[4:])
    return Work(segments, token_ids, positions, target_ids, number(header, "temperature", 1e-6, 1e6), known)


def floats(frame: Frame, name: str, count: int) -> NDArray[np.float32]:
    """So many of them; what is not finite is for the loss to refuse, with its place."""
    size = memoryview(frame).nbytes
    if size != FLOAT.itemsize * count:
        raise BadMessage(f"{name}: expected {count} float32, got {size} bytes")
    return np.frombuffer(frame, FLOAT).astype(np.float32)


def _lengths(value: object) -> tuple[int, ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if len(items) < 2:
        raise BadMessage("segments: expected lists of a prompt's length and those of its completions")
    return tuple(integer({"segments": item}, "segments", 1) for item in items)


def _ids(frame: Frame, name: str, below: int) -> NDArray[np.int32]:
    size = memoryview(frame).nbytes
    if size == 0 or size % INT.itemsize:
        raise BadMessage(f"{name}: expected one or more int32, got {size} bytes")
    found = np.frombuffer(frame, INT)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= below:
        raise BadMessage(f"{name}: expected 0 to {below - 1}, got {low if low < 0 else high}")
    return found.astype(np.int32, copy=False)
