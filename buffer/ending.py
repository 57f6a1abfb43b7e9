"""How a process ended, in words."""

import signal


def ended(code: int) -> str:
    """Of an exit code that is not 0; minus a signal's number where one ended the process."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{' (by hand, or by the kernel when memory ran out)' * (name == 'SIGKILL')}"
