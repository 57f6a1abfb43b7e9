"""The publisher's ear: a thread that owns the ROUTER socket and keeps the membership.

Consumes members' messages; waits for a message, a wake-up or the next beat; unblocked by any of them. Evicts
members that fall silent. Everything shared is guarded by `changed`, a condition that is notified whenever
something did.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

import zmq

from sync.addresses import numeric
from sync.errors import TransferFailed
from sync.keys import GATE, PublisherKeys
from sync.membership import LEFT, Member, Membership
from sync.tally import Tally
from sync.wire import (
    SCHEMA,
    Beat,
    Dropped,
    Evict,
    Failed,
    Join,
    Leave,
    Loaded,
    Message,
    Ready,
    Refuse,
    Welcome,
    WireError,
    decode,
    encode,
    member_beat_s,
    one_line,
)  # fmt: skip

logger = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 5
"""Beats sent within one heartbeat timeout, so that a few lost ones do not matter."""
LONGEST_MESSAGE_BYTES = 1 << 16
"""Of a member; one that sends more is cut off."""
TELL_S = 10.0
"""Between two lines about peers that were turned away."""
SILENT_BEATS = 3
"""A member not heard for so many of its beats may be gone: another of its name takes its place."""


class Control:
    """Membership over ZeroMQ. `members`, what hangs on it, and `tally` are touched under `changed` only.

    Behind keys it hears only those whom they admit.
    """

    def __init__(
        self, address: str, run_id: str, heartbeat_timeout_s: float, keys: PublisherKeys | None = None
    ) -> None:
        self._address = address
        self._keys = keys
        self._refused, self._refusal_told = 0, -math.inf
        self._run_id = run_id
        self._timeout_s = heartbeat_timeout_s
        self._outbox: SimpleQueue[tuple[bytes, Message]] = SimpleQueue()
        self._wake_lock = threading.Lock()
        self._closing = threading.Event()
        self._fault: Exception | None = None
        """What ended its thread before its time."""
        self.changed = threading.Condition()
        self.members = Membership()
        self.tally = Tally()

    def start(self) -> None:
        """Bind and begin to take members.

        Raises:
            ValueError: The address is taken or not of this machine.
        """
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE_BYTES)
        self._router.setsockopt(zmq.IPV6, 1)
        self._gate = self._context.socket(zmq.REP)
        try:
            if self._keys is not None:
                self._gate.bind(GATE)
                self._keys.guard(self._router)
            self._router.bind(numeric(self._address))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"sync.address {self._address}: cannot listen there: {error}; "
                "stop who listens there, or set another"
            ) from None
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.setsockopt(zmq.RCVHWM, 0)
        self._wake_out.bind("inproc://wake")
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, daemon=True, name="slipstream-control")
        self._thread.start()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self.notify()
        self._thread.join(timeout=5)

    def send(self, members: Iterable[Member], message: Message) -> None:
        for member in members:
            self._outbox.put((member.identity, message))
        self._wake()

    def evict(self, members: Iterable[Member], reason: str) -> None:
        """Take members out and tell them. Call it under `changed`."""
        members = list(members)
        for member in members:
            logger.warning("sync: evicted %s: %s", member.name, reason)
            self.members.evict(member, reason)
        if members and not self.members.all():
            logger.warning("sync: no rollout server is left: the learner waits for one to join")
        self.send(members, Evict(reason))
        self.changed.notify_all()

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `done` (called under `changed`) holds or the time is up; whether it holds.

        Raises:
            TransferFailed: `close` was called: no answer can come any more.
            RuntimeError: As `check`.
        """
        self.check()
        with self.changed:
            found = self.changed.wait_for(lambda: self._closing.is_set() or done(), timeout_s)
            self.check()
            if found and self._closing.is_set():
                raise TransferFailed("the publisher was closed")
            return found

    def check(self) -> None:
        """
        Raises:
            RuntimeError: Its thread came to an end by a fault: nobody is heard any more.
        """
        if self._fault is not None:
            raise RuntimeError(f"the control channel of sync has stopped: {self._fault}") from self._fault

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._wake_in.closed:  # its thread may have seen that it is to end before it is told so
                self._wake_in.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        poller.register(self._gate, zmq.POLLIN)
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        next_beat = time.monotonic()
        try:
            while not self._closing.is_set():
                poller.poll(int(1000 * max(0.0, next_beat - time.monotonic())) + 1)
                self._admit_all()
                self._receive_all()
                self._send_all()
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + interval_s
            self._send_all()
        except Exception as error:  # noqa: BLE001 - whoever waits here, or would publish, raises it
            self._fault = error
            self._closing.set()
            self.notify()
        with self._wake_lock:
            self._wake_in.close()
        self._context.destroy(linger=500)

    def _admit_all(self) -> None:
        while self._keys is not None and self._gate.poll(0):
            question = self._gate.recv_multipart()
            answer = self._keys.verdict(question)
            self._gate.send_multipart(answer)
            if answer[2] == b"200":
                continue
            self._refused += 1
            if time.monotonic() - self._refusal_told > TELL_S:
                self._refusal_told = time.monotonic()
                who = b"".join(question[3:4]).decode(errors="replace")
                logger.warning("sync: %s has no key that is admitted (%d so far)", who, self._refused)

    def _send_all(self) -> None:
        while self._wake_out.poll(0):
            self._wake_out.recv()
        while True:
            try:
                identity, message = self._outbox.get_nowait()
            except Empty:
                return
            self._router.send_multipart([identity, encode(message)])

    def _beat(self) -> None:
        with self.changed:
            silent = self.members.silent(time.monotonic(), self._timeout_s)
            if silent:
                self.evict(silent, f"silent for {self._timeout_s:g} s")
            self.send(self.members.all(), Beat())

    def _receive_all(self) -> None:
        while self._router.poll(0):
            identity, *frames = self._router.recv_multipart()
            try:
                message = decode(frames[-1] if frames else b"")
            except WireError as error:
                logger.warning("sync: refused a message: %s", one_line(error))
                self._outbox.put((identity, Refuse(str(error))))
                continue
            with self.changed:
                self._handle(identity, message)
                self.changed.notify_all()

    def _handle(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Join):
            self._join(identity, message)
            return
        member = self.members.get(identity)
        if member is None:
            if not isinstance(message, Leave):
                self._outbox.put((identity, Evict("not a member of this learner; join again")))
            return
        member.heard_at = time.monotonic()
        match message:
            case Ready():
                refusal = self.members.ready(member, message)
                if refusal is not None:
                    logger.warning("sync: refused of %s: %s", member.name, refusal)
            case Loaded():
                self.members.loaded(member, message)
            case Dropped():
                self.members.dropped(member, message.attempt)
            case Failed():
                reason = self.members.failed(member, message)
                logger.warning("sync: %s failed: %s: %s", member.name, message.cause, message.reason)
                if reason is not None:
                    self.evict([member], reason)
            case Leave():
                logger.info("sync: %s left", member.name)
                self.members.evict(member, LEFT)
                if not self.members.all():
                    logger.info("sync: no rollout server is left")  # as at the end of every run
            case Beat():
                self.tally.hear(member.name, message.counts)
            case _:
                self._outbox.put((identity, Refuse(f"{type(message).__name__} is not for the publisher")))

    def _join(self, identity: bytes, message: Join) -> None:
        if message.run_id != self._run_id:
            reason = f"run_id: {message.run_id!r}: this learner runs {self._run_id!r}"
            logger.warning("sync: refused %s: %s", message.name, reason)
            self._outbox.put((identity, Refuse(reason)))
            return
        known = self.members.get(identity)
        if known is not None and known.name == message.name:  # its WELCOME is on the way
            known.heard_at = time.monotonic()
            return
        now = time.monotonic()
        if self.members.is_active(message.name, now - SILENT_BEATS * member_beat_s(self._timeout_s)):
            # Nor may one of two servers that were given the same name end the other.
            reason = f"a server named {message.name} is a member; give each a name of its own"
            self._outbox.put((identity, Evict(reason)))
            return
        replaced = self.members.join(identity, message.name, message.world_size, now, message.place)
        for member in replaced:
            logger.warning("sync: %s joined again; its former connection is closed", member.name)
        self.send(replaced, Evict("another server of this name joined"))
        self._outbox.put((identity, Welcome(SCHEMA, self._timeout_s)))
        ranks = "1 rank" if message.world_size == 1 else f"{message.world_size} ranks"
        logger.info("sync: %s joined with %s", message.name, ranks)
