"""Where an engine's processes say what they say: pages of it, on every start, none of it for a terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rollout.engine import EngineFailed


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
