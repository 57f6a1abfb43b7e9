"""Group commit: one thread owns the store, and one transaction carries everything that arrived during the
last one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from buffer.errors import Refusal
from buffer.store import Store

T = TypeVar("T")
Operation = Callable[[Store], Any]

MAX_OPERATIONS = 256
"""In one transaction: bounds how long the first of them waits for its answer."""


class Commits:
    """Runs operations on the store, each durable when `submit` returns.

    Consumes submitted operations; waits for at least one; unblocked by `submit`.
    """

    def __init__(self, store: Store) -> None:
        self.room = Change()
        """After it a waiting lease may be granted."""
        self.stock = Change()
        """After it a waiting batch may be ready."""
        self.transactions = 0
        self._store = store
        self._queue: asyncio.Queue[tuple[Operation, asyncio.Future[Any]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def submit(self, operation: Callable[[Store], T]) -> T:
        """Its result, once that is on disk.

        Raises:
            Refusal: The store's answer is no.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((operation, future))
        return await future

    async def run(self) -> None:
        """Until cancelled. Any fault but a refusal comes out here and ends the service: nothing of it was
        committed."""
        loop = asyncio.get_running_loop()
        while True:
            taken = [await self._queue.get()]
            while not self._queue.empty() and len(taken) < MAX_OPERATIONS:
                taken.append(self._queue.get_nowait())
            outcomes, room, stock = await loop.run_in_executor(
                self._thread, self._commit, [o for o, _ in taken]
            )
            self.transactions += 1
            for (_, future), outcome in zip(taken, outcomes, strict=True):
                if future.done():  # its asker was cancelled
                    continue
                if isinstance(outcome, Refusal):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            if room:
                self.room.happened()
            if stock:
                self.stock.happened()

    def close(self) -> None:
        """Wait for the transaction in progress, then let the thread go."""
        self._thread.shutdown()

    def _commit(self, operations: list[Operation]) -> tuple[list[Any], bool, bool]:
        store = self._store
        with store.transaction():
            outcomes = [_attempt(store, operation) for operation in operations]
            store.evaluations.write()
        return outcomes, *store.take_changes()


def _attempt(store: Store, operation: Operation) -> Any:
    try:
        return operation(store)
    except Refusal as refusal:
        return refusal


class Change:
    """Something that may happen again and again. Take `next` before you look, then wait for it."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def happened(self) -> None:
        self.next.set()
        self.next = asyncio.Event()


async def happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; whether it came in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
