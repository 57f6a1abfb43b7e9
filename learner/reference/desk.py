"""What rank 0 of the reference does beside computing: its socket, on a thread of its own."""

import asyncio
import json
import logging
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from buffer.client import BufferClient
from buffer.keys import client_keys, server_keys
from learner.config import LearnerExperiment, ReferenceConfig
from learner.reference.server import Logprobs, ReferenceServer
from learner.reference.wire import Served, Work

logger = logging.getLogger(__name__)

OVER_POLL_S = 1.0
"""Between two looks whether the run is over; the buffer stays for three seconds after that."""
REPORT_S = 2.0


class Desk:
    """Hands out what was asked, in order, and takes the answers. A context manager, of one thread."""

    def __init__(self, experiment: LearnerExperiment, of: ReferenceConfig, served: Served) -> None:
        self._experiment = experiment
        self._of = of
        self._served = served
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="desk", daemon=True)
        self._tasks: list[Future[None]] = []
        self._in_hand: list[Future[Logprobs]] = []

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
        logger.info("the reference ends: %d micro-batches", self._server.traffic.micro_batches)

    async def _open(self) -> ReferenceServer:
        keys = server_keys(self._experiment.security.keys, "reference")
        return ReferenceServer(self._served, self._of.address, keys)

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

    def take(self, most: int, wait_s: float) -> list[Work]:
        """What waits, the oldest first; none after `wait_s`."""
        assert not self._in_hand, "answer first"
        works: list[Work] = []
        deadline = time.monotonic() + wait_s
        while len(works) < most:
            try:
                left = 0.0 if works else max(0.0, deadline - time.monotonic())
                work, answer = (
                    self._server.waiting.get(timeout=left) if left else self._server.waiting.get_nowait()
                )
            except queue.Empty:
                break
            if answer.set_running_or_notify_cancel():
                works.append(work)
                self._in_hand.append(answer)
        return works

    def answer(self, found: list[Logprobs]) -> None:
        """Of what was taken, in that order."""
        for answer, logprobs in zip(self._in_hand, found, strict=True):
            answer.set_result(logprobs)
        self._in_hand = []

    async def _until_over(self) -> None:
        e = self._experiment
        keys = client_keys(e.security.keys, "reference", "buffer")
        async with BufferClient(e.buffer.address, "observer", e.name, "reference", keys=keys) as buffer:
            while not (await buffer.status())["over"]:  # noqa: ASYNC110  the buffer is another process
                await asyncio.sleep(OVER_POLL_S)

    async def _report(self) -> None:
        """Append a line every `REPORT_S`, and a last one when cancelled."""
        path = Path(self._experiment.run_dir) / "metrics" / "reference.jsonl"
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
