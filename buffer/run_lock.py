"""The lock that keeps a second run, a second buffer or a second learner out of a run's folder."""

import fcntl
import os
import time
from pathlib import Path

from buffer.errors import FolderInUse

GRACE_S = 5.0
"""So long one waits that comes behind another: what was killed with gigabytes of memory is gone only then."""
POLL_S = 0.1


class RunLock:
    """Held for as long as a service that there is one of uses the run folder; the kernel lets it go when the
    process dies, also where what it forked lives on.

    Raises:
        FolderInUse: Another one lives, after `grace_s` too.
    """

    def __init__(self, run_dir: Path, service: str, grace_s: float = GRACE_S) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / f"{service}.lock").open("a+")
        os.register_at_fork(after_in_child=self._file.close)
        if not self._taken(time.monotonic() + grace_s):
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise FolderInUse(
                f"{run_dir}: in use by another {service} (process {holder}); stop it or set another run_dir"
            )
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _taken(self, deadline: float) -> bool:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_S)

    def release(self) -> None:
        self._file.close()
