"""The buffer's socket: requests in, answers out, each request its own task.

The event loop only moves messages. The store has a thread (`commits.py`); checking groups and reading batches
have one each, so that a thousand waiting polls and a gigabyte on its way out never hold up a renewal.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq

from buffer import assembly, groups, wire
from buffer.bounds import Bounds
from buffer.commits import Change, Commits, happens
from buffer.config import BufferConfig
from buffer.database import read_only
from buffer.errors import BadMessage, Refusal, RunFinished
from buffer.fields import one_line
from buffer.keys import ServerKeys
from buffer.router import Router
from buffer.store import Store
from buffer.wire import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")
Answer = tuple[dict[str, Any], list[bytes]]

TICK_S = 0.5
FAREWELL_S = 3.0
"""How long a finished buffer stays for clients that lost its last answer and ask again."""


@dataclass(slots=True)
class Traffic:
    """What went over the socket since the start."""

    requests: int = 0
    bad_messages: int = 0
    groups_in: int = 0
    groups_out: int = 0
    trajectories_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting_leases: int = 0
    waiting_batches: int = 0
    loop_lag_s: float = 0.0
    """The latest a timer came in the last tick."""


@dataclass(slots=True)
class Peers:
    """Rollout servers by name, and whether the learner has come."""

    seen: dict[str, float] = field(default_factory=dict)
    learner: bool = False
    told: set[str] = field(default_factory=set)
    """That the run is finished."""
    starts: dict[str, str] = field(default_factory=dict)
    """Name → the request by which the server said that it was started: one that comes twice over a bad wire
    must not take back what was lent meanwhile."""

    def note(self, request: Request) -> None:
        """Keep when a server was heard; say who comes for the first time."""
        if request.role == "rollout":
            if request.name not in self.seen:
                logger.info("rollout server %s is here", request.name)
            self.seen[request.name] = time.monotonic()
        elif request.role == "learner" and not self.learner:
            self.learner = True
            logger.info("the learner is here")

    def live(self, patience_s: float) -> list[str]:
        """Servers heard within that time; the others are forgotten: names may be new at every start."""
        silent = [name for name, when in self.seen.items() if time.monotonic() - when >= patience_s]
        for name in silent:
            del self.seen[name]
            self.told.discard(name)
            self.starts.pop(name, None)
        return list(self.seen)


class BufferServer:
    """Serves `store` on `config.address` while `run` runs."""

    def __init__(
        self,
        store: Store,
        path: Path,
        run_id: str,
        config: BufferConfig,
        keys: ServerKeys | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - it is frozen
    ) -> None:
        """Binds. `path` is the store's file, read by a second connection; `bounds` are those of groups.

        Raises:
            AddressTaken: Somebody else listens there.
            ValueError: The address reaches beyond this machine, and there are no keys.
        """
        self.traffic = Traffic()
        self.peers = Peers()
        self._run_id = run_id
        self._config = config
        self._bounds = bounds
        self._commits = Commits(store)
        self._over_since: float | None = None
        self._router = Router("buffer.address", config.address, config.max_message_mib << 20, keys)
        self._connection = read_only(path)
        # SQLite opens its files at the first question; there may be no file handle left for them by then.
        self._connection.execute("SELECT count(*) FROM facts").fetchone()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="checker")

    async def run(self) -> None:
        """Answer until cancelled; a fault of ours, or of the disk, comes out here."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._commits.run())
            tasks.create_task(self._tick())
            tasks.create_task(self._router.admit())
            while True:
                frames = await self._router.socket.recv_multipart(copy=False)
                tasks.create_task(self._serve(frames))

    def close(self) -> None:
        self._commits.close()
        self._reader.shutdown()
        self._checker.shutdown()
        self._connection.close()
        self._router.close()

    async def status(self) -> dict[str, Any]:
        """The store's numbers and the socket's."""
        numbers = await self._commits.submit(Store.status)
        traffic = {name: getattr(self.traffic, name) for name in Traffic.__slots__}
        return {
            **numbers,
            **traffic,
            "transactions": self._commits.transactions,
            "servers": self.peers.live(self._config.lease_timeout_s),
        }

    def may_end(self, over: bool) -> bool:
        """Whether the run is over and every rollout server knows, or has been silent for a lease's time."""
        if not over:
            return False
        self._over_since = self._over_since or time.monotonic()
        waited = time.monotonic() - self._over_since >= FAREWELL_S
        return waited and set(self.peers.live(self._config.lease_timeout_s)) <= self.peers.told

    async def _tick(self) -> None:
        """Consumes time: puts leases that ran out back, and measures how late the loop is."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(min(TICK_S, self._config.lease_timeout_s / 4))
            self.traffic.loop_lag_s = max(0.0, time.monotonic() - before - TICK_S)
            expired = await self._commits.submit(Store.expire)
            if expired:
                logger.warning("%d leases ran out: their prompts go back to the queue", expired)

    async def _serve(self, frames: list[zmq.Frame]) -> None:
        """One request from its frames to its answer; a fault of the sender's becomes an error reply."""
        identity, payload = frames[0], [f.buffer for f in frames[1:]]
        self.traffic.requests += 1
        header = payload[0] if payload else b""
        try:
            request = wire.decode_request(header, self._run_id, self._router.role(frames[-1]))
            fields, out = await self._answer(request, payload[1:])
            reply = wire.ENVELOPE.reply(request.request_id, fields)
        except Refusal as refusal:
            if isinstance(refusal, BadMessage):
                self.traffic.bad_messages += 1
                logger.warning("bad message: %s", one_line(refusal))
            reply, out = wire.ENVELOPE.refusal(wire.ENVELOPE.request_id(header), refusal), []
        self.traffic.bytes_out += sum(map(len, out))
        await self._router.socket.send_multipart([identity.bytes, reply, *out], copy=not out)

    async def _answer(self, request: Request, frames: list[memoryview]) -> Answer:
        self.peers.note(request)
        fields, submit = request.fields, self._commits.submit
        match request.verb:
            case "start":
                await self._start(request)
            case "lease":
                return await self._lease(request), []
            case "renew":
                lost = await submit(lambda store: store.renew(fields["lease_ids"]))
                return {"lost": sorted(lost)}, []
            case "deliver":
                return await self._deliver(frames), []
            case "give_up":
                outcome = await submit(
                    lambda s: s.give_up(fields["lease_id"], fields["reason"], fields["requeue"])
                )
                return wire.encode_given_up(outcome), []
            case "batch":
                return await self._batch(request)
            case "published":
                await submit(lambda store: store.published(fields["version"]))
            case "committed":
                await submit(lambda store: store.committed(fields["index"]))
            case "finished":
                await submit(lambda store: store.finish(fields["version"]))
            case "status":
                return {"status": await self.status()}, []
            case _:
                return {"max_message_bytes": self._config.max_message_mib << 20}, []
        return {}, []

    async def _start(self, request: Request) -> None:
        if self.peers.starts.get(request.name) == request.request_id:
            return
        self.peers.starts[request.name] = request.request_id
        returned = await self._commits.submit(lambda store: store.start(request.name))
        if returned:
            name = request.name
            logger.info("%s was started anew: %d leases of before go back to the queue", name, returned)

    async def _lease(self, request: Request) -> dict[str, Any]:
        count, wait_s = request.fields["max_groups"], request.fields["wait_s"]
        self.traffic.waiting_leases += 1
        try:
            leases = await self._poll(
                self._commits.room, wait_s, lambda store: store.lease(request.name, request.request_id, count)
            )
        except RunFinished:
            self.peers.told.add(request.name)
            raise
        finally:
            self.traffic.waiting_leases -= 1
        return wire.encode_leases(leases)

    async def _deliver(self, frames: list[memoryview]) -> dict[str, Any]:
        if len(frames) != 2:
            raise BadMessage(f"frames: expected meta and arrays behind the header, got {len(frames)} frames")
        # Checked beside the store's thread, which has the disk to wait for.
        loop = asyncio.get_running_loop()
        meta, arrays = frames
        delivery = await loop.run_in_executor(self._checker, self._checked, meta, arrays)
        stored = await self._commits.submit(lambda store: store.deliver(delivery))
        self.traffic.groups_in += stored
        self.traffic.trajectories_in += len(delivery.group.trajectories) if stored else 0
        self.traffic.bytes_in += sum(f.nbytes for f in frames)
        return {"stored": stored}

    def _checked(self, meta: groups.Frame, arrays: groups.Frame) -> groups.Delivery:
        delivery = groups.decode_delivery(meta, arrays)
        self._bounds.check(delivery.group)
        return delivery

    async def _batch(self, request: Request) -> Answer:
        fields = request.fields
        self.traffic.waiting_batches += 1
        try:
            found = await self._poll(
                self._commits.stock, fields["wait_s"], lambda store: store.batch(fields["index"])
            )
        finally:
            self.traffic.waiting_batches -= 1
        if found is None:
            return {"ready": False}, []
        sequences = found.shard(fields["dp_rank"], fields["dp_size"])
        loop = asyncio.get_running_loop()
        frames = await loop.run_in_executor(self._reader, assembly.payloads, self._connection, sequences)
        self.traffic.groups_out += len(sequences)
        return {"ready": True, "index": found.index, "shares": found.shares, "groups": len(sequences)}, frames

    async def _poll(self, change: Change, wait_s: float, attempt: Callable[[Store], T]) -> T:
        """Try, and again after each change, until something came or the time is over; then the empty
        answer."""
        deadline = time.monotonic() + wait_s
        while True:
            event = change.next
            found = await self._commits.submit(attempt)
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            await happens(event, left)
