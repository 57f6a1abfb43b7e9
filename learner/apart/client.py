"""How the learner reaches a model on ranks of its own."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.keys import ClientKeys
from buffer.requester import Requester, new_id
from learner.apart import wire
from learner.apart.wire import Answer, Kind, Request, Task

logger = logging.getLogger(__name__)

IN_HAND = 32
"""Passes that are with the model at a time; the others stand in line here."""
BUSY_S = 30.0
"""An answer may well take this long: a step's micro-batches are asked for at once."""
RETRY_S = 2.0
"""Between two tries to reach the right one, where another model answers."""
TELL_S = 30.0


class ApartClient:
    """One connection to the model; calls may run side by side, all of one event loop.

    A request is repeated until it is answered, so a job that was killed and started again costs time only.
    One of another run, or of other weights, is none: it is waited for the right one.

    Args:
        kind: Of the model.
        address: Where it listens.
        run_id: The run.
        weights: Fingerprint of those that the run started from.
        name: Who asks.
        timeout_s: Given up when nothing of use was heard for so long.
        keys: The learner's and the job's; None where it needs none.
    """

    def __init__(
        self,
        kind: Kind,
        address: str,
        run_id: str,
        weights: str,
        name: str,
        timeout_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._kind = kind
        self._address = address
        self._run_id = run_id
        self._weights = weights
        self._name = name
        self._timeout_s = timeout_s
        self._requester = Requester(kind.name, address, kind.envelope.open_reply, logger, keys)
        self._told = -TELL_S

    async def __aenter__(self) -> Self:
        self._in_hand = asyncio.Semaphore(IN_HAND)
        await self._requester.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._requester.__aexit__(kind, error, trace)

    async def silent_s(self) -> float:
        """Seconds since it said anything."""
        return time.monotonic() - self._requester.heard

    async def hello(self) -> None:
        """Wait until the right model is there.

        Raises:
            Unreachable: Nobody answered for `timeout_s`.
            WrongRun: Only another run's, or one of other weights, did.
        """
        await self.ask(Task(wire.HELLO), 0.0)

    async def of_targets(self, task: Task) -> Answer:
        """A pass over one micro-batch: an array of its targets, [N].

        Raises:
            Unreachable, WrongRun: As `hello`.
            Refusal: Why it is not answered.
        """
        async with self._in_hand:
            answer = await self.ask(task)
        (work,) = task.works
        if [len(array) for array in answer.arrays] != [len(work.target_ids)]:
            raise BadMessage(
                f"arrays: expected one of {len(work.target_ids)} float32, got {list(map(len, answer.arrays))}"
            )
        return answer

    async def ask(self, task: Task, expected_s: float | None = None) -> Answer:
        """Anything. Raises as `of_targets`.

        Args:
            expected_s: For so long it may well go unanswered; None is `BUSY_S`.
        """
        refused_since: float | None = None
        request = Request(new_id(), self._run_id, self._weights, self._name, task)
        message = wire.encode_request(self._kind, request)
        expected_s = BUSY_S if expected_s is None else expected_s
        while True:
            try:
                deadline = time.monotonic() + self._timeout_s
                told = await self._requester.ask(request.request_id, message, task.verb, deadline, expected_s)
                return wire.decode_answer(self._kind, task.verb, *told)
            except Unreachable:
                # Where answers to others came, it is there and works through what was sent before.
                if time.monotonic() - self._requester.heard >= self._timeout_s:
                    raise
            except WrongRun as refusal:
                now = time.monotonic()
                refused_since = now if refused_since is None else refused_since
                if now - refused_since >= self._timeout_s:
                    raise
                self._tell(refusal)
                await asyncio.sleep(RETRY_S)

    def _tell(self, refusal: WrongRun) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            told = "waiting for this run's %s at %s, where another answers: %s"
            logger.warning(told, self._kind.name, self._address, refusal)
