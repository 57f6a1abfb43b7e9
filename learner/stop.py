"""How a signal ends a training job: at the end of its step, with a checkpoint."""

import logging
import os
import signal
import time
from typing import Any

logger = logging.getLogger(__name__)

FORCE_AFTER_S = 3.0
"""A terminal's Ctrl-C reaches a rank twice at once, by itself and by torchrun; only a later one is meant."""
ORPHAN_S = 1800
"""A rank whose torchrun is gone has nobody left who would stop it for good: for so long it may write its
checkpoint, as long as a collective may take."""


class Abandoned(Exception):
    """The job was told to stop while it waited for what the step could not do without."""


class StopFlag:
    """Set by the first SIGINT or SIGTERM; another one, some seconds later, ends the process at once."""

    def __init__(self, what: str = "stopping after this step, with a checkpoint") -> None:
        """Args:
        what: What is done then, for the log.
        """
        self._what = what
        self._since: float | None = None
        self._parent = os.getppid()

    @property
    def is_set(self) -> bool:
        return self._since is not None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            if os.getppid() != self._parent:
                signal.alarm(ORPHAN_S)
            logger.info("%s: %s", signal.Signals(number).name, self._what)
        elif now - self._since > FORCE_AFTER_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
