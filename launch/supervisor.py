"""Runs services as child processes: starts them, notices the first one that fails, ends them all.

Knows nothing of what the services do; `launch/local.py` says which there are. Every service runs under
`launch/guard.py`, so that none outlives this process, however it dies.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from buffer.ending import ended
from rollout.engine_log import named_error

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.1
GUARD_DEADLINE_S = 20.0
"""A guard that was told to kill everything ends well within this."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FULL_BYTES = 1 << 20
"""A disk with less room than this keeps no last words of a service."""
LOOKED_AT_BYTES = 1 << 18
"""Of a log's end."""
LONGEST_LINE = 400
"""Characters of a log's line that are shown."""
TORCHRUN_NOISE = re.compile(r"[IWE]\d{4} [\d:.]+ \d+ \S*torch/distributed/(elastic|run\.py|launcher)")


@dataclass(frozen=True)
class Service:
    name: str
    """Also of its log file."""
    role: str
    """Services of one role stand in for each other: the run goes on while one of them lives."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    stop_signal_to: Literal["service", "children"] = "service"
    """Whom SIGTERM is for; `children` for torchrun, see the guard."""


@dataclass(frozen=True)
class Failure:
    service: str
    reason: str
    lines: list[str]
    """The last lines of its log."""
    log: Path
    cause: str | None = None
    """The last exception that its log names, where those last lines do not have it."""


class Child:
    """One started service."""

    def __init__(self, service: Service, log: Path):
        self.service = service
        self.log = log
        self.started = time.monotonic()
        self.asked_to_end = False
        guard = [sys.executable, "-I", str(GUARD), str(os.getpid()), service.stop_signal_to]
        with log.open("ab") as output:
            self.offset = output.tell()
            self.process = subprocess.Popen(
                [*guard, *service.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(service.environment),
                # Away from the terminal's Ctrl-C: the supervisor says who stops when.
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.poll()

    def terminate(self) -> None:
        if self.code is None:
            self.asked_to_end = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the service and everything it started, at once; the guard sees to it."""
        if self.code is None:
            self.process.send_signal(signal.SIGUSR1)

    def failure(self) -> Failure:
        code = self.code
        assert code is not None
        reason = ended(128 - code if code - 128 in set(signal.Signals) else code)
        if not self.log.exists():
            reason += f"; {self.log.parent}/ is not there any more: did somebody remove the run's folder?"
            return Failure(self.service.name, reason, [], self.log, None)
        if shutil.disk_usage(self.log.parent).free < FULL_BYTES:
            reason += "; the disk of its log is full, which may be why"
        lines = last_lines(self.log, self.offset)
        cause = last_error(self.log, self.offset)
        told = cause is None or any(cause in line for line in lines)
        return Failure(self.service.name, reason, lines, self.log, None if told else cause)


class Supervisor:
    """Context manager around the life of all services; leaving it ends what still runs."""

    def __init__(self, services: Sequence[Service], logs: Path, deadlines: Mapping[str, float]):
        """
        Args:
            services: Started in this order.
            logs: Folder of one log file per service; appended to.
            deadlines: Seconds each role has to end after SIGTERM before it is killed; roles stop in this
                order, one after the other.
        """
        self.services = services
        self.logs = logs
        self.deadlines = deadlines
        self.children: list[Child] = []
        self.lost: list[Failure] = []
        """Services that failed while another of their role lived on."""
        self.interrupts = 0
        self._reported: set[str] = set()
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> "Supervisor":
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for service in self.services:
                self.children.append(Child(service, self.logs / f"{service.name}.log"))
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        for child in self.children:
            try:
                child.process.wait(GUARD_DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    @property
    def running(self) -> list[Child]:
        return [c for c in self.children if c.code is None]

    def ended(self, role: str) -> bool:
        """Whether no service of the role runs any more, and at least one ended with code 0."""
        codes = [c.code for c in self.children if c.service.role == role]
        return 0 in codes and None not in codes

    def states(self) -> dict[str, str]:
        """Service name → `running`, `ended` or `lost`."""
        names = {None: "running", 0: "ended"}
        obeyed = 128 + signal.SIGTERM
        return {
            c.service.name: "ended" if c.asked_to_end and c.code == obeyed else names.get(c.code, "lost")
            for c in self.children
        }

    def check(self) -> Failure | None:
        """The failure that ends the run, if there was one since the last look."""
        for child in self.children:
            if child.code in (None, 0) or child.service.name in self._reported:
                continue
            self._reported.add(child.service.name)
            failure = child.failure()
            peers = [c for c in self.children if c.service.role == child.service.role and c is not child]
            if not any(c.code in (None, 0) for c in peers):
                return failure
            self.lost.append(failure)
        return None

    def stop(self, tick: Callable[[], None]) -> list[str]:
        """End all services, role after role: SIGTERM, the role's deadline, then no more asking.

        Args:
            tick: Called while waiting, so that the screen stays alive.

        Returns:
            Names of those that had to be killed.
        """
        killed: list[str] = []
        for role, deadline_s in self.deadlines.items():
            children = [c for c in self.running if c.service.role == role]
            for child in children:
                child.terminate()
            until = time.monotonic() + deadline_s
            while any(c.code is None for c in children):
                if time.monotonic() > until:
                    killed += [c.service.name for c in children if c.code is None]
                    for child in children:
                        child.kill()
                    until = float("inf")
                tick()
                time.sleep(POLL_S)
        return killed

    def _on_signal(self, _number: int, _frame: object) -> None:
        """The first asks for a clean stop, which the owner's loop does; the second ends everything now."""
        self.interrupts += 1
        if self.interrupts > 1:
            self._kill_all()

    def _kill_all(self) -> None:
        for child in self.children:
            child.kill()


def last_lines(log: Path, offset: int = 0, count: int = 15) -> list[str]:
    """The end of a log, written after `offset` bytes, without what torchrun says of itself."""
    return [_cut(line) for line in _own_lines(log, offset)][-count:]


def last_error(log: Path, offset: int = 0) -> str | None:
    """The last exception that a log names, written after `offset` bytes; None without one."""
    found = named_error(_own_lines(log, offset))
    return None if found is None else _cut(found)


def _own_lines(log: Path, offset: int) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - LOOKED_AT_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip() and not TORCHRUN_NOISE.match(line)]


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}… ({len(line)} characters)"
