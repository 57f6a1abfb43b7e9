"""When a checkpoint is due: after so many steps, after so many seconds, and behind the last step."""

import time
from collections.abc import Callable

from learner import collectives
from learner.config import CheckpointConfig


class CheckpointSchedule:
    """Clocks of ranks differ: rank 0's decides."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: Seconds; the first interval begins now.
        """
        self._config = config
        self._clock = clock
        self._since = clock()

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to write one behind step `step`, counted from 1. Collective."""
        of = self._config
        if last or (of.every is not None and step % of.every == 0):
            return True
        if of.every_s is None:
            return False
        return bool(collectives.broadcast_numbers([self._clock() - self._since >= of.every_s])[0])

    def saved(self) -> None:
        """One is written: the next interval begins."""
        self._since = self._clock()
