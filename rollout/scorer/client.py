"""How a rollout server reaches a scorer."""

import logging
import time
from types import TracebackType
from typing import Self

from buffer.keys import ClientKeys
from buffer.requester import Answer, Requester, new_id
from rollout.scorer import wire
from rollout.scorer.wire import Ids, Request, Welcome, Words

logger = logging.getLogger(__name__)

QUEUE_S = 30.0
"""A score may well take this long: a batch's completions end together and stand in line at the scorer."""


class ScorerClient:
    """One connection to one scorer; calls may run side by side, all of one event loop.

    A request is repeated until it is answered, so a scorer that was killed and started again costs time only,
    unless that takes longer than `timeout_s`.

    Args:
        reward: The reward's name.
        address: Where its scorer listens.
        run_id: The run.
        name: This server's.
        timeout_s: For each score.
        keys: This server's and the scorer's; None where it needs none.
    """

    def __init__(
        self,
        reward: str,
        address: str,
        run_id: str,
        name: str,
        timeout_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._reward = reward
        self._run_id = run_id
        self._name = name
        self._timeout_s = timeout_s
        self._requester = Requester(f"scorer {reward}", address, wire.ENVELOPE.open_reply, logger, keys)

    async def __aenter__(self) -> Self:
        await self._requester.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._requester.__aexit__(kind, error, trace)

    async def hello(self, timeout_s: float) -> Welcome:
        """Wait until the scorer is there.

        Raises:
            Unreachable: It is not by then.
            WrongRun: Another scorer, or another run's, listens there.
        """
        reply, _ = await self._ask("hello", None, timeout_s)
        return wire.decode_welcome(reply)

    async def score(self, work: Ids | Words, timeout_s: float | None = None) -> float:
        """
        Args:
            work: To be scored.
            timeout_s: Instead of the connection's own.

        Raises:
            Unreachable: No answer by then.
            Refusal: `ScoringFailed`, `BadMessage` or `WrongRun`.
        """
        reply, _ = await self._ask("score", work, timeout_s or self._timeout_s, QUEUE_S)
        return wire.decode_score(reply)

    async def _ask(
        self, what: str, work: Ids | Words | None, timeout_s: float, expected_s: float = 0.0
    ) -> Answer:
        request = Request(new_id(), self._run_id, self._reward, self._name, work)
        message = wire.encode_request(request)
        deadline = time.monotonic() + timeout_s
        answer = await self._requester.ask(request.request_id, message, what, deadline, expected_s)
        wire.ENVELOPE.raise_if_refused(answer[0])
        return answer
