"""Ending a process with everything that it started, wherever that went. Linux only: reads /proc."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from buffer.handles import OUT


def kill_tree(pid: int) -> None:
    """Kill a process that leads a session, and all that descends from it.

    What it left alone it must have adopted again (PR_SET_CHILD_SUBREAPER), or it is not found.
    """
    # Stopped first: nobody starts anything while we look, but for what made itself a session of its own.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGSTOP)
    try:
        _kill_descendants(pid)
    except OSError as error:
        if error.errno not in OUT:  # without file handles /proc cannot be read: its session only
            raise
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    seen: set[int] = set()
    while fresh := descendants(pid) - seen:
        for found in fresh:
            with suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)
        seen |= fresh


def descendants(pid: int) -> set[int]:
    """The ids of a process's children, their children, and so on."""
    children = defaultdict(list)
    for child, parent, _ in _processes():
        children[parent].append(child)
    found, queue = set(), [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def zombies(pid: int) -> int:
    """How many children of a process have ended, and nobody has asked how."""
    return sum(parent == pid and state == "Z" for _, parent, state in _processes())


def _processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent and state of every process."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name in brackets may hold anything.
                state, parent, *_ = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry), int(parent), state.decode()
