"""Headers: msgpack mappings, and checks of single fields.

Each check returns the value as its type or raises `BadMessage` naming the field, behind `where` it lies.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import msgpack

from buffer.errors import BadMessage

MAX_INT = 2**31 - 1
MAX_TEXT = 512
MAX_ITEMS = 1 << 16
MAX_LEVELS = 100
"""Of lists and mappings in each other. msgpack reads a thousand, which nothing that recurses could then show,
copy or write: far fewer than Python's own limit, and more than anybody's rows have."""

ROUND_A_ROW = 10
"""Of these, those that messages and rewards put round a row of data, and some to spare."""

_NESTING = (list, dict)


def is_count(value: object) -> bool:
    """Whether something out of a file is a whole number from 0 to `MAX_INT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT


def text(fields: dict[str, Any], name: str, longest: int = MAX_TEXT, *, where: str = "") -> str:
    """A text of 1 to `longest` characters."""
    value = _field(fields, name, where)
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise BadMessage(f"{where}{name}: expected a text of 1 to {longest} characters, got {_short(value)}")
    return value


def label(fields: dict[str, Any], name: str) -> str:
    """A text that will stand in logs and on screens: neither another line nor a terminal's commands are in
    it."""
    value = text(fields, name)
    if not value.isprintable():
        raise BadMessage(f"{name}: expected printable characters, got {_short(value)}")
    return value


def one_line(told: object) -> str:
    """A text from elsewhere as one line that is fit to be logged."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(told))


def integer(fields: dict[str, Any], name: str, low: int = 0, high: int = MAX_INT, *, where: str = "") -> int:
    value = _field(fields, name, where)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadMessage(f"{where}{name}: expected an integer from {low} to {high}, got {_short(value)}")
    return value


def number(
    fields: dict[str, Any], name: str, low: float = -math.inf, high: float = math.inf, *, where: str = ""
) -> float:
    """A finite number."""
    value = _field(fields, name, where)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadMessage(f"{where}{name}: expected a finite number, got {_short(value)}")
    if not low <= value <= high:
        raise BadMessage(f"{where}{name}: expected a number from {low} to {high}, got {_short(value)}")
    return float(value)


def flag(fields: dict[str, Any], name: str) -> bool:
    value = _field(fields, name)
    if not isinstance(value, bool):
        raise BadMessage(f"{name}: expected true or false, got {_short(value)}")
    return value


def choice(fields: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = _field(fields, name)
    if not isinstance(value, str) or value not in allowed:
        raise BadMessage(f"{name}: expected one of {', '.join(allowed)}, got {_short(value)}")
    return value


def mapping(fields: dict[str, Any], name: str, *, where: str = "") -> dict[str, Any]:
    """A mapping with text keys."""
    value = _field(fields, name, where)
    if not isinstance(value, dict):
        raise BadMessage(f"{where}{name}: expected a mapping, got {_short(value)}")
    items = cast("dict[Any, Any]", value)
    for key in items:
        if not isinstance(key, str):
            raise BadMessage(f"{where}{name}: expected text keys, got {_short(key)}")
    return items


def sequence(fields: dict[str, Any], name: str, longest: int = MAX_ITEMS) -> list[Any]:
    value = _field(fields, name)
    if not isinstance(value, list) or len(cast("list[Any]", value)) > longest:
        raise BadMessage(f"{name}: expected a list of at most {longest}, got {_short(value)}")
    return cast("list[Any]", value)


def texts(fields: dict[str, Any], name: str) -> list[str]:
    return [text({f"{name}[{i}]": v}, f"{name}[{i}]") for i, v in enumerate(sequence(fields, name))]


def _field(fields: dict[str, Any], name: str, where: str = "") -> Any:
    try:
        return fields[name]
    except KeyError:
        raise BadMessage(f"{where}{name}: missing") from None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def pack(value: dict[str, Any], where: str = "header") -> bytes:
    try:
        return cast("bytes", msgpack.packb(value))
    except (TypeError, OverflowError, ValueError) as error:
        raise BadMessage(f"{where}: only plain values can be sent: {error}") from None


def check_row(row: dict[str, Any]) -> None:
    """Whether a row of data can be sent.

    Raises:
        BadMessage: It holds what msgpack has no word for, a key that is no text, or is nested deeper than a
            message may be.
    """
    pack(row, "row")
    _check_nested(row, "row", MAX_LEVELS - ROUND_A_ROW)


def unpack(frame: bytes | bytearray | memoryview, where: str, longest: int | None = None) -> dict[str, Any]:
    """A mapping of msgpack, of at most `longest` bytes."""
    if longest is not None and memoryview(frame).nbytes > longest:
        raise BadMessage(f"{where}: {memoryview(frame).nbytes} bytes, at most {longest}")
    try:
        value: Any = msgpack.unpackb(frame)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadMessage(f"{where}: not msgpack: {str(error) or type(error).__name__}") from None
    _check_nested(value, where)
    return mapping({where: value}, where)


def _check_nested(value: Any, where: str, most: int = MAX_LEVELS) -> None:
    """Refuse too many levels and, on any of them, keys that are no texts: msgpack has such, JSON has not."""
    level: Iterable[Any] = [value]
    for _ in range(most + 1):
        # By exact types, ten times as fast as `isinstance` of either: a group has hundreds of values.
        nested = [each for each in level if type(each) in _NESTING]
        if not nested:
            return
        for each in nested:
            if type(each) is dict and (odd := [key for key in each if not isinstance(key, str)]):
                raise BadMessage(f"{where}: expected text keys, got {_short(odd[0])}")
        level = chain.from_iterable(each if type(each) is list else each.values() for each in nested)
    raise BadMessage(f"{where}: more than {most} lists and mappings in each other")
