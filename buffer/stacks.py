"""Where every thread of a process is, on request and when nothing goes on."""

import faulthandler
import signal


def answer_with_stacks() -> None:
    """From now on SIGUSR2 has the stack of every thread written to standard error, without stopping any.

    Python's own handler in C does it: it answers while the interpreter itself is stuck.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)


class Stillness:
    """Has the stack of every thread written to standard error when a service achieves nothing for long, and
    again after as long once more. Python's own timer in C does it, whatever the interpreter is stuck in.

    A process has one.
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
        """Nothing more is to be achieved."""
        faulthandler.cancel_dump_traceback_later()
