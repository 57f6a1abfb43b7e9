"""Sending a version's buckets on a thread that the learner can leave. Two buckets in flight, no more."""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from sync.errors import TransferFailed
from sync.group import BroadcastGroup
from sync.shared_memory import SharedStream
from sync.stager import make_seal

NUM_BUFFERS = 2


class BucketMemory:
    """The bucket buffers: kept between publishes, because fresh pages cost more than the copy into them."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes = bucket_bytes
        self.device = device
        self._buffers: list[Tensor] = []

    def take(self) -> list[Tensor]:
        """Every buffer; who took them gives them back, or loses them to a stuck collective."""
        buffers, self._buffers = self._buffers, []
        while len(buffers) < NUM_BUFFERS:
            buffers.append(torch.zeros(self.bucket_bytes, dtype=torch.uint8, device=self.device))
        return buffers

    def give_back(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def outgoing(self, bucket: Tensor) -> Tensor:
        """What is broadcast of a bucket: all of it."""
        return bucket


class BucketSender:
    """One transfer over one group.

    The caller's thread fills a buffer from `lend` and hands it to `send`; the sender's thread broadcasts it.
    `lend` and `finish` wait at most `timeout_s` for each bucket, and give up as soon as `broken` says why.
    """

    def __init__(
        self,
        group: BroadcastGroup,
        memory: BucketMemory | SharedStream,
        timeout_s: float,
        changed: threading.Condition,
        broken: Callable[[], str | None],
    ) -> None:
        self._group = group
        self._memory = memory
        self._timeout_s = timeout_s
        self._changed = changed
        self._broken = broken
        self._buffers = memory.take()
        self._free = deque(self._buffers)
        self._queue: SimpleQueue[Tensor | None] = SimpleQueue()
        self._owner: dict[int, Tensor] = {}
        self._failure: TransferFailed | None = None
        self._done = False
        self.sums: list[int] = []
        self.sent_bytes = 0
        self.thread = threading.Thread(target=self._run, daemon=True, name="slipstream-send")

    def start(self, version: int) -> None:
        self._version = version
        self.thread.start()

    def lend(self, size_bytes: int) -> Tensor:
        """A free buffer's first bytes; blocks until the sender is done with one.

        Raises:
            TransferFailed: The group broke, or no bucket got through within the deadline.
        """
        self._wait(lambda: bool(self._free))
        buffer = self._free.popleft()
        bucket = buffer[:size_bytes]
        self._owner[bucket.data_ptr()] = buffer
        return bucket

    def send(self, bucket: Tensor, checksum: int) -> None:
        self.sums.append(checksum)
        self._queue.put(bucket)

    def finish(self) -> None:
        """Wait until everything is sent, sealed with the checksums. Raises as `lend`."""
        self._queue.put(None)
        self._wait(lambda: self._done)
        self._memory.give_back(self._buffers)

    def cancel(self) -> None:
        """Send no more; what is being sent ends at the group's timeout, and keeps its buffers till then."""
        self._failure = self._failure or TransferFailed("cancelled")
        self._queue.put(None)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        sent = self.sent_bytes
        with self._changed:
            while not done():
                if self._failure is not None:
                    raise self._failure
                why = self._broken()
                if why is not None:
                    raise TransferFailed(why)
                if self.sent_bytes != sent:  # the deadline is of each bucket
                    sent, deadline = self.sent_bytes, time.monotonic() + self._timeout_s
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransferFailed(f"no bucket got through within {self._timeout_s:g} s")

    def _run(self) -> None:
        try:
            while (bucket := self._queue.get()) is not None and self._failure is None:
                self._group.broadcast(self._memory.outgoing(bucket))
                with self._changed:
                    self.sent_bytes += bucket.numel()
                    self._free.append(self._owner.pop(bucket.data_ptr()))
                    self._changed.notify_all()
            if self._failure is None:
                self._group.broadcast(make_seal(self._version, self.sums, self._memory.device))
                self._done = True
        except TransferFailed as error:
            self._failure = error
        with self._changed:
            self._changed.notify_all()
