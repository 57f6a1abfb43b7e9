"""The broadcast group of one membership epoch: rank 0 sends, every other rank receives.

A process group of its own, built directly and never the default one, so that it shares nothing with the
learner's training groups or the engine's. Its calls block; callers run them on a thread that they can leave.
"""

import errno
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
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sync.errors import OutOfHandles, TransferFailed

logger = logging.getLogger(__name__)


HANDLES = 16
"""More than the files that a group of a few ranks has open: the store's connection, gloo's device, peers."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group: where the store is, which epoch, which rank of how many."""

    host: str
    port: int
    epoch: int
    nonce: str = field(repr=False)
    """Drawn anew for each epoch and told to its members only: without it nobody finds the seats in the
    store."""
    rank: int
    size: int
    backend: str
    timeout_s: float


def listen(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A rendezvous store on a free port of one interface only (by itself TCPStore listens on all of them)."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(256)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


class BroadcastGroup:
    def __init__(self, process_group: Any, seat: Seat) -> None:
        self._process_group = process_group
        self.seat = seat

    @classmethod
    def connect(cls, seat: Seat, device: torch.device) -> Self:
        """Meet the other ranks. Blocks until all are there, at most `seat.timeout_s`.

        Args:
            device: Where the tensors to broadcast will lie; for nccl the GPU of this rank.

        Raises:
            OutOfHandles: This process cannot open the connections; torch would try until the deadline, and
                whoever waits for this rank could not tell whose fault it was.
            TransferFailed: Not everybody came in time.
        """
        if short_of_handles():
            raise OutOfHandles(
                f"epoch {seat.epoch}: rank {seat.rank}: fewer than {HANDLES} file handles left"
            )
        timeout = timedelta(seconds=seat.timeout_s)
        try:
            # A connection for each group, for rank 0 too: calls on one wait for each other, so that a group
            # that never forms would keep the next one from forming.
            store = TCPStore(seat.host, seat.port, is_master=False, timeout=timeout)
            scoped = PrefixStore(f"slipstream/{seat.nonce}", store)
            if seat.backend == "nccl":
                return cls(_nccl(scoped, seat, device), seat)
            return cls(_gloo(scoped, seat, timeout), seat)
        except (RuntimeError, OSError, ValueError) as error:  # torch's DistError is a RuntimeError
            told = _first_line(error).replace(seat.nonce, "…")  # torch names the keys that it waits for
            raise TransferFailed(f"epoch {seat.epoch}: rank {seat.rank}: {told}") from None

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
        self._build = lambda: BroadcastGroup.connect(seat, device)
        self._notify = notify
        self._group: BroadcastGroup | None = None
        self._failure: TransferFailed | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="slipstream-connect")
        self.thread.start()

    def settled(self) -> bool:
        return self._group is not None or self._failure is not None

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


def _gloo(store: Store, seat: Seat, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    # The interface that reaches the store, rather than whatever this machine's name resolves to.
    # Connections are made when they are first used: a broadcast needs as many as there are ranks, where all
    # to all would be their square, and each of them an open file.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(seat), lazy_init=True)]
    group: Any = dist.ProcessGroupGloo(store, seat.rank, seat.size, options)
    group.barrier().wait()  # who never comes is to be known now, and not in the middle of a transfer
    return group


def _nccl(store: Store, seat: Seat, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Our own deadline must come first: nccl's watchdog would take the whole process down.
    options._timeout = timedelta(seconds=10 * seat.timeout_s + 600)
    group = dist.ProcessGroupNCCL(store, seat.rank, seat.size, options)
    group.eager_connect_single_device(device)
    return group


def _own_address(seat: Seat) -> str:
    family, _, _, _, target = socket.getaddrinfo(seat.host, seat.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket's connect sends nothing
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
