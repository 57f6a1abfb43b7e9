"""Two network namespaces and the wire between them, which cuts, delays, repeats, reorders and drops frames.

    unshare -rn python faulty_wire.py SEED

The program holds both ends, a tap device in each namespace, and carries every frame from the one to the
other itself. It writes a line of JSON with the paths of the namespaces. Then it takes a line at a time, new
`Faults` as JSON or a question mark, and answers each with what it has done to frames so far. `open_wire`
starts it for a test.
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

LEFT, RIGHT = "10.77.0.1", "10.77.0.2"
DEVICE = "wire"
MTU = 9000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
NOT_HERE = 77
"""Exit code where the machine forbids what this needs."""


@dataclass(frozen=True)
class Faults:
    """What happens to a frame, in both directions; shares are of frames, drawn one by one."""

    cut: bool = False
    """Nothing gets through, and nobody is told."""
    cut_behind: tuple[int, int] | None = None
    """Bytes to the right and to the left, from now on, of which the first to be carried cuts it: within a
    publish, or within a delivery."""
    delay_s: float = 0.0
    dropped: float = 0.0
    repeated: float = 0.0
    """Share that arrives twice."""
    late: float = 0.0
    """Share that is overtaken by those behind it."""
    late_s: float = 0.05


def forbidden(error: object) -> None:
    print(f"this machine does not let an ordinary user make network namespaces: {error}", flush=True)
    sys.exit(NOT_HERE)


def make_end(address: str) -> int:
    """A tap device in the namespace where this runs; its handle."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    for command in (
        "link set lo up",
        f"link set {DEVICE} mtu {MTU} up",
        f"addr add {address}/24 dev {DEVICE}",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return handle


class Carrier:
    """Carries frames between two handles; those under way wait in a heap by when they are due."""

    def __init__(self, ends: tuple[int, int], seed: int) -> None:
        self.faults = Faults()
        self.done: Counter[str] = Counter()
        self._left_bytes: dict[int, int] = {}
        """End → what it may still send before the wire is cut."""
        self._ends = ends
        self._other = dict(zip(ends, reversed(ends), strict=True))
        self._random = random.Random(seed)
        self._order = itertools.count()
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def become(self, faults: Faults) -> None:
        self.faults = faults
        self._left_bytes = dict(zip(self._ends, faults.cut_behind or (), strict=False))

    @property
    def is_cut(self) -> bool:
        return self.faults.cut or any(left <= 0 for left in self._left_bytes.values())

    def take(self, end: int) -> None:
        """Read what is there, and decide what becomes of it."""
        while True:
            try:
                frame = os.read(end, MTU + 64)
            except BlockingIOError:
                return
            faults, draw = self.faults, self._random.random
            if self.is_cut or draw() < faults.dropped:
                self.done["cut" if self.is_cut else "dropped"] += 1
                continue
            if end in self._left_bytes:
                self._left_bytes[end] -= len(frame)
            copies = 1 + (draw() < faults.repeated)
            self.done["repeated"] += copies - 1
            for _ in range(copies):
                late = draw() < faults.late
                self.done["late"] += late
                due = time.monotonic() + faults.delay_s + (faults.late_s if late else 0.0)
                heapq.heappush(self._under_way, (due, next(self._order), self._other[end], frame))

    def deliver(self) -> float | None:
        """Hand over what is due; milliseconds until the next is, None without one."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return 1000 * left
            _, _, end, frame = heapq.heappop(self._under_way)
            if self.is_cut:  # also what was in the wire
                self.done["cut"] += 1
                continue
            try:
                os.write(end, frame)
            except BlockingIOError:
                self.done["overrun"] += 1
            self.done["carried"] += 1
        return None


def main() -> None:
    try:
        left_space = os.open("/proc/self/ns/net", os.O_RDONLY)
        left = make_end(LEFT)
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        right = make_end(RIGHT)
    except (OSError, subprocess.CalledProcessError) as error:
        forbidden(error)
        return
    pid = os.getpid()
    told: dict[str, Any] = {"left": f"/proc/{pid}/fd/{left_space}", "right": f"/proc/{pid}/ns/net"}
    print(json.dumps(told | {"user": f"/proc/{pid}/ns/user"}), flush=True)
    carrier = Carrier((left, right), int(sys.argv[1]))
    ready = select.poll()
    for handle in (left, right, sys.stdin.fileno()):
        ready.register(handle, select.POLLIN)
    while True:
        for handle, _ in ready.poll(carrier.deliver()):
            if handle in (left, right):
                carrier.take(handle)
                continue
            order = sys.stdin.readline()
            if not order:
                return
            told = {**carrier.done, "is_cut": carrier.is_cut}
            if order.strip() != "?":
                carrier.become(Faults(**json.loads(order)))
            print(json.dumps(told), flush=True)


class Wire:
    """The program, seen from a test."""

    def __init__(self, process: "subprocess.Popen[str]", spaces: dict[str, str]) -> None:
        self._process = process
        self._spaces = spaces

    def inside(self, side: str) -> list[str]:
        """The start of a command that is to run in the namespace `left` or `right`."""
        return [
            "nsenter",
            f"--user={self._spaces['user']}",
            f"--net={self._spaces[side]}",
            "--preserve-credentials",
        ]

    def is_cut(self) -> bool:
        """Whether it cut itself."""
        return self._ask("?")["is_cut"]

    def become(self, **faults: Any) -> dict[str, int]:
        """Have these faults from now on, and no others; returns what became of frames until now."""
        return self._ask(json.dumps(asdict(Faults(**faults))))

    def _ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def open_wire(seed: int) -> Iterator[Wire | str]:
    """The wire; where the machine forbids it, the reason."""
    command = ["unshare", "-rn", sys.executable, __file__, str(seed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = process.stdout.readline()
        try:
            if first.startswith("{"):
                yield Wire(process, json.loads(first))
            else:
                yield first.strip() or "unshare ended without a word"
        finally:
            process.stdin.close()
            process.wait(10)


if __name__ == "__main__":
    main()
