"""Says what a run waits for when nothing moves any more, and has every process tell where its threads are.

A service that waits says so in its own log; this is for whoever looks at the run as a whole.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

from buffer.stacks import ACHIEVED, handles
from launch.experiment import WholeExperiment, apart
from launch.guard import children
from launch.history import History, Record
from launch.overview import clock as told
from launch.supervisor import Supervisor

STACKS = signal.SIGUSR2
"""Every service answers it with the stacks of its threads, in its log."""
SILENT_S = 30.0
"""Services write a line every few seconds; one that wrote none for so long hangs."""


class Watchdog:
    """Looks at the same history as the screen does, and at nothing that could hang itself."""

    def __init__(
        self,
        experiment: WholeExperiment,
        history: History,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._experiment = experiment
        self._history = history
        self._supervisor = supervisor
        self._clock = clock
        self._seen: tuple[float, ...] = ()
        self._since = clock()
        self._next_s = experiment.logging.stalled_s

    def look(self) -> list[str]:
        """What to tell: nothing while something moves; a diagnosis when nothing did for `logging.stalled_s`,
        and again after twice as long."""
        moved = _progress(self._history)
        if moved != self._seen:
            self._seen, self._since, self._next_s = moved, self._clock(), self._experiment.logging.stalled_s
            return []
        still_s = self._clock() - self._since
        if still_s < self._next_s:
            return []
        self._next_s *= 2
        ask_for_stacks([child.process.pid for child in self._supervisor.running])
        return [
            f"nothing was generated, trained or evaluated for {told(still_s)}:",
            *(f"  {line}" for line in diagnosis(self._experiment, self._history, time.time())),
            f"  where each thread is stands at the end of the logs in {self._supervisor.logs}",
        ]


def _progress(history: History) -> tuple[float, ...]:
    """Numbers of which one changes whenever something is achieved."""
    buffer = history.buffer[-1] if history.buffer else {}
    return (
        max(history.steps, default=0),
        len(history.scores),
        *(float(buffer.get(key) or 0) for key in ACHIEVED),
        *(float(lines[-1].get("tokens", 0)) for lines in history.servers.values() if lines),
    )


def diagnosis(experiment: WholeExperiment, history: History, now: float) -> Iterator[str]:
    """Who waits for whom, from the last line that each service wrote.

    Args:
        now: Seconds since the epoch.
    """
    buffer = history.buffer[-1] if history.buffer else None
    if buffer is None:
        yield "the buffer has not come up"
    else:
        yield from _of_buffer(experiment, buffer, now)
    if not any(history.servers.values()):
        yield "no rollout server has come up"
    for name, lines in history.servers.items():
        if lines:
            yield _of_server(name, lines[-1], buffer, now)
    lines_of = {"reference": history.reference, "value": history.value}
    for service in apart(experiment.learner):
        yield _of_job({"value": "value model"}.get(service, service), lines_of[service], now)
    step = max(history.steps, default=None)
    made = "no step yet" if step is None else f"step {step}, {_age(history.steps[step], now)} ago"
    yield f"learner: made {made}"


def _of_buffer(experiment: WholeExperiment, line: Record, now: float) -> Iterator[str]:
    if _silent(line, now):
        yield f"buffer: has told nothing for {_age(line, now)}; it hangs"
        return
    if line.get("published") is None:
        yield "buffer: no version is published, so it grants no lease; servers wait for the learner"
        return
    batch, stored, needed = line.get("frontier", 0), line.get("stored", 0), experiment.buffer.groups_per_batch
    yield (
        f"buffer: {stored} groups stored of the {needed} that batch {batch} takes, "
        f"{line.get('leased', 0)} at servers, room for {line.get('room', 0)} more; "
        f"version {line['published']} is published"
    )
    if line.get("waiting_batches"):
        yield "learner: waits for that batch"


def _of_server(name: str, line: Record, buffer: Record | None, now: float) -> str:
    if _silent(line, now):
        return f"{name}: has told nothing for {_age(line, now)}; it hangs, or its host is gone"
    groups, version = line.get("running_groups", 0), line.get("version")
    if version is None:
        return f"{name}: waits for a version from the learner"
    if groups:
        return f"{name}: has {groups} groups in hand, with version {version}, and finishes none"
    why = "of which none may be granted now" if buffer and not buffer.get("room") else "and gets none"
    return f"{name}: waits for leases, {why}; it has version {version}"


def _of_job(model: str, lines: list[Record], now: float) -> str:
    """Of a model on ranks of its own."""
    if not lines:
        return f"the {model} has not come up"
    if _silent(lines[-1], now):
        return f"{model}: has told nothing for {_age(lines[-1], now)}; it hangs, or its host is gone"
    if missing := lines[-1].get("missing_copies", 0):
        return f"{model}: waits for {missing} of the learner's copies with an update"
    if in_hand := lines[-1].get("in_hand", 0):
        return f"{model}: has {in_hand} requests of the learner's in hand"
    return f"{model}: waits for the learner"


def _silent(line: Record, now: float) -> bool:
    return now - float(line.get("time", 0)) > SILENT_S


def _age(line: Record, now: float) -> str:
    return told(max(0.0, now - float(line.get("time", now))))


def ask_for_stacks(parents: list[int]) -> None:
    """Send STACKS to every process below these that has a handler for it; it would end any other."""
    tree, queue = children(), list(parents)
    while queue:
        below = tree.get(queue.pop(), [])
        queue += below
        for pid in below:
            if handles(pid, STACKS):
                os.kill(pid, STACKS)
