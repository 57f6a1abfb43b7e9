"""How rollout servers and the learner reach the buffer: the transport seam, and its ZeroMQ side.

`RolloutBuffer` and `LearnerBuffer` say what the two need; `BufferClient` speaks to the service over ZeroMQ,
and `buffer/memory.py` has the same over a store in this process.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from buffer import groups, wire
from buffer.errors import BadMessage, BufferUnreachable, Refusal
from buffer.errors import BatchForgotten as BatchForgotten
from buffer.errors import DataExhausted as DataExhausted
from buffer.errors import RunFinished as RunFinished
from buffer.fields import flag, integer, mapping, texts
from buffer.records import Batch, Group, Lease
from buffer.wire import Request

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""A long poll is asked for in pieces this long."""
RESEND_S = 5.0
"""Unanswered for this long, a request is sent again; each further time twice as long."""
LONGEST_RESEND_S = 30.0
GRACE_S = 2.0
"""A poll's answer may come this much after its time is over."""


class RolloutBuffer(Protocol):
    """What a rollout server needs of the buffer."""

    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]: ...
    async def renew(self, lease_ids: Sequence[str]) -> set[str]: ...
    async def deliver(self, group: Group) -> bool: ...
    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> None: ...


class LearnerBuffer(Protocol):
    """What the learner needs of the buffer; `ObservedBuffer` tells it the frontier."""

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None: ...
    async def published(self, version: int) -> None: ...
    async def committed(self, index: int) -> None: ...
    async def finished(self, version: int) -> None: ...


