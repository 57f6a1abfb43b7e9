"""The socket of a model on ranks of its own: requests in, answers out, each request its own task."""

import asyncio
import logging
import queue
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from buffer.answering import Answering
from buffer.groups import Frame
from buffer.keys import ServerKeys
from buffer.router import Router
from learner.apart import wire
from learner.apart.wire import Answer, Served, Task

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """What went over the socket since the start."""

    micro_batches: int = 0
    """That were answered."""
    tokens: int = 0
    """Laid out in them."""
    in_hand: int = 0
    """Of all that is asked for."""


class ApartServer:
    """Takes requests while `run` runs; whoever computes takes them out of `waiting`.

    Args:
        served: Whom it answers, and for what.
        key: The setting that the address is of, for messages.
        address: Where it listens.
        keys: Its own and those that it admits.

    Raises:
        AddressTaken: Somebody else listens there.
        ValueError: The address is malformed, or reaches beyond this machine without keys.
    """

    def __init__(self, served: Served, key: str, address: str, keys: ServerKeys | None) -> None:
        self.traffic = Traffic()
        self.waiting: queue.SimpleQueue[tuple[Task, Future[Answer]]] = queue.SimpleQueue()
        self._served = served
        self._router = Router(key, address, served.limits.max_message_bytes, keys)
        self._answering = Answering[Answer](self._router, served.kind.envelope, self._answer, logger)

    async def run(self) -> None:
        """Take requests and send their answers until cancelled; see `Answering.run`."""
        await self._answering.run()

    def close(self) -> None:
        self._router.close()

    async def find(self, task: Task) -> Answer:
        """What is answered."""
        return Answer() if task.verb == wire.HELLO else await self.compute(task)

    async def compute(self, task: Task) -> Answer:
        """Have the ranks do it, behind all that they were given before."""
        self.traffic.in_hand += 1
        try:
            answer: Future[Answer] = Future()
            self.waiting.put((task, answer))
            found = await asyncio.wrap_future(answer)
        finally:
            self.traffic.in_hand -= 1
        self.traffic.micro_batches += len(task.works)
        self.traffic.tokens += sum(len(work.token_ids) for work in task.works)
        return found

    def metrics(self) -> dict[str, Any]:
        traffic = {name: getattr(self.traffic, name) for name in Traffic.__slots__}
        return {"requests": self._answering.requests, "bad_messages": self._answering.bad_messages, **traffic}

    async def _answer(self, frames: list[Frame]) -> list[Frame]:
        request = wire.decode_request(frames, self._served)
        found = await self._answering.once(request.request_id, lambda: self.find(request.task))
        return wire.encode_answer(self._served.kind, request.request_id, found)
