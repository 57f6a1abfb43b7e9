"""A reward model in this process: what a scorer serves, and what an evaluation without a run asks itself."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np

from buffer.experiment import ModelConfig
from buffer.rendering import PromptRefused
from buffer.tokenizers import load_tokenizer
from rollout.config import ModelReward
from rollout.scorer.engine import PoolingEngine
from rollout.scorer.folder import longest
from rollout.scorer.rendering import WordsRenderer, fingerprint
from rollout.scorer.server import RewardModel
from rollout.scorer.wire import Ids, ScoringFailed, Welcome, Words


@dataclass(frozen=True, slots=True)
class LocalScorer:
    """Answers as a scorer behind its `ScorerClient` does, without a socket between."""

    model: RewardModel
    renderer: WordsRenderer
    """Lays out what comes as text."""
    welcome: Welcome

    async def hello(self, timeout_s: float) -> Welcome:
        return self.welcome

    async def score(self, work: Ids | Words, timeout_s: float | None = None) -> float:
        """
        Raises:
            ScoringFailed: This one cannot be scored.
            EngineFailed: The engine is gone.
        """
        if isinstance(work, Ids):
            return await self.model.score(work.token_ids)
        try:
            token_ids = self.renderer.render(work)
        except PromptRefused as refused:
            raise ScoringFailed(str(refused)) from None
        return await self.model.score(np.asarray(token_ids, np.int32))


async def open_model(
    name: str, reward: ModelReward, policy: ModelConfig, system_prompt: str | None, stack: AsyncExitStack
) -> tuple[PoolingEngine, WordsRenderer, Welcome]:
    """Start a reward model's engine here; blocks the event loop meanwhile.

    Args:
        name: The reward's.
        reward: Its section.
        policy: The model whose completions are scored.
        system_prompt: `data.system_prompt`.
        stack: Ends what was started.

    Raises:
        EngineFailed: It does not come up.
        ValueError: Its tokenizer cannot be used.

    Returns:
        What scores, what lays a text out for it, and what is told of it.
    """
    max_length = longest(policy, reward)
    tokenizer = load_tokenizer(f"rollout.rewards.{name}.model", reward.model)
    renderer = WordsRenderer(tokenizer, max_length, system_prompt)
    engine = PoolingEngine(reward, max_length)
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine, renderer, Welcome(reward.model, fingerprint(tokenizer), max_length)
