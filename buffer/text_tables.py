"""JSON files by row: lines of objects, or one array of them.

The byte range of every row is found in one pass and kept (24 bytes a row, in the cache folder for a large
file); a row is read from the file when it is asked for.
"""

import codecs
import io
import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from buffer import cache
from buffer.examples import BadRow, FileChanged

CHUNK = 4 * 2**20
LONGEST_ROW = 256 * 2**20
"""Bytes of one line or of one element of an array at most."""
CUT_OFF = 16
"""A decoder that complains this near to the end of what it was given may have been given too little."""

LONGEST_EXPONENT = 3
"""A number that ends nearer to the end of what was given may go on: `1` in front of `.` or `e+`."""

SCANS = 2
"""Raised by one whenever a file that was scanned may be refused, or cut otherwise: large ones are anew."""

Span = tuple[int, int, int]
"""Start and end in bytes, and the number a person would look for: of the line or of the item, from 1."""
Scan = Callable[[Path], Iterator[Span]]


class TextTable:
    """Rows of a JSON file.

    Args:
        path: The file.
        scan: Finds its rows: `lines` or `items`.

    Raises:
        ValueError: The file cannot be read, or is no JSON array where it should be one.
    """

    def __init__(self, path: Path, scan: Scan) -> None:
        self.name = str(path)
        self._path = path
        self._format = "{}:{}" if scan is lines else "{} item {}"
        try:
            self.key = cache.key(path)
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._opened = self._written()
            self._spans = _spans(path, scan, self.key)
        except OSError as error:
            wanted = "one JSON object a line" if scan is lines else "a JSON array of objects"
            raise ValueError(f"{path}: cannot be read: {error}; expected a file of {wanted}") from None

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> Any:
        try:
            return self._read(row)
        except BadRow as error:
            if self._written() == self._opened:
                raise
            raise FileChanged(f"the file was changed since it was opened: {error.reason}") from None

    def _written(self) -> tuple[int, int]:
        """Changes when somebody writes to the file; one that is put in its place is another."""
        stat = os.fstat(self._file)
        return stat.st_size, stat.st_mtime_ns

    def _read(self, row: int) -> Any:
        start, end, _ = (int(n) for n in self._spans[row])
        if end - start > LONGEST_ROW:
            raise BadRow(f"of {(end - start) >> 20} MiB; expected at most {LONGEST_ROW >> 20}")
        try:
            text = os.pread(self._file, end - start, start).decode("utf-8-sig").rstrip("\r\n")
            value = json.loads(text)
            if "\\u" in text:  # half of a character may be escaped, and could not be sent on
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode-escape").decode()
            raise BadRow(f"{half} is half of a character; expected whole ones") from None
        except json.JSONDecodeError as error:
            raise BadRow(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8: {error.reason} at byte {error.start} of the row") from None
        except RecursionError:
            raise BadRow("not JSON: nested too deeply") from None
        except ValueError as error:  # a number of thousands of digits
            raise BadRow(f"cannot be read: {error}") from None

    def where(self, row: int) -> str:
        return self._format.format(self.name, int(self._spans[row][2]))

    def fingerprint(self) -> str:
        return cache.content(self._path)


def _spans(path: Path, scan: Scan, key: str | None) -> np.ndarray:
    """uint64 [rows, 3] of `Span`: mapped from the cache folder, or in memory for a small file."""

    def write(sink: BinaryIO) -> None:
        kept = array("Q")
        for span in scan(path):
            kept.extend(span)
            if len(kept) >= 3 * 2**16:
                sink.write(kept.tobytes())
                del kept[:]
        sink.write(kept.tobytes())

    if key is None:
        memory = io.BytesIO()
        write(memory)
        flat = np.frombuffer(memory.getvalue(), np.uint64)
    else:
        kept = cache.made(f"{key}.{SCANS}.{scan.__name__}", write)
        flat = np.memmap(kept, np.uint64, "r") if kept.stat().st_size else np.empty(0, np.uint64)
    return flat.reshape(-1, 3)


def lines(path: Path) -> Iterator[Span]:
    """Every line that is not blank."""
    start = number = 0
    with path.open("rb") as file:
        while part := file.readline(CHUNK):
            number, end, blank = number + 1, start + len(part), part.isspace()
            while not part.endswith(b"\n") and (part := file.readline(CHUNK)):
                end, blank = end + len(part), blank and part.isspace()
            if not blank:
                yield start, end, number
            start = end


def items(path: Path) -> Iterator[Span]:
    """Every element of the array that the file is.

    Raises:
        ValueError: It is not one; past a broken element nothing can be found.
    """
    # Read as Latin-1 a character is a byte, and JSON's own marks are the same in it as in UTF-8.
    decoder = json.JSONDecoder()
    with path.open("rb") as file:
        window = _Window(file)
        if window.next_mark() != "[":
            raise ValueError(f"{path}: expected a JSON array of objects")
        window.at += 1
        number = 0
        while (mark := window.next_mark()) != "]":
            if number and mark != ",":
                raise ValueError(f"{path} after item {number}: expected a comma or the array's end")
            window.at += number > 0
            window.next_mark()
            number += 1
            try:
                length = window.decode(decoder)
            except (ValueError, RecursionError) as error:
                deep = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                reason = getattr(error, "msg", deep).removesuffix(" at")
                raise ValueError(f"{path} item {number}: not JSON: {reason}") from None
            yield window.offset + window.at - length, window.offset + window.at, number
        window.at += 1
        if window.next_mark():
            raise ValueError(f"{path} behind item {number}: expected nothing after the array's end")


class _Window:
    """The part of a file that is looked at. `offset` is the file's place of its first byte, `at` the place in
    it."""

    def __init__(self, file: BinaryIO) -> None:
        self.at = 0
        self._file = file
        self._text = ""
        head = file.read(len(codecs.BOM_UTF8))
        if head != codecs.BOM_UTF8:
            file.seek(0)
        self.offset = file.tell()

    def next_mark(self) -> str:
        """Go to the next character that is not blank; "" at the end of the file."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more(CHUNK):
                return ""

    def decode(self, decoder: json.JSONDecoder) -> int:
        """Go past the value that begins here; its length in bytes."""
        size = CHUNK
        while True:
            try:
                _, end = decoder.raw_decode(self._text, self.at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - CUT_OFF
                if not unfinished or len(self._text) - self.at > LONGEST_ROW or not self._more(size):
                    raise
                size *= 2
                continue
            if len(self._text) - end < LONGEST_EXPONENT and self._more(size):
                continue
            length, self.at = end - self.at, end
            return length

    def _more(self, size: int) -> bool:
        """Let go of what is behind and read on; False at the end of the file."""
        block = self._file.read(size)
        if not block:
            return False
        self._text = self._text[self.at :] + block.decode("latin-1")
        self.offset += self.at
        self.at = 0
        return True
