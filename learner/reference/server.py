"""The reference's socket: micro-batches in, logprobs out, each request its own task."""

import asyncio
import logging
import queue
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.answering import Answering
from buffer.groups import Frame
from buffer.keys import ServerKeys
from buffer.router import Router
from learner.reference import wire
from learner.reference.wire import Served, Work

logger = logging.getLogger(__name__)

Logprobs = NDArray[np.float32]


@dataclass(slots=True)
class Traffic:
    """What went over the socket since the start."""

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
        self._router = Router("learner.reference.address", address, served.max_message_bytes, keys)
        self._answering = Answering[Logprobs](self._router, wire.ENVELOPE, self._answer, logger)

    async def run(self) -> None:
        """Take requests and send their answers until cancelled; see `Answering.run`."""
        await self._answering.run()

    def close(self) -> None:
        self._router.close()

    async def _answer(self, frames: list[Frame]) -> list[Frame]:
        request = wire.decode_request(frames, self._served)
        work = request.work
        if work is None:
            return [wire.ENVELOPE.reply(request.request_id)]
        found = await self._answering.once(request.request_id, lambda: self._compute(work))
        return wire.encode_logprobs(request.request_id, found)

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
        traffic = {name: getattr(self.traffic, name) for name in Traffic.__slots__}
        return {"requests": self._answering.requests, "bad_messages": self._answering.bad_messages, **traffic}
