"""What services do that compute an answer to each request by itself: scorer and reference."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, TypeVar

from buffer.envelope import Envelope
from buffer.errors import BadMessage, Refusal
from buffer.fields import one_line
from buffer.groups import Frame
from buffer.router import Router

T = TypeVar("T")


class Answering(Generic[T]):
    """Requests of a socket, each its own task. A fault of the sender's becomes an error reply.

    Args:
        router: The socket.
        envelope: Of its messages.
        answer: The frames of the answer to a request's; a Refusal of it is told to the client.
        logger: Of the service.
    """

    def __init__(
        self,
        router: Router,
        envelope: Envelope,
        answer: Callable[[list[Frame]], Awaitable[list[Frame]]],
        logger: logging.Logger,
    ) -> None:
        self.requests = 0
        self.bad_messages = 0
        self._router = router
        self._envelope = envelope
        self._answer = answer
        self._logger = logger
        self._running: dict[str, asyncio.Task[T]] = {}

    async def run(self) -> None:
        """Answer until cancelled; what is no Refusal comes out here.

        Consumes: requests. Waits for: the next one. Unblocked by: any peer.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._router.admit())
            while True:
                identity, *frames = await self._router.socket.recv_multipart(copy=False)
                self.requests += 1
                tasks.create_task(self._serve(identity.bytes, [f.buffer for f in frames]))

    async def once(self, request_id: str, compute: Callable[[], Coroutine[None, None, T]]) -> T:
        """What `compute` returns; a request that is sent again while it is in hand is not computed again."""
        running = self._running.get(request_id)
        if running is None:
            running = asyncio.create_task(compute())
            self._running[request_id] = running
            running.add_done_callback(lambda _: self._running.pop(request_id))
        return await running

    async def _serve(self, identity: bytes, frames: list[Frame]) -> None:
        try:
            reply = await self._answer(frames)
        except Refusal as refusal:
            self.bad_messages += isinstance(refusal, BadMessage)
            self._logger.warning("%s: %s", refusal.kind.replace("_", " "), one_line(refusal))
            request_id = self._envelope.request_id(frames[0] if frames else b"")
            reply = [self._envelope.refusal(request_id, refusal)]
        await self._router.socket.send_multipart([identity, *reply])
