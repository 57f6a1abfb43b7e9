"""A small parent for one service: nothing the service started outlives it, nor the supervisor.

The supervisor runs `python launch/guard.py PARENT FORWARD CMD…` for every service, PARENT being its own
process id. The guard adopts every process the service leaves behind (they may be in sessions of their own, as
torchrun's ranks are), so that it can find and end them all:

- SIGTERM is passed on: to the service when FORWARD is `service`, to the service's children when it is
  `children` (torchrun answers SIGTERM with a 30 s deadline for its ranks; told directly, they take the
  time they need);
- SIGUSR1, which the kernel also sends when the supervisor dies by whatever means, kills everything at once,
  but for what Python starts beside processes to take away the shared memory that they leave;
- when the service ends, what it left behind is ended and the guard exits with the service's code.

Stdlib only and run by path, so that it costs little to start. Linux only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_DEADLINE_S = 5.0


def main(parent: int, forward: str, command: list[str]) -> int:
    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    signal.signal(signal.SIGUSR1, lambda *_: end_all(signal.SIGKILL, but=is_tracker))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        return 1  # the supervisor died before the kernel was asked to tell
    # A guard that is itself killed takes the service with it.
    service = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    signal.signal(signal.SIGTERM, lambda *_: pass_on(service.pid, forward))
    if early:
        pass_on(service.pid, forward)
    code = reap_until(service.pid)
    end_leftovers()
    return code


def pass_on(service: int, forward: str) -> None:
    """Send SIGTERM where the service wants it; a torchrun that has no ranks yet gets it itself."""
    targets = (children().get(service, []) if forward == "children" else []) or [service]
    for pid in targets:
        _kill(pid, signal.SIGTERM)


def reap_until(service: int) -> int:
    """Reap whatever ends, adopted processes too, until the service has ended.

    Returns:
        Its exit code; 128 + n when signal n ended it, as shells say it.
    """
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == service:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_leftovers() -> None:
    """SIGTERM, then SIGKILL, to every process that the service started and left."""
    end_all(signal.SIGTERM)
    deadline = time.monotonic() + LEFTOVER_DEADLINE_S
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            end_all(signal.SIGKILL)


def end_all(number: int, but: Callable[[int], bool] = lambda _: False) -> None:
    """Signal every descendant that is to end; for SIGKILL again until no new ones show up."""
    seen: set[int] = set()
    while fresh := [pid for pid in descendants() if pid not in seen and not but(pid)]:
        for pid in fresh:
            _kill(pid, number)
        seen.update(fresh)


def is_tracker(pid: int) -> bool:
    """Whether a process is multiprocessing's tracker of resources, which ends soon after those it is of."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants() -> list[int]:
    tree = children()
    found, queue = [], [os.getpid()]
    while queue:
        below = tree.get(queue.pop(), [])
        found += below
        queue += below
    return found


def children() -> dict[int, list[int]]:
    """Process id → the ids of its children, for every process of the machine, from /proc."""
    tree: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name in brackets may hold anything; the parent is the second field after it.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        tree.setdefault(parent, []).append(int(entry))
    return tree


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
