"""The broadcast group of one membership epoch: rank 0 sends, every other rank receives.

A process group of its own, built directly and never the default one, so that it shares nothing with the
learner's training groups or the engine's. Its calls block; callers run them on a thread that they can leave.

torch has ranks find each other in a store. Here each rank has one of its own, which no other process
reaches, and what a rank leaves there for the others is brought to them over the control channel.
"""

import errno
import hashlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from sync.door import close_door
from sync.errors import OutOfHandles, TransferFailed
from sync.wire import Entries

logger = logging.getLogger(__name__)


HANDLES = 16
"""More than the files that a group of a few ranks has open: gloo's device, peers."""

LOOK_S = 0.001
"""Between two looks at what a rank that is connecting has left for the others."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group: where the learner is, which epoch, which rank of how many."""

    host: str
    epoch: int
    nonce: str = field(repr=False)
    """Drawn anew for each epoch and told to its members only: by it they know the learner's own broadcast."""
    rank: int
    size: int
    backend: str
    timeout_s: float


class Meeting:
    """A rank's store for one epoch. It lies in this process and listens nowhere.

    Used by two threads: one connects and waits here for what the other ranks left, the other fetches what
    this rank left and brings theirs.
    """

    def __init__(self, seat: Seat) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=seat.timeout_s))
        # With gloo each rank says how it is reached; with nccl rank 0 does, and the others come to it.
        self._left: Entries | None = None if seat.backend == "gloo" or seat.rank == 0 else {}

    def left(self) -> Entries | None:
        """What this rank left for the others; None while that is to come."""
        if self._left is None and (keys := self.store.list_keys()):
            self._left = {key: self.store.get(key) for key in keys}
        return self._left

    def bring(self, entries: Entries) -> None:
        """What every rank left; call it after `left` had an answer. Whoever waits for it here goes on."""
        for key, value in entries.items():
            if key not in (self._left or ()):
                self.store.set(key, value)  # pyright: ignore[reportArgumentType] - torch's stub knows no bytes


class BroadcastGroup:
    def __init__(self, process_group: Any, seat: Seat) -> None:
        self._process_group = process_group
        self.seat = seat

    @classmethod
    def connect(cls, seat: Seat, device: torch.device, meeting: Meeting) -> Self:
        """Meet the other ranks. Blocks until all are there, at most `seat.timeout_s`.

        Args:
            device: Where the tensors to broadcast will lie; for nccl the GPU of this rank.
            meeting: Of this seat. What this rank leaves there somebody brings to the others, and theirs here.

        Raises:
            OutOfHandles: This process cannot open the connections; torch would try until the deadline, and
                whoever waits for this rank could not tell whose fault it was.
            TransferFailed: Not everybody came in time.
        """
        if short_of_handles():
            raise OutOfHandles(
                f"epoch {seat.epoch}: rank {seat.rank}: fewer than {HANDLES} file handles left"
            )
        try:
            connect = _nccl if seat.backend == "nccl" else _gloo
            group = cls(connect(meeting.store, seat, device), seat)
        except (RuntimeError, OSError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise TransferFailed(f"epoch {seat.epoch}: rank {seat.rank}: {_first_line(error)}") from None
        group._know_the_learner(device)
        if seat.backend == "gloo":
            close_door(b"".join((meeting.left() or {}).values()))
        return group

    def _know_the_learner(self, device: torch.device) -> None:
        """Have rank 0 say what only members were told: gloo takes for a rank whoever connects in its name.

        It comes over the connections that the buckets take, and these stay as they are from here on.
        """
        secret = hashlib.sha256(self.seat.nonce.encode()).digest()
        expected = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device)
        said = expected.clone() if self.seat.rank == 0 else torch.zeros_like(expected)
        self.broadcast(said)
        if not torch.equal(said, expected):
            who = f"epoch {self.seat.epoch}: rank {self.seat.rank}"
            raise TransferFailed(f"{who}: somebody else is in the learner's place")

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` (rank 0) or overwrite it (other ranks). Blocks at most the seat's timeout.

        Raises:
            TransferFailed: A peer is gone or silent. The group is of no use any more.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            work = self._process_group.broadcast([tensor], options)
            if self.seat.backend == "nccl":
                self._wait_for_device(work)
            else:
                work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"epoch {self.seat.epoch}: broadcast: {_first_line(error)}") from error

    def _wait_for_device(self, work: Any) -> None:
        """nccl's wait only orders streams and its watchdog ends the process: look, and abort ourselves."""
        seat = self.seat
        deadline = time.monotonic() + seat.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise TransferFailed(f"epoch {seat.epoch}: bucket not through within {seat.timeout_s:g} s")
            time.sleep(0.0005)
        work.wait()

    def abort(self) -> None:
        """Free what a stuck collective holds. gloo has no such thing: its call ends at its own timeout."""
        if self.seat.backend == "nccl":
            self._process_group.abort()


def short_of_handles() -> bool:
    """Whether this process may open fewer than HANDLES more files, where the system tells."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return most != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) + HANDLES > most
    except OSError as error:  # the list itself takes a handle; a system without /proc does not tell
        return error.errno in (errno.EMFILE, errno.ENFILE)


class Connecting:
    """A group being built on a thread that can be left behind; `notify` is called when that has an end."""

    def __init__(self, seat: Seat, device: torch.device, notify: Callable[[], None]) -> None:
        self._seat, self._meeting = seat, Meeting(seat)
        self._build = lambda: BroadcastGroup.connect(seat, device, self._meeting)
        self._notify = notify
        self._group: BroadcastGroup | None = None
        self._failure: TransferFailed | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="slipstream-connect")
        self.thread.start()

    def settled(self) -> bool:
        return self._group is not None or self._failure is not None

    def left(self) -> Entries:
        """What this rank leaves for the others, as soon as it has.

        Raises:
            TransferFailed: It cannot connect, or left nothing in time.
        """
        deadline = time.monotonic() + self._seat.timeout_s
        while (left := self._meeting.left()) is None:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise TransferFailed(f"epoch {self._seat.epoch}: rank {self._seat.rank} cannot be reached")
            time.sleep(LOOK_S)
        return left

    def bring(self, entries: Entries) -> None:
        """As `Meeting.bring`."""
        self._meeting.bring(entries)

    def result(self) -> BroadcastGroup:
        """The group. Raises TransferFailed where there is none."""
        if self._failure is not None:
            raise self._failure
        assert self._group is not None, "not settled"
        return self._group

    def _run(self) -> None:
        try:
            self._group = self._build()
        except TransferFailed as error:
            self._failure = error
        self._notify()


def _gloo(store: HashStore, seat: Seat, _: torch.device) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=seat.timeout_s)
    # The interface that reaches the learner, rather than whatever this machine's name resolves to.
    # Connections are made when they are first used: a broadcast needs as many as there are ranks, where all
    # to all would be their square, and each of them an open file.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(seat), lazy_init=True)]
    group: Any = dist.ProcessGroupGloo(store, seat.rank, seat.size, options)
    group.barrier().wait()  # who never comes is to be known now, and not in the middle of a transfer
    return group


def _nccl(store: HashStore, seat: Seat, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Our own deadline must come first: nccl's watchdog would take the whole process down.
    options._timeout = timedelta(seconds=10 * seat.timeout_s + 600)
    group = dist.ProcessGroupNCCL(store, seat.rank, seat.size, options)
    group.eager_connect_single_device(device)
    return group


def _own_address(seat: Seat) -> str:
    # A datagram socket's connect sends nothing, so that any port will do.
    family, _, _, _, target = socket.getaddrinfo(seat.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
