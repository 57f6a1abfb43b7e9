"""File handles: said in one line when a process is out of them, and again when it has some."""

import errno
import logging
import os
import resource
import threading
import time

logger = logging.getLogger(__name__)

LOOK_S = 1.0
OUT = (errno.EMFILE, errno.ENFILE)
"""What a call fails with then: this process may have no more, or the machine may not."""
FOR_FILES = 32
"""As many as writing a checkpoint may take at a time."""
PATIENCE_S = 600.0


def watch_handles() -> None:
    """From now on a thread says when no file can be opened any more, and when one can again.

    Whoever runs into it may wait, or try again, without a line of its own: nobody tells of
    connections that cannot be accepted.
    """
    threading.Thread(target=_watch, daemon=True, name="slipstream-handles").start()


def _watch() -> None:
    out = False
    while True:
        time.sleep(LOOK_S)
        if out is (spare(1) == 0):
            continue
        out = not out
        if out:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.warning(
                "out of file handles: this process may have %d (ulimit -n); new connections and files wait "
                "until some are free, or `prlimit --nofile=MORE --pid %d` allows more", most, os.getpid(),
            )  # fmt: skip
        else:
            logger.warning("there are file handles again")


def spare(most: int) -> int:
    """How many more files can be opened, up to `most`."""
    opened: list[int] = []
    try:
        while len(opened) < most:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in OUT:
            raise
    finally:
        for handle in opened:
            os.close(handle)
    return len(opened)


def wait_for_handles(what: str, count: int = FOR_FILES, timeout_s: float = PATIENCE_S) -> None:
    """Block until so many files can be opened, or the time is up: then what needs them says what is wrong.

    Args:
        what: Needs them, for the log.
    """
    deadline = time.monotonic() + timeout_s
    if spare(count) < count:
        logger.warning("%s waits until %d file handles are free", what, count)
    while spare(count) < count and time.monotonic() < deadline:
        time.sleep(LOOK_S)
