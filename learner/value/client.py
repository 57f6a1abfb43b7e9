"""How one of the learner's model copies reaches the value model's own ranks, and puts them right.

The job's ranks hold what was trained in memory and in checkpoints alone. So whatever a copy had them train
since the last checkpoint stays here; a job that was started again loads that checkpoint and makes the same
updates of the same micro-batches again, which costs time and changes nothing.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from buffer.errors import Refusal, Unreachable
from learner.apart.client import ApartClient
from learner.apart.wire import Answer, OutOfStep, Task
from learner.apart.work import Work

logger = logging.getLogger(__name__)


Ask = Callable[[Task], Awaitable[Answer]]

WATCH_S = 1.0
"""Between two looks whether the job is still where it was."""


class ValueClient(ApartClient):
    """Updates are counted from the learner's start, by `number`: that many the model has made when it makes
    the next."""

    async def __aenter__(self) -> Self:
        self._session = ""
        self._base = (0, 0)
        """Step of the last checkpoint, and how many updates were made by then."""
        self._trained: list[Task] = []
        """Since then, in their order."""
        self._place = ""
        """As the model's server answered to the last load."""
        self._putting_right = asyncio.Lock()
        await super().__aenter__()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        await super().__aexit__(kind, error, trace)

    async def start(self, session: str, step: int) -> None:
        """Have the model go on from a checkpoint, as the learner does; from its start where `step` is 0.

        Args:
            session: Of this start of the learner, the same of all copies.

        Raises:
            Unreachable, WrongRun: It is not there, or only another one.
            Failed: It cannot.
        """
        self._session, self._base, self._trained = session, (step, 0), []
        await self._put_right(self._place)

    async def values(self, number: int, work: Work) -> NDArray[np.float32]:
        """V of a micro-batch's targets, [N], after so many updates. Raises as `start`."""
        task = Task("values", (work,), {"number": number})
        return (await self._in_step(task, self.of_targets)).arrays[0]

    async def train(self, works: tuple[Work, ...], **numbers: int) -> Answer:
        """Update `number`, once the micro-batches of all copies are there. Raises as `start`.

        Args:
            works: Of this copy; `known` are their old values and returns.
            numbers: Those of the verb.
        """
        task = Task("train", works, numbers)
        self._trained.append(task)
        return await self._in_step(task)

    async def save(self, number: int, step: int) -> None:
        """Write the state into the checkpoint of `step` that is being written. Raises as `start`."""
        # A checkpoint may be written twice, each time into a new folder.
        numbers = {"number": number, "step": step, "attempt": secrets.randbits(31)}
        await self._in_step(Task("save", numbers=numbers))

    async def saved(self, number: int, step: int) -> None:
        """That checkpoint is complete."""
        self._base, self._trained = (step, number), []

    async def export(self, number: int) -> None:
        """Write the model as a Hugging Face folder into the run's. Raises as `start`."""
        await self._in_step(Task("export", numbers={"number": number}))

    async def _watch(self) -> None:
        """Notice a job that was started again while this copy waits for nothing: another one may, for updates
        that need the micro-batches of both."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._place:
                continue  # `start` waits for it
            try:
                await self._in_step(Task("follow"))
            except (Refusal, Unreachable) as error:
                # Whoever asks for something hears of it.
                logger.debug("%s", error)

    async def _in_step(self, task: Task, ask: Ask | None = None) -> Answer:
        """Ask, of a model that is where this copy is."""
        while True:
            place = self._place
            try:
                return await (ask or self.ask)(replace(task, session=place))
            except OutOfStep:
                await self._put_right(place)

    async def _put_right(self, known: str) -> None:
        """Bring it to where this copy is.

        Args:
            known: The place that was not right; where it is another one by now, that was done already.
        """
        async with self._putting_right:
            while self._place == known:
                # Of one moment: a checkpoint that is completed while the one before is loaded empties the
                # list, and the model lacks just that.
                (step, number), trained = self._base, tuple(self._trained)
                load = Task("load", (), {"step": step, "number": number}, self._session)
                told = (await self.ask(load)).numbers
                place = f"{told['place']:.0f}"
                lost = [task for task in trained if task.numbers["number"] >= told["number"]]
                if lost and told["loaded"]:
                    again = "the value model went back to step %d: it makes %d updates again"
                    logger.warning(again, step, len(lost))
                try:
                    for task in lost:
                        await self.ask(replace(task, session=place))
                    self._place = place
                except OutOfStep:
                    continue  # it was started, or led back by another copy, once more
