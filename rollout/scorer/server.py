"""The scorer's socket: requests in, scores out, each request its own task."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.errors import BadMessage, Refusal
from buffer.groups import Frame
from buffer.keys import ServerKeys
from buffer.rendering import PromptRefused
from buffer.router import Router
from rollout.scorer import wire
from rollout.scorer.rendering import WordsRenderer
from rollout.scorer.wire import Ids, Request, ScoringFailed, Welcome, Words

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

    requests: int = 0
    bad_messages: int = 0
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
        self._running: dict[str, asyncio.Task[float]] = {}
        """By request id: one that is sent again while it is in hand is computed once."""
        key = f"rollout.rewards.{reward}.address"
        self._router = Router(key, address, wire.MAX_MESSAGE_BYTES, keys)

    async def run(self) -> None:
        """Answer until cancelled; the engine's end comes out here.

        Consumes: requests. Waits for: the next one. Unblocked by: any peer.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._router.admit())
            while True:
                identity, *frames = await self._router.socket.recv_multipart(copy=False)
                self.traffic.requests += 1
                tasks.create_task(self._serve(identity.bytes, [f.buffer for f in frames]))

    def close(self) -> None:
        self._router.close()

    async def _serve(self, identity: bytes, frames: list[Frame]) -> None:
        """One request from its frames to its answer; a fault of the sender's becomes an error reply."""
        try:
            request = wire.decode_request(frames, self._run_id, self._reward)
            reply = await self._answer(request)
        except Refusal as refusal:
            if isinstance(refusal, ScoringFailed):
                self.traffic.failed += 1
            elif isinstance(refusal, BadMessage):
                self.traffic.bad_messages += 1
            logger.warning("%s: %s", refusal.kind.replace("_", " "), refusal)
            reply = wire.encode_refusal(wire.request_id_of(frames[0] if frames else b""), refusal)
        await self._router.socket.send_multipart([identity, reply])

    async def _answer(self, request: Request) -> bytes:
        if request.work is None:
            logger.info("%s is here", request.name)
            return wire.encode_welcome(request.request_id, self._welcome)
        running = self._running.get(request.request_id)
        if running is None:
            running = asyncio.create_task(self._score(self._token_ids(request.work)))
            self._running[request.request_id] = running
            running.add_done_callback(lambda _: self._running.pop(request.request_id))
        return wire.encode_score(request.request_id, await running)

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
        return {name: getattr(self.traffic, name) for name in Traffic.__slots__}
