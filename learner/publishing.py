"""New versions out to the rollout servers, and the buffer told once they are loaded.

`sync` moves the bytes; this drives it: global rank 0 publishes what every rank helps to export.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from learner import collectives, convert
from learner.feed import BufferLine
from learner.line import done_within
from sync.buckets import TensorSpec
from sync.errors import PublishInterrupted
from sync.membership import LEFT
from sync.publisher import PublishReport

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How often ranks that wait for a server are told that the wait goes on."""


class WeightSender(Protocol):
    """What is asked of `sync.publisher.Publisher`."""

    def wants_publish(self) -> bool: ...
    def wait_for_members(self, count: int, timeout_s: float) -> bool: ...
    def publish(
        self, version: int, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
    ) -> PublishReport: ...
    def wait_loaded(self) -> PublishReport: ...
    def counted(self) -> dict[str, float]: ...


class NoMembers(TimeoutError):
    """No rollout server joined in time."""


class Publishing:
    """Owns the background wait for LOADED. `await_member`, `publish` and `settle` are collective, the rest
    rank 0's."""

    def __init__(
        self, model: Any, sender: WeightSender | None, line: BufferLine | None, join_timeout_s: float
    ) -> None:
        """Args:
        model: The policy, without the data-parallel wrapper.
        sender: On global rank 0; None elsewhere.
        line: On global rank 0.
        join_timeout_s: How long the first publish waits for the first member.
        """
        self._model = model
        self._sender = sender
        self._line = line
        self._join_timeout_s = join_timeout_s
        # One worker: the sender's methods are never called side by side, and `publish` waits for it first.
        self._background = ThreadPoolExecutor(1, "wait-loaded")
        self._pending: Future[None] | None = None
        self._version: int | None = None
        self.last: PublishReport | None = None
        """Of the newest version that is loaded."""

    def await_member(self, stopping: Callable[[], bool]) -> bool:
        """Wait for the first server, before the first publish; False when the job is to stop instead.

        Consumes: nothing.
        Waits for: a server's JOIN.
        Unblocked by: it, `stopping` (asked on global rank 0), or `sync.join_timeout_s`.

        Raises:
            NoMembers: Nobody came in time.
        """
        if self._sender is not None:
            logger.info("waiting for a rollout server to publish to")
        deadline = time.monotonic() + self._join_timeout_s
        while True:
            there = self._sender is not None and self._sender.wait_for_members(1, TICK_S)
            # The others are told of every tick, so that a long wait never looks like a dead rank 0.
            here, stop, late = collectives.broadcast_numbers([there, stopping(), time.monotonic() > deadline])
            if here or stop:
                return bool(here)
            if late:
                raise NoMembers(
                    f"no rollout server joined within {self._join_timeout_s:g} s (sync.join_timeout_s); "
                    "start one with the same sync.address and name, or give one that still loads more time"
                )

    def publish(self, version: int) -> None:
        """Bring `version` to all servers; returns when its bytes are sent; they load in the background."""
        self.settle()
        while self._interrupted(version):
            logger.warning("version %d goes out again, to the servers that are left", version)
        self._version = version
        if self._sender is not None:
            self._pending = self._background.submit(self._confirm, version)

    def _interrupted(self, version: int) -> bool:
        """One try on all ranks; whether a lost member means another."""
        interrupted = False
        specs = convert.export_specs(self._model)
        tensors = convert.export_hf(self._model)
        if self._sender is not None:
            try:
                self._sender.publish(version, specs, tensors)
            except PublishInterrupted as error:
                logger.warning("publish interrupted: %s", error)
                interrupted = True
        else:
            for _ in tensors:
                pass
        return bool(collectives.broadcast_numbers([interrupted])[0])

    def _confirm(self, version: int) -> None:
        assert self._sender is not None
        assert self._line is not None
        report = self._sender.wait_loaded()
        for name, reason in report.lost:
            if reason != LEFT:
                logger.warning("rollout server %s lost: %s", name, reason)
        self._line.tell(f"version {version} is published", lambda buffer: buffer.published(version))
        self.last = report

    @property
    def is_first(self) -> bool:
        """Whether nothing was published yet."""
        return self._version is None

    def wanted(self) -> bool:
        """Whether a server waits for the newest published version. Never before the first publish."""
        return self._version is not None and self._sender is not None and self._sender.wants_publish()

    def settle(self) -> None:
        """Wait until the last version is loaded and the buffer knows; raises what went wrong there."""
        pending, self._pending = self._pending, None
        collectives.wait_on_first(lambda: pending is None or done_within(pending, TICK_S))
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)
