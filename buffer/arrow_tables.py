"""Parquet, arrow, and folders saved by Hugging Face `datasets`, by row.

Arrow files are mapped into memory. Parquet and compressed arrow give no row without unpacking many: they are
unpacked once, into an arrow file in the cache folder.
"""

import datetime
import decimal
import io
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import ipc, parquet

from buffer import cache
from buffer.examples import BadRow, FileChanged

ROWS_AT_ONCE = 1000


class _Mapped:
    """What a file was that is read where it lies: behind the end of one that was cut off meanwhile, reading
    ends the process (SIGBUS)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = path.stat()

    def check(self) -> None:
        """
        Raises:
            FileChanged: It is shorter than it was. One that was put in its place, or none, changes nothing.
        """
        try:
            found = self._path.stat()
        except OSError:
            return
        if os.path.samestat(found, self._opened) and found.st_size < self._opened.st_size:
            raise FileChanged(
                f"the file was changed since it was opened: {found.st_size} bytes of {self._opened.st_size}"
            )


class ArrowTable:
    """Rows of one or several arrow or parquet files, one after the other.

    Raises:
        ValueError: A file cannot be read as what it is.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self._paths = paths
        try:
            keys = [cache.key(path) for path in paths]
            homes = [home for path, key in zip(paths, keys, strict=True) for home in _homes(path, key)]
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{name}: cannot be read: {' '.join(str(error).split())}") from None
        self._homes = [(file, batch) for file, batch in homes if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for _, batch in self._homes))
        self.key = cache.joined(keys) if all(keys) else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> Any:
        index = bisect_right(self._ends, row)
        file, batch = self._homes[index]
        if file is not None:
            file.check()
        try:
            one = batch.slice(row - self._ends[index] + batch.num_rows, 1)
            # A damaged file's places may lie outside of it, and reading there crashes.
            one.validate(full=True)
            (value,) = one.to_pylist()
            return json.loads(json.dumps(value, default=_as_json))
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise BadRow(f"only plain JSON values can be sent: {error}") from None

    def where(self, row: int) -> str:
        return f"{self.name} row {row}"

    def fingerprint(self) -> str:
        return "|".join(cache.content(path) for path in self._paths)


def saved_by_datasets(folder: Path) -> list[Path]:
    """The arrow files of a folder that `Dataset.save_to_disk` wrote.

    Raises:
        ValueError: It is none, or several splits are in it.
    """
    splits = folder / "dataset_dict.json"
    try:
        if splits.exists():
            names = " or ".join(f"{folder}/{name}" for name in json.loads(splits.read_text())["splits"])
            raise ValueError(f"{folder}: holds several splits; name one: {names}")
        state = json.loads((folder / "state.json").read_text())
        names = [part["filename"] for part in state["_data_files"]]
        if not all(isinstance(name, str) and Path(name).name == name and "\0" not in name for name in names):
            raise TypeError("a file that does not lie in it")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder}: not a folder saved by Hugging Face datasets ({error!r}); for a folder of files "
            "write a pattern, such as folder/*.parquet"
        ) from None
    paths = [folder / name for name in names]
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder}: holds a selection of rows; save it again after flatten_indices()")
    return paths


def _homes(path: Path, key: str | None) -> list[tuple[_Mapped | None, pa.RecordBatch]]:
    """A file's batches, with the file where they are read from it and not from what was unpacked."""
    file = _Mapped(path)
    batches, mapped = _batches(path, key)
    return [(file if mapped else None, batch) for batch in batches]


def _batches(path: Path, key: str | None) -> tuple[list[pa.RecordBatch], bool]:
    """All of a file, and whether they lie in it."""
    with path.open("rb") as file:
        packed = file.read(4) == b"PAR1"
    if not packed:
        reader = _open(pa.memory_map(str(path)))
        before = pa.total_allocated_bytes()
        batches: list[pa.RecordBatch] = []
        for batch in _each(reader):
            if pa.total_allocated_bytes() > before:  # compressed: reading it took memory of its own
                break
            batches.append(batch)
        else:
            return batches, True
        batches.clear()
    if key is None:
        memory = io.BytesIO()
        _unpack(path, packed, memory)
        return list(_each(_open(pa.py_buffer(memory.getvalue())))), False
    unpacked = cache.made(f"{key}.arrow", lambda sink: _unpack(path, packed, sink))
    return list(_each(_open(pa.memory_map(str(unpacked))))), False


def _unpack(path: Path, packed: bool, sink: BinaryIO) -> None:
    if packed:
        # Buffered ahead, the whole file would be in memory.
        source = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        schema, batches = source.schema_arrow, source.iter_batches(batch_size=ROWS_AT_ONCE)
    else:
        source = _open(pa.memory_map(str(path)))
        schema, batches = source.schema, _each(source)
    with ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    pa.default_memory_pool().release_unused()


def _open(source: Any) -> Any:
    try:
        return ipc.open_file(source)
    except pa.ArrowInvalid:
        if isinstance(source, pa.MemoryMappedFile):
            source.seek(0)
        return ipc.open_stream(source)


def _each(reader: Any) -> Iterable[pa.RecordBatch]:
    file = isinstance(reader, ipc.RecordBatchFileReader)
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if file else reader
    for batch in batches:
        batch.validate()  # of its lengths against its buffers; what they hold is looked at row by row
        yield batch


def _as_json(value: Any) -> Any:
    match value:
        case datetime.date() | datetime.time():  # datetime.datetime is a date
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON")
