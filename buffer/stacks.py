"""Where every thread of a process is, on request and when nothing goes on."""

import faulthandler
import os
import signal
from pathlib import Path

ACHIEVED = ("published", "delivered", "frontier", "committed", "eval_left")
"""Of the buffer's status: one of these changes with whatever is achieved in a run."""


def answer_with_stacks() -> None:
    """From now on SIGUSR2 has the stack of every thread written to standard error, without stopping any.

    Python's own handler in C does it: it answers while the interpreter itself is stuck.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)


class Stillness:
    """Has the stack of every thread written to standard error when a service achieves nothing for long, and
    again after as long once more. Python's own timer in C does it, whatever the interpreter is stuck in.

    The timer is the process's: what any part of it saw last counts.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._achieved: tuple[object, ...] | None = None

    def see(self, *achieved: object) -> None:
        """Values of which one changes with whatever is achieved; the time begins anew when one has."""
        if achieved != self._achieved:
            self._achieved = achieved
            faulthandler.dump_traceback_later(self._within_s, repeat=True)

    def end(self) -> None:
        """Nothing is to be achieved, until `see` is told again."""
        self._achieved = None
        faulthandler.cancel_dump_traceback_later()


def pass_on_to_children() -> None:
    """From now on SIGUSR2 goes on to those processes that this one started and that answer it with stacks."""
    signal.signal(signal.SIGUSR2, _pass_on)


def _pass_on(number: int, _frame: object) -> None:
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if handles(pid, number):
                os.kill(pid, number)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; it would end any other."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)
