"""An asyncio client of a service, for threads that know no event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

C = TypeVar("C")
T = TypeVar("T")


class Line(Generic[C]):
    """A client on a thread of its own; calls from any thread. A context manager."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """Args:
        connect: Makes the client, an async context manager, on the line's thread.
        """
        self._connect = connect
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


def done_within(future: "Future[Any]", timeout_s: float) -> bool:
    return bool(wait([future], timeout_s).done)
