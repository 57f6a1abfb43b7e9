"""The rollout server's side: joins the learner, and brings every version it publishes into the engine."""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import dataclass

import zmq
import zmq.asyncio

from sync.addresses import host_of
from sync.config import SyncConfig
from sync.errors import EngineLost, JoinRefused, SyncError, TransferFailed
from sync.keys import MemberKeys
from sync.shared_memory import place_of_this_process
from sync.sink import StagePlan, WeightSink
from sync.wire import (
    MAX_MESSAGE_BYTES,
    SCHEMA,
    Abort,
    Beat,
    Dropped,
    Entries,
    Evict,
    Failed,
    Join,
    Leave,
    Loaded,
    Meet,
    Message,
    Prepare,
    Ready,
    Refuse,
    Welcome,
    WireError,
    decode,
    encode,
    member_beat_s,
)  # fmt: skip

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two JOINs."""
LONGEST_RETRY_S = 30.0
"""A server that is turned out again and again, and loads nothing in between, asks less and less often."""
PATIENCE_S = 5.0
"""How long a learner may be absent before that is worth a line in the log; the next after twice the time."""

FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class Update:
    """How the newest version came in, in seconds."""

    version: int
    stage_seconds: float
    load_seconds: float
    pause_seconds: float


class _Rejoin(Exception):
    """This membership is over; another begins."""


class Receiver:
    """One server's membership, for as long as `run` is awaited.

    Consumes the publisher's messages; waits for those; unblocked by any of them or by the next beat. Learner
    restarts and evictions end in another JOIN, after which the learner sends its current version in full.
    """

    def __init__(
        self,
        config: SyncConfig,
        run_id: str,
        name: str,
        sink: WeightSink,
        keys: MemberKeys | None = None,
        counted: Callable[[], dict[str, float]] = dict[str, float],
    ) -> None:
        """Args:
        counted: The server's counters by the names of `wire.COUNTED`, each from its start on.
        """
        self._address = config.address
        self._host = host_of(config.address)
        self._run_id = run_id
        self._name = name
        self._sink = sink
        self._keys = keys
        self._counted = counted
        self._version: int | None = None
        self._first_version = asyncio.Event()
        self._engine = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None
        self._loading = False
        self._awaited: tuple[int, asyncio.Future[Entries]] | None = None
        """The attempt whose ranks wait for the others, and what brings these."""
        self.last_update: Update | None = None
        self._told: set[str] = set()
        """Troubles that are in the log since the last load; the same again is not worth another line."""

    @property
    def version(self) -> int | None:
        """What every rank of this server generates with; None before the first load."""
        return self._version

    async def wait_first_version(self) -> int:
        await self._first_version.wait()
        assert self._version is not None
        return self._version

    async def run(self) -> None:
        """Stay a member until cancelled.

        Raises:
            JoinRefused: The learner is of another run or schema.
            EngineLost: The engine is gone.
        """
        context = zmq.asyncio.Context()
        pause_s = RETRY_S
        try:
            while True:
                before = self.last_update
                try:
                    await self._stay_once(context)
                except (_Rejoin, TransferFailed) as why:  # the latter of an engine that hangs
                    self._tell_once(f"{why}; joining again")
                except zmq.ZMQError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    self._tell_once("out of file handles; joining again")
                fared_well = self.last_update is not before
                pause_s = RETRY_S if fared_well else min(2 * pause_s, LONGEST_RETRY_S)
                await asyncio.sleep(pause_s)
        finally:
            context.destroy(linger=500)

    async def _stay_once(self, context: zmq.asyncio.Context) -> None:
        """One membership, on a connection of its own."""
        with ExitStack() as opened:
            socket = opened.enter_context(closing(self._new_socket(context)))
            handshakes = opened.enter_context(closing(socket.get_monitor_socket(FAILED_HANDSHAKES)))
            opened.callback(socket.disable_monitor)
            socket.connect(self._address)
            try:
                await self._stay(socket, handshakes)
            finally:
                await self._stop_work()

    def _new_socket(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # without a learner nothing is queued up for it
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.show(socket)
        return socket

    async def _stay(self, socket: zmq.asyncio.Socket, handshakes: zmq.asyncio.Socket) -> None:
        timeout_s = await self._join(socket, handshakes)
        socket.disable_monitor()  # nobody would read on
        interval_s = member_beat_s(timeout_s)
        self._beat(socket)  # the learner counts from here on
        heard = beaten = time.monotonic()
        try:
            while True:
                message = await self._next(socket, interval_s)
                now = time.monotonic()
                if message is not None:
                    heard = now
                    self._handle(socket, message)
                elif now - heard > timeout_s:
                    raise _Rejoin(f"the learner has been silent for {timeout_s:g} s")
                if now - beaten >= interval_s:
                    beaten = now
                    self._beat(socket)
                if self._work is not None and self._work.done() and not self._work.cancelled():
                    self._work.result()  # EngineLost ends the server
        except (asyncio.CancelledError, EngineLost):
            self._beat(socket)
            _send(socket, Leave())
            raise

    def _beat(self, socket: zmq.asyncio.Socket) -> None:
        _send(socket, Beat(self._counted()))

    async def _join(self, socket: zmq.asyncio.Socket, handshakes: zmq.asyncio.Socket) -> float:
        """Become a member; returns the learner's heartbeat timeout."""
        async with self._engine:
            await self._sink.drop()
        told, silent_s = time.monotonic(), PATIENCE_S
        turned_away = 0
        join = Join(SCHEMA, self._run_id, self._name, self._sink.world_size, place_of_this_process())
        while True:
            _send(socket, join)
            message = await self._next(socket, RETRY_S)
            match message:
                case Welcome():
                    logger.info("sync: joined the learner at %s, whose version comes next", self._address)
                    return message.heartbeat_timeout_s
                case Evict():
                    raise _Rejoin(f"not taken: {message.reason}")
                case Refuse():
                    raise JoinRefused(
                        f"the learner at {self._address} refused {self._name}: {message.reason}"
                    )
                case _:
                    pass
            while await handshakes.poll(0):
                await handshakes.recv_multipart()
                turned_away += 1
            if time.monotonic() - told > silent_s:
                told, silent_s = time.monotonic(), 2 * silent_s
                self._tell_waiting(turned_away)
                turned_away = 0

    def _tell_waiting(self, turned_away: int) -> None:
        """Once for a learner that is not there; again and again for one that will have nothing of us."""
        if turned_away:
            logger.warning(
                "waiting for learner at %s; it ended %d handshakes: the keys of the two sides "
                "(security.keys) may not match", self._address, turned_away,
            )  # fmt: skip
        elif "waiting" not in self._told:
            self._told.add("waiting")
            logger.info("waiting for learner at %s", self._address)

    async def _next(self, socket: zmq.asyncio.Socket, timeout_s: float) -> Message | None:
        if not await socket.poll(int(timeout_s * 1000)):
            return None
        raw = await socket.recv()
        try:
            return decode(raw)
        except WireError as error:
            raise JoinRefused(f"the learner at {self._address} speaks otherwise: {error}") from None

    def _handle(self, socket: zmq.asyncio.Socket, message: Message) -> None:
        match message:
            case Prepare():
                self._begin(self._update(socket, message))
            case Meet():
                self._meet(message)
            case Abort():
                logger.warning("sync: attempt %d aborted: %s", message.attempt, message.reason)
                self._begin(self._drop(socket, message.attempt))
            case Evict():
                raise _Rejoin(f"evicted: {message.reason}")
            case Refuse():
                raise JoinRefused(f"the learner at {self._address}: {message.reason}")
            case _:
                pass

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        """Start work on the engine. What is being staged gives way; what is being loaded ends first."""
        if self._work is not None and not self._loading:
            self._work.cancel()
        self._work = asyncio.create_task(work)

    async def _stop_work(self) -> None:
        if self._work is None:
            return
        if not self._loading:
            self._work.cancel()
        await asyncio.wait([self._work])
        self._work = None

    def _meet(self, message: Meet) -> None:
        attempt, entries = self._awaited or (None, None)
        if entries is None or entries.done() or attempt != message.attempt:
            logger.warning("sync: refused MEET of attempt %d: nobody here waits for it", message.attempt)
            return
        entries.set_result(message.entries)

    async def _accepted(self, socket: zmq.asyncio.Socket, order: Prepare, left: Entries) -> Entries:
        """As `StagePlan.accepted`."""
        entries: asyncio.Future[Entries] = asyncio.get_running_loop().create_future()
        if not order.fresh:
            entries.set_result({})
        self._awaited = order.attempt, entries
        _send(socket, Ready(order.attempt, left))
        try:
            # After the learner's own deadline for the others, which it ends with ABORT.
            async with asyncio.timeout(2 * order.timeout_s):
                return await entries
        except TimeoutError:
            raise TransferFailed(f"epoch {order.epoch}: the other ranks were not heard of") from None

    async def _drop(self, socket: zmq.asyncio.Socket, attempt: int) -> None:
        async with self._engine:
            await self._sink.drop()
        _send(socket, Dropped(attempt))

    async def _update(self, socket: zmq.asyncio.Socket, order: Prepare) -> None:
        plan = StagePlan(
            order.version, order.epoch, order.nonce, order.fresh, self._host, order.first_rank,
            order.group_size, order.backend, order.memory, order.timeout_s, order.manifest,
            lambda left: self._accepted(socket, order, left),
        )  # fmt: skip
        async with self._engine:
            try:
                await self._stage_and_load(socket, order.attempt, plan)
            except EngineLost:
                raise
            except SyncError as error:
                self._tell_once(f"a version could not be taken: {error}")
                _send(socket, Failed(order.attempt, error.cause, str(error)))
            finally:
                self._loading = False

    async def _stage_and_load(self, socket: zmq.asyncio.Socket, attempt: int, plan: StagePlan) -> None:
        started = time.monotonic()
        checksum = await self._sink.stage(plan)
        staged = time.monotonic()
        self._loading = True
        pause_seconds = await self._sink.load(plan.version, lambda: self._generates_with(plan.version))
        loaded = time.monotonic()
        self._told.clear()
        self._first_version.set()
        self.last_update = Update(plan.version, staged - started, loaded - staged, pause_seconds)
        logger.info(
            "sync: version %d: staged in %.2f s, loaded in %.2f s, paused for %.2f s",
            plan.version, staged - started, loaded - staged, pause_seconds,
        )  # fmt: skip
        _send(
            socket,
            Loaded(attempt, plan.version, checksum, staged - started, loaded - staged, pause_seconds),
        )

    def _generates_with(self, version: int) -> None:
        self._version = version

    def _tell_once(self, trouble: str) -> None:
        logger.log(logging.DEBUG if trouble in self._told else logging.WARNING, "sync: %s", trouble)
        self._told.add(trouble)


def _send(socket: zmq.asyncio.Socket, message: Message) -> None:
    """Send or let it be: with no learner on the line there is nobody to tell, and JOIN comes again."""
    if socket.closed:
        return
    try:
        zmq.Socket.shadow(socket.underlying).send(encode(message), zmq.NOBLOCK)
    except zmq.Again:
        logger.debug("sync: nobody to send %s to", type(message).__name__)
