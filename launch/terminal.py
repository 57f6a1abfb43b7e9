"""The terminal or pipe that a command prints on, which may go away before the command has ended."""

import errno
import os
import signal
import sys
from typing import Any, TextIO

from rich.console import Console

WIDE = 160
"""Columns of a file or a pipe, which has no width of its own: rich takes 80, and cuts tables to that."""


def open_console(wide: bool = False) -> Console:
    """Standard output. A run must not end at once because the window that it was started in was closed: the
    hang-up's signal stops it in order, and what it says meanwhile goes nowhere. Nor because the program that
    read its output has ended (`slipstream run C | head`): that stops it as a hang-up does.

    Args:
        wide: Whether tables are printed that 80 columns are too few for.
    """
    stream = _UntilHangUp(sys.stdout)
    # A dumb terminal cannot move its cursor: lines, as into a file.
    plain = False if os.environ.get("TERM", "").lower() in ("dumb", "unknown") else None
    width = WIDE if wide and not sys.stdout.isatty() and "COLUMNS" not in os.environ else None
    return Console(file=stream, force_terminal=plain, width=width)  # pyright: ignore[reportArgumentType]


class _UntilHangUp:
    """A text stream whose writes lead nowhere once its terminal is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        """Put the null device in its place, so that what is buffered can leave at the end too."""
        unread = error.errno == errno.EPIPE and callable(signal.getsignal(signal.SIGHUP))
        if error.errno != errno.EIO and not unread:
            raise error
        gone, null = os.fstat(self._stream.fileno()), os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            if os.path.samestat(os.fstat(number), gone):
                os.dup2(null, number)
        os.close(null)
        if unread:
            print("nobody reads what this command prints any more", file=sys.stderr, flush=True)
            signal.raise_signal(signal.SIGHUP)
