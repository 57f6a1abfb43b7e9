"""The reference's socket: micro-batches in, logprobs out, each request its own task."""

import asyncio
import logging
import queue
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import BadMessage, Refusal
from buffer.groups import Frame
from buffer.keys import ServerKeys
from buffer.router import Router
from learner.reference import wire
from learner.reference.wire import Request, Served, Work

logger = logging.getLogger(__name__)

Logprobs = NDArray[np.float32]


@dataclass(slots=True)
class Traffic:
    """What went over the socket since the start."""

    requests: int = 0
    bad_messages: int = 0
    micro_batches: int = 0
    """That were answered."""
    tokens: int = 0
    """Laid out in them."""
    in_hand: int = 0


class ReferenceServer:
    """Takes requests while `run` runs; whoever computes takes them out of `waiting`.

    Args:
        served: Whom it answers, and for what.
        address: Where it listens.
        keys: Its own and those that it admits.

    Raises:
        AddressTaken: Somebody else listens there.
        ValueError: The address is malformed, or reaches beyond this machine without keys.
    """

    def __init__(self, served: Served, address: str, keys: ServerKeys | None) -> None:
        self.traffic = Traffic()
        self.waiting: queue.SimpleQueue[tuple[Work, Future[Logprobs]]] = queue.SimpleQueue()
        self._served = served
        self._running: dict[str, asyncio.Task[Logprobs]] = {}
        """By request id: one that is sent again while it is in hand is computed once."""
        self._router = Router("learner.reference.address", address, served.max_message_bytes, keys)

    async def run(self) -> None:
        """Take requests and send their answers until cancelled.

        Consumes: requests. Waits for: the next one. Unblocked by: any peer.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._router.admit())
            while True:
                identity, *frames = await self._router.socket.recv_multipart(copy=False)
                self.traffic.requests += 1
                tasks.create_task(self._serve(identity.bytes, [f.buffer for f in frames]))

    def close(self) -> None:
        self._router.close()

    async def _serve(self, identity: bytes, frames: list[Frame]) -> None:
        """One request from its frames to its answer; a fault of the sender's becomes an error reply."""
        try:
            reply = await self._answer(wire.decode_request(frames, self._served))
        except Refusal as refusal:
            self.traffic.bad_messages += isinstance(refusal, BadMessage)
            logger.warning("%s: %s", refusal.kind.replace("_", " "), refusal)
            reply = [wire.encode_refusal(wire.request_id_of(frames[0] if frames else b""), refusal)]
        await self._router.socket.send_multipart([identity, *reply])

    async def _answer(self, request: Request) -> list[Frame]:
        if request.work is None:
            return [wire.encode_reply(request.request_id)]
        running = self._running.get(request.request_id)
        if running is None:
            running = asyncio.create_task(self._compute(request.work))
            self._running[request.request_id] = running
            running.add_done_callback(lambda _: self._running.pop(request.request_id))
        return wire.encode_logprobs(request.request_id, await running)

    async def _compute(self, work: Work) -> Logprobs:
        self.traffic.in_hand += 1
        try:
            answer: Future[Logprobs] = Future()
            self.waiting.put((work, answer))
            found = await asyncio.wrap_future(answer)
        finally:
            self.traffic.in_hand -= 1
        self.traffic.micro_batches += 1
        self.traffic.tokens += len(work.token_ids)
        return found

    def metrics(self) -> dict[str, Any]:
        return {name: getattr(self.traffic, name) for name in Traffic.__slots__}
