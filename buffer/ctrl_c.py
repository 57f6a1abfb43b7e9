"""Ctrl-C while a process still imports what it is made of: one line and exit code 130, no traceback.

Each `__main__` calls `end_at_ctrl_c` before it imports anything else; whatever the process then takes the
signal for replaces this.
"""

import os
import signal

EXIT_INTERRUPTED = 130


def end_at_ctrl_c() -> None:
    signal.signal(signal.SIGINT, _end)
    # Whoever starts this process may hold the signal back until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end(*_: object) -> None:
    # Not by an exception: an import in progress may swallow it, or turn it into an ImportError.
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