class ObservedBuffer(Protocol):
    async def status(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class _Pending:
    message: list[groups.Frame]
    answer: "asyncio.Future[tuple[dict[str, Any], list[memoryview]]]"


class BufferClient:
    """One connection to the buffer, for one role. Calls may run side by side; all of one event loop.

    Every request is repeated, under the same id, until it is answered or its own deadline is over, and at
    once when the connection comes back: a buffer that was killed and restarted costs time only. All calls
    raise `BufferUnreachable` after `deadline_s` without an answer; the polls (`lease`, `batch`) instead come
    back empty at their own timeout, as long as the buffer has been heard within `deadline_s`.
    """

    def __init__(
        self,
        address: str,
        role: Literal["rollout", "learner", "observer"],
        run_id: str,
        name: str,
        deadline_s: float = 600.0,
    ) -> None:
        self.address = address
        self._role = role
        self._run_id = run_id
        self._name = name
        self._deadline_s = deadline_s
        self._pending: dict[str, _Pending] = {}
        self._abandoned: list[tuple[int, str]] = []
        self._max_message_bytes: int | None = None
        self._heard = time.monotonic()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self.address)
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._resend_on_reconnect())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    # Rollout

    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]:
        """Prompts to work on, at most `max_groups`; [] when none can be granted within `timeout_s`.

        With 0 groups it only waits for the end of the run.

        Raises:
            RunFinished: The run is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # An earlier call whose answer never came may have been granted something: asking again under its
            # id brings that, instead of leaving it to run out.
            request_id = self._adopt(max_groups) or _new_id()
            wait_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            fields = {"max_groups": max_groups, "wait_s": wait_s}
            answer = await self._poll("lease", fields, request_id, deadline)
            if answer is None:
                self._abandoned.append((max_groups, request_id))
                return []
            leases = wire.decode_leases(answer[0])
            if leases or time.monotonic() >= deadline:
                return leases

    def _adopt(self, max_groups: int) -> str | None:
        """An abandoned request that asked for no more than that."""
        for entry in self._abandoned:
            if entry[0] <= max_groups:
                self._abandoned.remove(entry)
                return entry[1]
        return None

    async def renew(self, lease_ids: Sequence[str]) -> set[str]:
        """Keep leases alive; returns those that are not ours any more, whose work is to be cancelled."""
        reply, _ = await self._call("renew", {"lease_ids": list(lease_ids)})
        return set(texts(reply, "lost"))

    async def deliver(self, group: Group) -> bool:
        """Hand a group over; True once it is on disk, False if it is not needed: a duplicate, or done by
        others.

        Raises:
            BadMessage: The group breaks the schema; the text names the field.
        """
        meta, arrays = groups.encode_group(group)
        if self._max_message_bytes is None:
            hello, _ = await self._call("hello", {})
            self._max_message_bytes = integer(hello, "max_message_bytes", high=1 << 62)
        size = max(len(meta), arrays.nbytes)
        if size > self._max_message_bytes:
            raise BadMessage(
                f"group {group.group_id}: {size} bytes; buffer.max_message_mib allows "
                f"{self._max_message_bytes}"
            )
        reply, _ = await self._call("deliver", {}, [meta, arrays])
        return flag(reply, "stored")

    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> None:
        """Return a lease whose group failed; `reason` is counted, `requeue` puts the prompt back."""
        await self._call("give_up", {"lease_id": lease_id, "reason": reason, "requeue": requeue})

    # Learner

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None:
        """One rank's shard of batch `index`; None when it is not ready within `timeout_s`.

        Raises:
            DataExhausted: No full batch can ever come.
            BatchForgotten: A checkpoint with its effect was confirmed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            fields = {"index": index, "dp_rank": dp_rank, "dp_size": dp_size, "wait_s": wait_s}
            answer = await self._poll("batch", fields, _new_id(), deadline)
            if answer is not None and flag(answer[0], "ready"):
                return _batch(*answer)
            if time.monotonic() >= deadline:
                return None

    async def published(self, version: int) -> None:
        """Every live server holds `version`."""
        await self._call("published", {"version": version})

    async def committed(self, index: int) -> None:
        """A checkpoint holding the effect of every batch below `index` is on disk."""
        await self._call("committed", {"index": index})

    async def finished(self, version: int) -> None:
        """The last step was made and its version published."""
        await self._call("finished", {"version": version})

    async def status(self) -> dict[str, Any]:
        """The buffer's numbers."""
        reply, _ = await self._call("status", {})
        return mapping(reply, "status")

    # Requests

    async def _poll(
        self, verb: str, fields: dict[str, Any], request_id: str, deadline: float
    ) -> tuple[dict[str, Any], list[memoryview]] | None:
        """A request that may go unanswered until its deadline: None then."""
        try:
            until = deadline + GRACE_S
            return await self._call(
                verb, fields, request_id=request_id, deadline=until, wait_s=fields["wait_s"]
            )
        except BufferUnreachable:
            if time.monotonic() - self._heard > self._deadline_s:
                raise
            return None

    async def _call(
        self,
        verb: str,
        fields: dict[str, Any],
        frames: Sequence[groups.Frame] = (),
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        wait_s: float = 0.0,
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Send until answered. Raises what the buffer refused with, or `BufferUnreachable`."""
        request = Request(request_id or _new_id(), self._role, self._name, self._run_id, verb, fields)
        pending = _Pending(
            [wire.encode_request(request), *frames], asyncio.get_running_loop().create_future()
        )
        self._pending[request.request_id] = pending
        started = time.monotonic()
        until = started + self._deadline_s if deadline is None else deadline
        pause = max(RESEND_S, wait_s + GRACE_S)
        try:
            while True:
                await self._send(pending)
                left = until - time.monotonic()
                done, _ = await asyncio.wait([pending.answer], timeout=min(pause, left))
                if done:
                    reply, arrays = pending.answer.result()
                    wire.raise_if_refused(reply)
                    return reply, arrays
                waited = time.monotonic() - started
                if left <= pause:
                    raise BufferUnreachable(
                        f"buffer at {self.address}: no answer to {verb} within {waited:.0f} s"
                    )
                logger.warning("waiting for buffer at %s (%s, %.0f s)", self.address, verb, waited)
                pause = min(2 * pause, LONGEST_RESEND_S)
        finally:
            del self._pending[request.request_id]

    async def _send(self, pending: _Pending) -> None:
        await self._socket.send_multipart(pending.message, copy=False)

    async def _receive(self) -> None:
        """Consumes answers; hands each to its request. An answer that nobody waits for any more is
        dropped."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._heard = time.monotonic()
            try:
                request_id, reply = wire.decode_reply(frames[0].buffer)
            except Refusal as refusal:
                # Not even the id can be trusted: everybody hears of it.
                for pending in self._pending.values():
                    if not pending.answer.done():
                        pending.answer.set_exception(refusal)
                continue
            pending = self._pending.get(request_id)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result((reply, [f.buffer for f in frames[1:]]))

    async def _resend_on_reconnect(self) -> None:
        """Waits for handshakes; after each but the first, whatever was under way may be lost and is sent
        again."""
        await recv_monitor_message(self._monitor)
        while True:
            await recv_monitor_message(self._monitor)
            logger.info(
                "connected to buffer at %s again, %d requests repeated", self.address, len(self._pending)
            )
            for pending in list(self._pending.values()):
                await self._send(pending)


def _batch(reply: dict[str, Any], frames: list[memoryview]) -> Batch:
    taken = tuple(
        groups.decode_group(meta, arrays) for meta, arrays in zip(frames[::2], frames[1::2], strict=True)
    )
    if len(taken) != integer(reply, "groups"):
        raise BadMessage(f"groups: expected {reply['groups']}, got {len(taken)}")
    shares = mapping(reply, "shares")
    return Batch(integer(reply, "index"), taken, {name: integer(shares, name) for name in shares})


def _new_id() -> str:
    return uuid.uuid4().hex
