"""The scorer's socket: requests in, scores out, each request its own task."""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.answering import Answering
from buffer.errors import BadMessage
from buffer.groups import Frame
from buffer.keys import ServerKeys
from buffer.rendering import PromptRefused
from buffer.router import Router
from rollout.scorer import wire
from rollout.scorer.rendering import WordsRenderer
from rollout.scorer.wire import Ids, ScoringFailed, Welcome, Words

logger = logging.getLogger(__name__)


class RewardModel(Protocol):
    async def score(self, token_ids: NDArray[np.int32]) -> float:
        """
        Raises:
            ScoringFailed: This sequence cannot be scored.
            EngineFailed: Nothing can be scored any more.
        """
        ...


@dataclass(slots=True)
class Traffic:
    """What went over the socket since the start."""

    failed: int = 0
    scores: int = 0
    tokens: int = 0
    """Of the sequences that were scored."""
    score_sum: float = 0.0
    in_hand: int = 0


class ScorerServer:
    """Serves one reward model while `run` runs.

    Args:
        model: Scores.
        renderer: Lays out what comes as text.
        welcome: What a client is told of the model.
        run_id: The run it serves.
        reward: The reward's name.
        address: Where it listens.
        keys: Its own and those that it admits.

    Raises:
        AddressTaken: Somebody else listens there.
        ValueError: The address reaches beyond this machine, and there are no keys.
    """

    def __init__(
        self,
        model: RewardModel,
        renderer: WordsRenderer,
        welcome: Welcome,
        run_id: str,
        reward: str,
        address: str,
        keys: ServerKeys | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._model = model
        self._renderer = renderer
        self._welcome = welcome
        self._run_id = run_id
        self._reward = reward
        key = f"rollout.rewards.{reward}.address"
        self._router = Router(key, address, wire.MAX_MESSAGE_BYTES, keys)
        self._answering = Answering[float](self._router, wire.ENVELOPE, self._answer, logger)

    async def run(self) -> None:
        """Answer until cancelled; the engine's end comes out here. See `Answering.run`."""
        await self._answering.run()

    def close(self) -> None:
        self._router.close()

    async def _answer(self, frames: list[Frame]) -> list[Frame]:
        request = wire.decode_request(frames, self._run_id, self._reward)
        if request.work is None:
            logger.info("%s is here", request.name)
            return [wire.encode_welcome(request.request_id, self._welcome)]
        try:
            token_ids = self._token_ids(request.work)
            score = await self._answering.once(request.request_id, lambda: self._score(token_ids))
        except ScoringFailed:
            self.traffic.failed += 1
            raise
        return [wire.encode_score(request.request_id, score)]

    def _token_ids(self, work: Ids | Words) -> NDArray[np.int32]:
        if isinstance(work, Words):
            try:
                return np.asarray(self._renderer.render(work), np.int32)
            except PromptRefused as refused:
                raise ScoringFailed(str(refused)) from None
        if work.tokenizer != self._welcome.tokenizer:
            raise BadMessage("tokenizer: the ids are of another tokenizer than the reward model's")
        if len(work.token_ids) > self._welcome.max_length:
            raise BadMessage(f"token_ids: {len(work.token_ids)} of them, at most {self._welcome.max_length}")
        return work.token_ids

    async def _score(self, token_ids: NDArray[np.int32]) -> float:
        self.traffic.in_hand += 1
        try:
            score = await self._model.score(token_ids)
        finally:
            self.traffic.in_hand -= 1
        self.traffic.scores += 1
        self.traffic.tokens += len(token_ids)
        self.traffic.score_sum += score
        return score

    def metrics(self) -> dict[str, Any]:
        traffic = {name: getattr(self.traffic, name) for name in Traffic.__slots__}
        return {"requests": self._answering.requests, "bad_messages": self._answering.bad_messages, **traffic}
