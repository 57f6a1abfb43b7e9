"""What rank 0 of a model on ranks of its own does beside computing: its socket, on a thread of its own."""

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from buffer.client import FOR_EVER, BufferClient
from buffer.keys import client_keys
from learner.apart.server import ApartServer
from learner.apart.wire import Answer, Failed, Task
from learner.config import LearnerExperiment

logger = logging.getLogger(__name__)

OVER_POLL_S = 1.0
"""Between two looks whether the run is over; the buffer stays for three seconds after that."""
REPORT_S = 2.0
LAST_WORDS_S = 2.0
"""For the answers that tell of the job's end."""


class Desk:
    """Hands out what was asked, in order, and takes the answers. A context manager, of one thread."""

    def __init__(self, experiment: LearnerExperiment, role: str, serve: Callable[[], ApartServer]) -> None:
        """Args:
        role: Of the job's key, and of its file of metrics.
        serve: Makes the server, on the desk's thread.
        """
        self._experiment = experiment
        self._role = role
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="desk", daemon=True)
        self._tasks: list[Future[None]] = []
        self._ahead: tuple[Task, Future[Answer]] | None = None
        """Taken from the line, and not handed out yet."""
        self._in_hand: list[Future[Answer]] = []

    def __enter__(self) -> Self:
        """
        Raises:
            AddressTaken, ValueError, KeysError: It cannot listen there.
        """
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        work = (self._server.run(), self._until_over(), self._report())
        self._tasks = [asyncio.run_coroutine_threadsafe(one, self._loop) for one in work]
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        logger.info("the %s ends: %d micro-batches", self._role, self._server.traffic.micro_batches)

    async def _open(self) -> ApartServer:
        return self._serve()

    @property
    def over(self) -> bool:
        """Whether the run is.

        Raises:
            Refusal, Unreachable, OSError: What ended one of the desk's own tasks.
        """
        serving, over, reporting = self._tasks
        for task in (serving, reporting, over):
            if task.done():
                task.result()
        return over.done()

    def take(self, most: int, wait_s: float) -> list[Task]:
        """What waits, the oldest first; none after `wait_s`. Passes over a micro-batch come together, of one
        kind; anything else comes alone."""
        assert not self._in_hand, "answer first"
        tasks: list[Task] = []
        while len(tasks) < most and (found := self._next(0.0 if tasks else wait_s)) is not None:
            task, answer = found
            if tasks and not (_is_pass(task) and task.verb == tasks[0].verb and _is_pass(tasks[0])):
                self._ahead = found
                break
            if answer.set_running_or_notify_cancel():
                tasks.append(task)
                self._in_hand.append(answer)
        return tasks

    def _next(self, wait_s: float) -> tuple[Task, Future[Answer]] | None:
        if self._ahead is not None:
            found, self._ahead = self._ahead, None
            return found
        try:
            return self._server.waiting.get(timeout=wait_s) if wait_s else self._server.waiting.get_nowait()
        except queue.Empty:
            return None

    def answer(self, found: list[Answer | Failed]) -> None:
        """Of what was taken, in that order."""
        for future, answer in zip(self._in_hand, found, strict=True):
            if isinstance(answer, Failed):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._in_hand = []

    def fail(self, error: Exception) -> None:
        """Tell whoever waits for what was taken why there will be no answer: the job ends of it."""
        waited = self._in_hand
        self.answer([Failed(str(error))] * len(waited))
        deadline = time.monotonic() + LAST_WORDS_S
        while waited and self._server.traffic.in_hand and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _until_over(self) -> None:
        e = self._experiment
        keys = client_keys(e.security.keys, self._role, "buffer")
        async with BufferClient(e.buffer.address, "observer", e.name, self._role, FOR_EVER, keys) as buffer:
            while not (await buffer.status())["over"]:  # noqa: ASYNC110  the buffer is another process
                await asyncio.sleep(OVER_POLL_S)

    async def _report(self) -> None:
        """Append a line every `REPORT_S`, and a last one when cancelled."""
        path = Path(self._experiment.run_dir) / "metrics" / f"{self._role}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                while True:
                    await asyncio.sleep(REPORT_S)
                    file.write(json.dumps({"time": time.time(), **self._server.metrics()}) + "\n")
                    file.flush()
            finally:
                file.write(json.dumps({"time": time.time(), **self._server.metrics()}) + "\n")

    async def _leave(self) -> None:
        """Wait for what was cancelled, then close the socket that it used."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        self._server.close()


def _is_pass(task: Task) -> bool:
    return task.verb in ("logprobs", "values")
