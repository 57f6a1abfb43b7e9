"""An asyncio client of a service, for threads that know no event loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How often one who waits looks whether the job is to stop."""
STOPPING_S = 5.0
"""How long a job that is to stop still waits for an answer."""

C = TypeVar("C")
T = TypeVar("T")


class Line(Generic[C]):
    """A client on a thread of its own; calls from any thread. A context manager."""

    def __init__(self, connect: Callable[[], Any], stopping: Callable[[], bool] = lambda: False) -> None:
        """Args:
        connect: Makes the client, an async context manager, on the line's thread.
        stopping: Whether the job is to stop; asked from any thread.
        """
        self._connect = connect
        self._stopping = stopping
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="line", daemon=True)
        self._client: Any = None
        self._asked: set[Future[Any]] = set()
        """Not answered yet."""

    def __enter__(self) -> "Line[C]":
        self._thread.start()
        self._client = self._submit(self._open()).result()
        return self

    def __exit__(self, *_: object) -> None:
        for question in list(self._asked):
            question.cancel()
        self._submit(self._client.__aexit__(None, None, None)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> Any:
        return await self._connect().__aenter__()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, question: Callable[[C], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Start a question; its answer or its error comes with the future."""
        asked = self._submit(question(self._client))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return asked

    def telling(self, what: str, question: Callable[[C], Coroutine[Any, Any, T]]) -> "Telling[T]":
        """Start a question that a job which is to stop does not wait for."""
        return Telling(what, self.ask(question), self._stopping)

    def tell(self, what: str, question: Callable[[C], Coroutine[Any, Any, T]]) -> T | None:
        """Ask, and wait for the answer; None when the job is to stop and none comes."""
        telling = self.telling(what, question)
        while not telling.over_within(TICK_S):
            pass
        return telling.answer()


class Telling(Generic[T]):
    """A question whose answer is waited for, but for `STOPPING_S` only when the job is to stop: so a buffer
    that is gone does not keep the job from its checkpoint. Whoever resumes tells it again."""

    def __init__(self, what: str, asked: "Future[T]", stopping: Callable[[], bool]) -> None:
        self._what = what
        self._asked = asked
        self._stopping = stopping
        self._stopping_since: float | None = None

    def over_within(self, timeout_s: float) -> bool:
        """Whether the answer is there, or given up."""
        if done_within(self._asked, timeout_s):
            return True
        if not self._stopping():
            return False
        self._stopping_since = self._stopping_since or time.monotonic()
        if time.monotonic() - self._stopping_since <= STOPPING_S:
            return False
        self._asked.cancel()
        logger.warning("no answer (%s): stopping without it", self._what)
        return True

    def answer(self) -> T | None:
        """Once it is over; None when it was given up."""
        return None if self._asked.cancelled() else self._asked.result()


def done_within(future: "Future[Any]", timeout_s: float) -> bool:
    return bool(wait([future], timeout_s).done)
