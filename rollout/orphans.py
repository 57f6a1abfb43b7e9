"""Leaves no engine process behind, however the server ends.

vLLM's core does not notice that the process which started it was killed with -9; it would keep its memory
for ever. A guard process waits for the end of a pipe that the server holds, which the kernel closes in every
case, and then kills whatever still runs with this server's mark in its environment. Linux only: reads /proc.

vLLM names its processes with setproctitle, which by default writes over the memory where /proc finds the
environment, and the mark with it. It is told not to.
"""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

MARK = "SLIPSTREAM_SERVER_MARK"


def start_guard() -> "subprocess.Popen[bytes]":
    """Mark this process's future children, and start the guard over them.

    Keep the result: the guard acts when the pipe in it is closed, at the latest when this process ends.
    """
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    os.environ["SPT_NOENV"] = "1"  # of setproctitle
    command = [sys.executable, "-I", __file__, mark]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    # Its own session: a kill of the server's process group must not take the guard with it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


@contextmanager
def children_without_ctrl_c() -> Iterator[None]:
    """Processes started in this block by this thread never get SIGINT, whatever handlers they set.

    A terminal sends Ctrl-C to everything in front of it. An engine that dies of it answers no more, just when
    its server has leases to hand back.
    """
    # Python starts it with the first process of multiprocessing, and lets the signal through again then. What
    # it takes away behind an engine that was killed is no news, least of all as a log's last words.
    warnings = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (warnings, "ignore:resource_tracker")))
    resource_tracker.ensure_running()
    if warnings is None:
        del os.environ["PYTHONWARNINGS"]
    else:
        os.environ["PYTHONWARNINGS"] = warnings
    over = threading.Event()
    # Children inherit the thread's mask; another thread still takes the signal for this process.
    listener = threading.Thread(target=over.wait, name="takes-signals", daemon=True)
    listener.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def marked(mark: str) -> list[int]:
    """The ids of the processes that were started with the mark in their environment."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # another user's, or gone by now
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def is_tracker(pid: int) -> bool:
    """Whether a process is the one that Python starts beside others to take away what they leave."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # gone by now


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    # Again, for what one of them was just starting. But their tracker of resources: with them gone it takes
    # away the shared memory that they left, and ends.
    while pids := [pid for pid in marked(mark) if not is_tracker(pid)]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


if __name__ == "__main__":
    main(sys.argv[1])
