"""Rows of a data source by number, none of them held in memory that lies in a file."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from buffer.examples import BadRow


class Table(Protocol):
    name: str
    """Of the source, for messages."""

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


class ListTable:
    """Rows that were made in this process."""

    def __init__(self, name: str, rows: Sequence[Any]) -> None:
        self.name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]

    def where(self, row: int) -> str:
        return f"{self.name} row {row}"


class JsonLines:
    """A file of one JSON object a line; blank lines are nothing."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            with path.open("rb") as file:
                self._lines = [(n, line) for n, line in enumerate(file, start=1) if line.strip()]
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read: {error}; expected a file of one JSON object a line"
            ) from None

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Any:
        try:
            return json.loads(self._lines[row][1])
        except json.JSONDecodeError as error:
            raise BadRow(f"not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8: {error.reason} at byte {error.start}") from None

    def where(self, row: int) -> str:
        return f"{self.name}:{self._lines[row][0]}"


class Joined:
    """Several tables one after the other, as one."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.name = f"{tables[0].name} and {len(tables) - 1} more"
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

    def _find(self, row: int) -> tuple[Table, int]:
        index = bisect_right(self._ends, row)
        table = self._tables[index]
        return table, row - self._ends[index] + len(table)


def first_rows(table: Table, count: int) -> list[Any]:
    """The first rows that can be read."""
    return list(islice(_readable(table), count))


def _readable(table: Table) -> Iterator[Any]:
    for row in range(len(table)):
        try:
            yield table[row]
        except BadRow:
            continue
