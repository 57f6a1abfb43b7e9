"""Where an engine's processes say what they say: pages of it, on every start, none of it for a terminal."""

import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rollout.engine import EngineFailed

ERROR = re.compile(r"(?:^|\s)(?P<told>(?:\w+\.)*\w*(?:Error|Exception): \S.*)")
POINTER = re.compile(r"root cause|See stack trace|died unexpectedly", re.IGNORECASE)
LOOKED_AT_BYTES = 1 << 18
"""Of what was said since."""


@contextmanager
def engine_log(path: Path) -> Iterator[TextIO]:
    """Send what vLLM, its processes and its libraries say to a file: pages of it, on every start.

    Yields:
        Where standard error went before.

    Raises:
        EngineFailed: As it came, with the file's name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [(sys.stdout, 1, os.dup(1)), (sys.stderr, 2, os.dup(2))]
    with path.open("ab") as log, os.fdopen(os.dup(2), "w", buffering=1) as terminal:
        for stream, number, _ in kept:
            stream.flush()
            os.dup2(log.fileno(), number)
        try:
            yield terminal
        except EngineFailed as error:
            raise EngineFailed(f"{error}; its log: {path}") from error
        finally:
            for stream, number, before in kept:
                stream.flush()
                os.dup2(before, number)
                os.close(before)


@contextmanager
def spared_terminal(path: Path) -> Iterator[None]:
    """As `engine_log` while an engine starts, where standard error is a terminal; elsewhere all stays.

    The engine's processes keep what they were started with; this one has the terminal back afterwards.
    """
    if not sys.stderr.isatty():
        yield
        return
    with engine_log(path):
        yield


def standard_error() -> tuple[Path, int] | None:
    """The file that standard error goes to and how long it is, for `said_since`; None where it is none."""
    found = os.fstat(2)
    if not stat.S_ISREG(found.st_mode):
        return None
    return Path(os.readlink("/proc/self/fd/2")), found.st_size


def said_since(before: tuple[Path, int] | None) -> str | None:
    """The last exception that was named on standard error since, by whichever process; None without one."""
    if before is None:
        return None
    path, offset = before
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - LOOKED_AT_BYTES))
            return named_error(file.read().decode(errors="replace").splitlines())
    except OSError:  # it was taken away, or there are no file handles: then nothing more is known
        return None


def named_error(lines: Sequence[str]) -> str | None:
    """The last exception that lines of a log name; None without one.

    Those that only point to another, as vLLM's do when a process of its own has failed, do not count, nor
    what was warned of and passed.
    """
    found = (ERROR.search(line) for line in reversed(lines) if " WARNING " not in line)
    return next((f["told"] for f in found if f and not POINTER.search(f["told"])), None)
