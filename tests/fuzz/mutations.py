"""What is thrown at readers: values and bytes of no sense, and good ones with something wrong in them."""

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st

ODD_NUMBERS = [
    *(0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**30, -0.0, 0.5, 1e308),
    *(math.nan, math.inf, -math.inf, True, False, None),
]
ODD_TEXTS = ["", " ", "\0", "\n", "é", "\ud800", "x" * 300, "../../etc/passwd", "${oc.env:HOME}", "1e999"]

scalars = st.one_of(
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)


def trees(keys: Any = None, leaves: Any = scalars) -> Any:
    """Lists and mappings of scalars, small."""
    keys = st.text(max_size=8) if keys is None else keys
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=12,
    )


@st.composite
def mutated(draw: Any, tree: Any, values: Any = None) -> Any:
    """A tree with one to three places replaced, taken out, renamed, doubled or put in."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        found = _mutate(draw, found, trees() if values is None else values)
    return found


def _mutate(draw: Any, node: Any, values: Any) -> Any:
    if not isinstance(node, dict | list) or not node or draw(st.integers(0, 9)) == 0:
        return draw(values)
    what = draw(st.sampled_from(["inside"] * 6 + ["replace", "take", "rename", "double"]))
    if isinstance(node, dict):
        key = draw(st.sampled_from(sorted(node, key=str)))
        if what == "inside":
            node[key] = _mutate(draw, node[key], values)
        elif what == "replace":
            node[key] = draw(values)
        elif what == "take":
            del node[key]
        elif what == "rename":
            node[draw(st.text(max_size=8))] = node.pop(key)
        else:
            node[draw(st.text(max_size=8))] = copy.deepcopy(node[key])
        return node
    place = draw(st.integers(0, len(node) - 1))
    if what == "inside":
        node[place] = _mutate(draw, node[place], values)
    elif what == "take":
        del node[place]
    elif what == "double":
        node.insert(place, copy.deepcopy(node[place]))
    else:
        node[place] = draw(values)
    return node


NESTED = "lists in each other, as many as msgpack reads"
"""For `packed`, which puts them in its place: nothing that recurses in Python could build them."""
OF_EACH_KIND: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**63,
        0.5,
        -0.5,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
        "",
        "x",
        b"x",
    ),
    *("x" * 600, [], ["x"], [0], [None], {}, {"x": 0}, {b"x": 0}, NESTED),
]
"""Each is a fault to some checks, and good to others."""


def faults(tree: Any) -> Iterator[Any]:
    """A tree with one fault, and all else good, for every place in it: another value of each kind, one just
    beside it, nothing, or one too many."""
    yield from OF_EACH_KIND
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield from (tree - 1, tree + 1, float(tree))
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield {k: v for k, v in tree.items() if k != key}
            yield from (tree | {key: fault} for fault in faults(value))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            before, after = tree[:place], tree[place + 1 :]
            yield before + after
            yield [*before, value, value, *after]
            yield from ([*before, fault, *after] for fault in faults(value))
        yield from _moved(tree)


def _moved(numbers: list[Any]) -> Iterator[list[Any]]:
    """Whole ones of the same sum, of which the last is none, or less."""
    if len(numbers) > 1 and all(isinstance(number, int) for number in numbers):
        *rest, last = numbers
        for left in (0, -1):
            yield [rest[0] + last - left, *rest[1:], left]


CELLS = [
    *(np.int32(value) for value in (0, 1, 8, -1, 1000, -(2**31))),
    *(np.float32(value) for value in (0.5, -0.5, math.nan, math.inf, -math.inf)),
]


def cell_faults(frame: bytes) -> Iterator[bytes]:
    """An array of int32 or float32 with one fault: another value, two that changed by the opposite amounts,
    bytes too few or too many."""
    for place in range(0, len(frame), 4):
        yield from (frame[:place] + cell.tobytes() + frame[place + 4 :] for cell in CELLS)
    cells = np.frombuffer(frame, "<i4").astype(np.int64)
    for place in range(len(cells) - 1):
        for left in (0, -1):
            moved = cells.copy()
            moved[place : place + 2] = cells[place] + cells[place + 1] - left, left
            yield moved.astype("<i4").tobytes()
    yield from (b"", frame[:-1], frame[:-4], frame + b"\0", frame + bytes(4))


@st.composite
def damaged(draw: Any, good: bytes) -> bytes:
    """Bytes with some cut off, flipped, put in, doubled or blanked; or the good ones."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        length = draw(st.integers(0, 64))
        match draw(st.sampled_from(["cut", "flip", "flip", "put", "double", "blank", "drop"])):
            case "cut":
                del raw[place:]
            case "flip" if raw:
                raw[place] ^= 1 << draw(st.integers(0, 7))
            case "put":
                raw[place:place] = draw(st.binary(max_size=64))
            case "double":
                raw[place:place] = raw[place : place + length]
            case "blank":
                raw[place : place + length] = bytes(len(raw[place : place + length]))
            case _:
                del raw[place : place + length]
    return bytes(raw)


def packed(tree: Any) -> bytes:
    """msgpack of anything: what it has no word for as text."""
    raw = msgpack.packb(_packable(tree), unicode_errors="surrogatepass")
    return raw.replace(msgpack.packb(NESTED), b"\x91" * 1015 + b"\xc0")


def _packable(value: Any) -> Any:
    match value:
        case dict():
            return {k if isinstance(k, str | bytes) else str(k): _packable(v) for k, v in value.items()}
        case list() | tuple():
            return [_packable(v) for v in value]
        case int() if not -(2**63) <= value < 2**64:
            return str(value)
    return value


BOMBS = [b"\x91" * 3000 + b"\xc0", b"\x81\xa1a" * 600 + b"\xc0", b"\xdd\xff\xff\xff\xff", b""]
"""Nested deeply, or a list that says it is as long as there is no memory."""


def swapped(good: dict[str, Any]) -> Any:
    """With one value replaced by an odd one, and all else good: what only that field's own check can tell."""
    return st.tuples(st.sampled_from(sorted(good)), scalars).map(lambda one: good | {one[0]: one[1]})


def messages(*good: dict[str, Any]) -> Any:
    """Headers: good ones with a fault, trees, and bytes."""
    valid = [packed(one) for one in good]
    return st.one_of(
        *(mutated(one).map(packed) for one in good),
        *(swapped(one).map(packed) for one in good),
        *(damaged(one) for one in valid),
        trees().map(packed),
        st.binary(max_size=200),
        st.sampled_from(BOMBS),
    )


def as_json(value: Any) -> Any:
    """The same in what JSON has words for."""
    return json.loads(json.dumps(value, default=str, skipkeys=True))


json_leaves = st.one_of(
    st.sampled_from([n for n in ODD_NUMBERS if not isinstance(n, float) or math.isfinite(n)]),
    st.sampled_from(ODD_TEXTS),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
)
json_trees = trees(leaves=json_leaves)
