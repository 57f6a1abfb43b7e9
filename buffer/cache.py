"""What is derived once from a large data file and kept for the next start: where it lies, and under which
name."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

CACHED_FROM = 16 * 2**20
"""Bytes. What is derived from a smaller file is made anew each time, in memory."""
SAMPLES = 1024
SAMPLE_BYTES = 64 * 1024


def folder() -> Path:
    """`slipstream/data` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "data"


def key(path: Path) -> str | None:
    """Names what is derived from a file as it is now (path, size and mtime); None when it is too small to be
    worth keeping."""
    stat = path.stat()
    if stat.st_size < CACHED_FROM:
        return None
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def joined(keys: Sequence[str | None]) -> str:
    """One key for several."""
    return hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()


def made(name: str, write: Callable[[BinaryIO], None]) -> Path:
    """The cache's file `name`; written first, in full or not at all, when it is not there yet.

    Raises:
        ValueError: The folder cannot be written.
    """
    path = folder() / name
    if path.exists():
        return path
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{name}.", delete=False) as file:
            temporary = Path(file.name)
            write(file)  # type: ignore[arg-type]
        temporary.replace(path)  # several processes may do this at once, each with the same bytes
        temporary = None
    except OSError as error:
        raise ValueError(
            f"{path.parent}: cannot be written: {error}; set XDG_CACHE_HOME to a folder with room"
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def content(path: Path) -> str:
    """Changes when the file does: its size and a hash of its bytes.

    A file of up to 64 MiB is hashed whole. Of a larger one 1024 blocks of 64 KiB, evenly spread, the first
    and the last among them: an edit that keeps the size and misses all of them is not noticed.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
        else:
            for i in range(SAMPLES):
                file.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def contents(files: Iterable[Path]) -> str:
    """Changes when one of the files does, by `content`, or its name."""
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        digest.update(f"{file.name} {content(file)}\n".encode())
    return digest.hexdigest()
