"""Rows of a data source by number."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Protocol

from buffer import cache
from buffer.examples import BadRow


class Table(Protocol):
    name: str
    """Of the source, for messages."""
    key: str | None
    """Of what is kept about its file, which changes when the file does; None when nothing is."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any:
        """The row as it stands.

        Raises:
            BadRow: It cannot be read.
        """
        ...

    def where(self, row: int) -> str:
        """Where it stands, fit to be told."""
        ...

    def fingerprint(self) -> str:
        """Changes when a row does."""
        ...


class ListTable:
    """Rows that were made in this process: plain JSON."""

    def __init__(self, name: str, rows: Sequence[Any]) -> None:
        self.name = name
        self.key: str | None = None
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]

    def where(self, row: int) -> str:
        return f"{self.name} row {row}"

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()


class Joined:
    """Several tables one after the other, as one."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.name = f"{tables[0].name} and {len(tables) - 1} more"
        keys = [table.key for table in tables]
        self.key = None if None in keys else cache.joined(keys)
        self._tables = tables
        self._ends = list(accumulate(len(t) for t in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Any:
        table, own = self._find(row)
        return table[own]

    def where(self, row: int) -> str:
        table, own = self._find(row)
        return table.where(own)

    def fingerprint(self) -> str:
        return "|".join(table.fingerprint() for table in self._tables)

    def _find(self, row: int) -> tuple[Table, int]:
        index = bisect_right(self._ends, row)
        table = self._tables[index]
        return table, row - self._ends[index] + len(table)


def first_rows(table: Table, count: int) -> list[dict[str, Any]]:
    """The first `count` rows that are objects.

    Raises:
        ValueError: There are none.
    """
    rows = list(islice(_objects(table), count))
    if rows:
        return rows
    if not len(table):
        raise ValueError(f"{table.name}: no rows; at least one is needed")
    try:
        reason = f"expected an object, got {type(table[0]).__name__}"
    except BadRow as error:
        reason = error.reason
    raise ValueError(f"{table.name}: not one of {len(table)} rows can be read; {table.where(0)}: {reason}")


def _objects(table: Table) -> Iterator[dict[str, Any]]:
    for row in range(len(table)):
        try:
            value = table[row]
        except BadRow:
            continue
        if isinstance(value, dict):
            yield value
