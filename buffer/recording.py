"""Groups in a file, to be delivered again: what `slipstream measure` feeds a learner with.

msgpack, one `[meta, arrays]` after the other, each as `buffer/groups.py` lays it out and checked as there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgpack

from buffer.errors import BadMessage
from buffer.groups import decode_group, encode_group
from buffer.records import Group


def append_groups(path: Path, groups: Iterable[Group]) -> None:
    """Add them to the file, which is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for group in groups:
            meta, arrays = encode_group(group)
            file.write(cast("bytes", msgpack.packb([meta, bytes(arrays)])))


def read_groups(folder: Path) -> list[Group]:
    """All groups of a folder's `*.groups`, file by file; at least one.

    Raises:
        ValueError: There is none, or a file is damaged, with its place.
    """
    found: list[Group] = []
    for path in sorted(folder.glob("*.groups")):
        with path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, max_buffer_size=2**31 - 1)
            try:
                for meta, arrays in unpacker:
                    found.append(decode_group(meta, arrays))
                if unpacker.tell() != path.stat().st_size:
                    raise BadMessage("cut off in the middle of a group")
            except (BadMessage, ValueError, TypeError, msgpack.UnpackException) as error:
                raise ValueError(f"{path}: group {len(found)}: {error}; expected recorded groups") from None
    if not found:
        raise ValueError(f"{folder}: no recorded groups (*.groups); `slipstream measure` records some")
    return found
