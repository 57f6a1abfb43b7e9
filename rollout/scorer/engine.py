"""The reward model on vLLM's pooling runner."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.config import ModelReward
from rollout.scorer.wire import ScoringFailed
from rollout.vllm_process import VLLMProcess, request_failures


class PoolingEngine:
    """A `…ForSequenceClassification` of one label; its score is read at the last token, as it stands.

    Args:
        reward: Folder, dtype and layout.
        max_length: Longest sequence, tokens.
    """

    def __init__(self, reward: ModelReward, max_length: int) -> None:
        self._reward = reward
        self._max_length = max_length
        self._process = VLLMProcess(reward.engine)
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Blocks the event loop while vLLM starts.

        Raises:
            EngineFailed: It does not come up.
        """
        self._process.prepare()
        from vllm.config import PoolerConfig

        self._process.start(
            self._reward.model,
            self._reward.dtype,
            self._max_length,
            runner="pooling",
            pooler_config=PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        )

    async def score(self, token_ids: NDArray[np.int32]) -> float:
        """The raw score, unbounded, read at the last of the tokens; any number of calls at a time.

        Raises:
            ScoringFailed: This sequence cannot be scored.
            EngineFailed: The engine is gone.
        """
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        # vLLM's own default would be a sigmoid.
        params = PoolingParams(task="classify", use_activation=False)
        prompt = tokens_input(token_ids.tolist())
        answers = self._process.llm.encode(prompt, params, str(next(self._numbers)))
        with request_failures(ScoringFailed):
            outputs = [output async for output in answers if output.finished]
        return _raw_score(outputs)

    async def wait_failed(self) -> str:
        return await self._process.wait_failed()

    async def close(self) -> None:
        await self._process.close()


def _raw_score(outputs: list[Any]) -> float:
    if not outputs or outputs[-1].outputs.data.numel() != 1:
        raise ScoringFailed("the engine gave no score")
    score = float(outputs[-1].outputs.data)
    if not np.isfinite(score):
        raise ScoringFailed(f"the score is {score}")
    return score
