"""One connection to a service that answers requests: each is repeated, under its id, until it is answered."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from buffer.errors import Refusal, Unreachable
from buffer.groups import Frame
from buffer.keys import ClientKeys

logger = logging.getLogger(__name__)

TELL_S = 5.0
"""Unanswered for this long, a request is worth a line in the log; each further time twice as long. One that
may well take longer is not, as long as there is a connection."""
LONGEST_TELL_S = 30.0
RESEND_S = 60.0
"""Unanswered for this long, a request is sent again; each further time twice as long. So late, because what a
broken connection lost goes out again as soon as there is a new one, and one that holds loses nothing, while a
large request, or its answer, may well be on a slow line."""

HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
EVENTS = HANDSHAKES | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

Answer = tuple[dict[str, Any], list[memoryview]]
"""A reply's fields and the raw frames behind it."""


@dataclass(slots=True)
class _Pending:
    message: Sequence[Frame]
    answer: "asyncio.Future[Answer]"
    sent: bool = False


class Requester:
    """A DEALER socket; calls may run side by side, all of one event loop.

    Every request must be safe to repeat. It goes out again at once when the connection comes back, and when
    its answer is very late: a service that was killed and restarted costs time only.

    Args:
        peer: What the other side is called, for messages.
        address: Where it listens.
        decode: The request's id and the reply's fields, from a reply's header; raises `Refusal` when not even
            the id can be trusted.
        logger: Of the caller, in whose name waiting is told.
        keys: Shown to the other side, and those by which it is known; None where it needs none.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        decode: Callable[[Frame], tuple[str, dict[str, Any]]],
        logger: logging.Logger = logger,
        keys: ClientKeys | None = None,
    ) -> None:
        self._address = address
        self._keys = keys
        self.heard = time.monotonic()
        """When the last answer came."""
        self._peer = f"{peer} at {address}"
        self._decode = decode
        self._logger = logger
        self._pending: dict[str, _Pending] = {}
        self._told = -math.inf
        self._silent_since = self._next_word_s = 0.0
        self._turned_away = False
        """Whether the last handshake failed, as it does when keys do not match."""
        self._apart_since: float | None = time.monotonic()
        """Since when there is no connection; None while there is one."""

    async def __aenter__(self) -> Self:
        """
        Raises:
            ValueError: The address is none that can be connected to.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        self._socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.show(self._socket)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._close()
            raise ValueError(f"{self._peer}: cannot be connected to: {error}") from None
        self.heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._follow_connection())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._close()

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    async def ask(
        self,
        request_id: str,
        message: Sequence[Frame],
        what: str,
        deadline: float,
        expected_s: float = 0.0,
    ) -> Answer:
        """Send until answered.

        Args:
            request_id: Stands in the message's header and in the answer's.
            message: Its frames.
            what: The request's name, for messages.
            deadline: When to give up, by `time.monotonic`.
            expected_s: For so long it may well go unanswered by a service that is there.

        Raises:
            Unreachable: No answer by the deadline.
            Refusal: An answer that cannot be read.
        """
        pending = _Pending(message, asyncio.get_running_loop().create_future())
        self._pending[request_id] = pending
        started = time.monotonic()
        tell_at, resend_at = None, started + max(RESEND_S, expected_s)
        try:
            # A connection may break at any moment: it is looked at as often as a word may be due.
            while not await self._answered(pending, min(time.monotonic() + TELL_S / 2, resend_at, deadline)):
                now = time.monotonic()
                waited = now - started
                if now >= deadline:
                    told = f"no answer to {what} within {waited:.0f} s{self._suspicion()}"
                    raise Unreachable(f"{self._peer}: {told}")
                if now >= (self._first_word_at(started, expected_s) if tell_at is None else tell_at):
                    self._tell(what, waited)
                    tell_at = now + min(waited, LONGEST_TELL_S)
                if now >= resend_at:
                    pending.sent = False
                    resend_at = now + waited
            return pending.answer.result()
        finally:
            del self._pending[request_id]

    def _first_word_at(self, started: float, expected_s: float) -> float:
        """When a request is worth a line: one that nobody can be working on, soon."""
        if self._apart_since is None:
            return started + max(TELL_S, expected_s)
        return max(started, self._apart_since) + TELL_S

    def tell_silence(self, what: str, since: float) -> None:
        """Say that a request which may go unanswered came back without an answer at all, and again whenever
        the silence has become twice as long.

        Args:
            since: When it was sent first, by `time.monotonic`.
        """
        if self.heard > self._silent_since:
            self._silent_since, self._next_word_s = since, 0.0
        waited = time.monotonic() - self._silent_since
        if waited >= self._next_word_s:
            self._next_word_s = 2 * waited
            self._tell(what, waited)

    def _tell(self, what: str, waited_s: float) -> None:
        """Say for whom requests wait: once for all that were sent at about the same time."""
        now = time.monotonic()
        if now - self._told >= TELL_S / 2:
            self._told = now
            told = f"({what}, {waited_s:.0f} s){self._suspicion()}"
            self._logger.warning("waiting for %s %s", self._peer, told)

    def _suspicion(self) -> str:
        if not self._turned_away:
            return ""
        return "; it ends every handshake: the keys of the two sides (security.keys) may not match"

    async def _answered(self, pending: _Pending, until: float) -> bool:
        """Send where that is to be done, and wait; while nobody takes what is sent, that may wait too."""
        with suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                if not pending.sent:
                    await self._send(pending)
                    pending.sent = True
                await asyncio.wait([pending.answer])
        return pending.answer.done()

    async def _send(self, pending: _Pending) -> None:
        await self._socket.send_multipart(pending.message, copy=False)

    async def _receive(self) -> None:
        """Consumes answers; hands each to its request. An answer that nobody waits for any more is
        dropped."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self.heard = time.monotonic()
            try:
                request_id, reply = self._decode(frames[0].buffer)
            except Refusal as refusal:
                # Not even the id can be trusted: everybody hears of it.
                for pending in self._pending.values():
                    if not pending.answer.done():
                        pending.answer.set_exception(refusal)
                continue
            pending = self._pending.get(request_id)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result((reply, [f.buffer for f in frames[1:]]))

    async def _follow_connection(self) -> None:
        """Waits for handshakes; after each that succeeds but the first, whatever was under way may be lost
        and is sent again."""
        before = False
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._apart_since = self._apart_since or time.monotonic()
                continue
            if event["event"] == zmq.EVENT_CLOSED:
                # Nobody listens: a handshake that was cut off before came from one who was ending.
                self._turned_away = False
                continue
            self._turned_away = event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._turned_away:
                continue
            self._apart_since = None
            if before:
                count = len(self._pending)
                self._logger.info("connected to %s again, %d requests repeated", self._peer, count)
                for pending in list(self._pending.values()):
                    await self._send(pending)
            before = True


def new_id() -> str:
    return uuid.uuid4().hex
