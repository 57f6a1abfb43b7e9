"""What the value model's ranks are asked, brought into order: every update once, of all the learner's copies.

    values(n) ──▶ waits until n updates are made ──▶ ranks
    train(n) of copy 0, train(n) of copy 1 … ──▶ once all are there ──▶ ranks ──▶ n + 1 are made
    load ──▶ ranks, which then follow that start of the learner, and no other

Requests bear the place that `load` answered with, of which each load makes another, and how many updates they
are behind. A job that was started again has none: each copy hears that it is out of step, and has it load the
learner's last checkpoint, which the first one that comes does for all. Then it sends what the job lacks.
"""

import asyncio
import logging
import secrets
import time
from typing import Any

from buffer.keys import ServerKeys
from learner.apart.server import ApartServer
from learner.apart.wire import HELLO, Answer, Failed, OutOfStep, Served, Task

logger = logging.getLogger(__name__)

PLACE_BITS = 48
"""Of a place, which crosses as a number."""
TELL_S = 30.0
"""Between two lines about copies that an update waits for."""


class ValueServer(ApartServer):
    """As `ApartServer`."""

    def __init__(self, served: Served, key: str, address: str, keys: ServerKeys | None) -> None:
        super().__init__(served, key, address, keys)
        self._session = ""
        """The start of the learner that it follows; none at first."""
        self._place: str | None = None
        """None while nothing is loaded."""
        self._number = 0
        """Updates made, as the session counts them."""
        self._moved = asyncio.Condition()
        """Told when place or number change."""
        self._loading = asyncio.Lock()
        self._parts: dict[int, Task] = {}
        """Of the next update, by copy."""
        self._done: dict[tuple[str, ...], asyncio.Future[Answer]] = {}
        """What changes the model, or writes it: a request whose answer was lost finds it here."""

    async def find(self, task: Task) -> Answer:
        if task.verb == HELLO:
            return Answer()
        if task.verb == "load":
            return await self._load(task)
        self._check_place(task)
        if task.verb == "follow":
            return Answer()
        await self._turn_of(task)
        number = task.numbers["number"]
        if task.verb == "train":
            return await self._train(task, number)
        if number != self._number:
            raise Failed(f"{task.verb} is asked for after {number} updates, and {self._number} are made")
        if task.verb == "values":
            return await self.compute(task)
        found = await self._once((task.verb, *map(str, task.numbers.values())), task)
        if task.verb == "save":
            # Every copy has its answers by now.
            self._done = {key: done for key, done in self._done.items() if key[0] != "train"}
        return found

    def metrics(self) -> dict[str, Any]:
        copies = next(iter(self._parts.values())).numbers["copies"] if self._parts else 0
        return {**super().metrics(), "updates": self._number, "missing_copies": copies - len(self._parts)}

    async def _turn_of(self, task: Task) -> None:
        """Wait until the updates are made that it stands behind.

        Raises:
            OutOfStep: They never will be here.
        """
        async with self._moved:
            await self._moved.wait_for(
                lambda: task.session != self._place or task.numbers["number"] <= self._number
            )
            self._check_place(task)

    def _check_place(self, task: Task) -> None:
        if task.session != self._place:
            raise OutOfStep("this value model was started, or loaded, since the learner's copy was told")

    async def _load(self, task: Task) -> Answer:
        async with self._loading:
            session, number = task.session, task.numbers["number"]
            # One copy may know of a later checkpoint than the one that had it loaded.
            loaded = session != self._session or number > self._number
            if loaded:
                await self._move("", None, 0)
                self._parts.clear()
                self._done.clear()
                await self.compute(task)
                await self._move(session, f"{secrets.randbits(PLACE_BITS)}", number)
            assert self._place is not None
        told = {"number": self._number, "loaded": int(loaded), "place": int(self._place)}
        return Answer(numbers=told)

    async def _move(self, session: str, place: str | None, number: int) -> None:
        async with self._moved:
            self._session, self._place, self._number = session, place, number
            self._moved.notify_all()

    async def _train(self, task: Task, number: int) -> Answer:
        key = ("train", str(number))
        if number == self._number and key not in self._done:
            self._parts[task.numbers["copy"]] = task
            await self._gathered(key, task)
        if key not in self._done:
            raise Failed(f"update {number} is asked for, and {self._number} are made")
        return await asyncio.shield(self._done[key])

    async def _gathered(self, key: tuple[str, ...], task: Task) -> None:
        """Begin the update with the last copy that comes; the others wait for that."""
        copies, since = task.numbers["copies"], time.monotonic()
        async with self._moved:
            if len(self._parts) == copies:
                works = tuple(work for _, part in sorted(self._parts.items()) for work in part.works)
                self._parts.clear()
                whole = Task(task.verb, works, task.numbers, task.session)
                self._done[key] = asyncio.ensure_future(self._update(whole))
                self._moved.notify_all()
            while key not in self._done:
                try:
                    # Not wait_for: it may swallow the cancellation that ends the job.
                    async with asyncio.timeout(TELL_S):
                        await self._moved.wait()
                except TimeoutError:
                    absent = sorted(set(range(copies)) - set(self._parts))
                    waited = time.monotonic() - since
                    logger.warning("waiting for the learner's copies %s (update, %.0f s)", absent, waited)
                self._check_place(task)

    async def _update(self, whole: Task) -> Answer:
        answer = await self._computed_here(whole)
        if whole.session == self._place:
            await self._move(self._session, self._place, whole.numbers["number"] + 1)
        return answer

    async def _once(self, key: tuple[str, ...], task: Task) -> Answer:
        if key not in self._done:
            self._done[key] = asyncio.ensure_future(self._computed_here(task))
        try:
            return await asyncio.shield(self._done[key])
        except Failed:
            self._done.pop(key, None)
            raise

    async def _computed_here(self, task: Task) -> Answer:
        """As `compute`; this is a task of its own, before which a load may have begun.

        Raises:
            OutOfStep: One has: the ranks would do it to what they load.
        """
        self._check_place(task)
        return await self.compute(task)
