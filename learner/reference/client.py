"""How the learner reaches the reference's own ranks."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from buffer.errors import Unreachable, WrongRun
from buffer.keys import ClientKeys
from buffer.requester import Answer, Requester, new_id
from learner.reference import wire
from learner.reference.wire import Request, Work

logger = logging.getLogger(__name__)

IN_HAND = 32
"""Micro-batches that are with the reference at a time; the others stand in line here."""
BUSY_S = 30.0
"""An answer may well take this long: a step's micro-batches are asked for at once."""
RETRY_S = 2.0
"""Between two tries to reach the right one, where another reference answers."""
TELL_S = 30.0


class ReferenceClient:
    """One connection to the reference; calls may run side by side, all of one event loop.

    A request is repeated until it is answered, so a reference that was killed and started again costs time
    only. One of another run, or of other weights, is none: it is waited for the right one.

    Args:
        address: Where it listens.
        run_id: The run.
        weights: Fingerprint of those that the run started from.
        name: Who asks.
        timeout_s: Given up when nothing of use was heard for so long.
        keys: The learner's and the reference's; None where it needs none.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        weights: str,
        name: str,
        timeout_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._address = address
        self._run_id = run_id
        self._weights = weights
        self._name = name
        self._timeout_s = timeout_s
        self._requester = Requester("reference", address, wire.ENVELOPE.open_reply, logger, keys)
        self._told = -TELL_S

    async def __aenter__(self) -> Self:
        self._in_hand = asyncio.Semaphore(IN_HAND)
        await self._requester.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._requester.__aexit__(kind, error, trace)

    async def hello(self) -> None:
        """Wait until the right reference is there.

        Raises:
            Unreachable: Nobody answered for `timeout_s`.
            WrongRun: Only another run's, or one of other weights, did.
        """
        await self._ask("hello", None)

    async def logprobs(self, work: Work) -> NDArray[np.float32]:
        """log π_ref of the targets, [N].

        Raises:
            Unreachable, WrongRun: As `hello`.
            BadMessage: What was sent, or what came back, breaks the schema.
        """
        async with self._in_hand:
            _, frames = await self._ask("logprobs", work, BUSY_S)
        return wire.decode_logprobs(frames, len(work.target_ids))

    async def _ask(self, what: str, work: Work | None, expected_s: float = 0.0) -> Answer:
        refused_since: float | None = None
        request = Request(new_id(), self._run_id, self._weights, self._name, work)
        message = wire.encode_request(request)
        while True:
            try:
                deadline = time.monotonic() + self._timeout_s
                answer = await self._requester.ask(request.request_id, message, what, deadline, expected_s)
                wire.ENVELOPE.raise_if_refused(answer[0])
                return answer
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
            told = "waiting for this run's reference at %s, where another answers: %s"
            logger.warning(told, self._address, refusal)
