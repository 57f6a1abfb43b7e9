"""The reward of a completion: the weighted sum of named parts, from functions and from reward models."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from buffer.client import FOR_EVER
from buffer.errors import BadMessage, Refusal, Unreachable
from buffer.keys import ClientKeys
from buffer.records import MAX_REWARD
from buffer.rendering import PromptRefused
from rollout.config import FunctionReward, ModelReward, Reward
from rollout.engine import Completion, CompletionFailed, gravest
from rollout.reward_pool import RewardPool
from rollout.scorer.client import ScorerClient
from rollout.scorer.rendering import fingerprint
from rollout.scorer.wire import Ids, ScoringFailed, Welcome, Words

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row = dict[str, Any]

SCORER_WAIT_S = 600.0
"""How long a server waits for a scorer before its first group."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion and what it answers. Made by the group runner, read by every reward."""

    row: Row
    """The prompt's, as the data source gave it."""
    prompt_ids: list[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Total:
    reward: float
    """Σ weight · value over the rewards."""
    parts: dict[str, float]
    """Each reward's own value, before its weight, by name; `NAME/PART` for what a function names."""


class Source(Protocol):
    """One reward. `values` raises `CompletionFailed`; `ready` whatever keeps it from ever working.
    `unanswered` is what a scorer was asked in vain, and answers once it is back."""

    @property
    def unanswered(self) -> asyncio.Task[None] | None: ...
    async def ready(self) -> None: ...
    async def values(self, answer: Answer) -> tuple[float, dict[str, float]]: ...


class Scorer(Protocol):
    """A reward model, wherever it is: behind a socket (`ScorerClient`) or in this process (`LocalScorer`)."""

    async def hello(self, timeout_s: float) -> Welcome: ...
    async def score(self, work: Ids | Words, timeout_s: float | None = None) -> float: ...


Reach = Callable[[str, ModelReward], Awaitable[Scorer]]


IsFor = Callable[[Row], bool]


class TotalReward:
    """All rewards of a run whose weight is not 0; the others cost nothing.

    Args:
        weighted: Weight and source by name.
        is_for: By name, whether a reward is for a row; one that is not here is for every row.
    """

    def __init__(
        self, weighted: Mapping[str, tuple[float, Source]], is_for: Mapping[str, IsFor] | None = None
    ) -> None:
        self._weighted = dict(weighted)
        self._is_for = dict(is_for or {})

    @property
    def silent(self) -> list[str]:
        """Rewards whose scorers do not answer."""
        return [f"the scorer of {name}" for name, (_, source) in self._weighted.items() if _waits(source)]

    async def answered(self) -> None:
        """Wait until all do."""
        waiting = [source.unanswered for _, source in self._weighted.values() if source.unanswered]
        if waiting:
            await asyncio.wait(waiting)

    async def ready(self) -> None:
        """Wait until every reward can be asked.

        Raises:
            Unreachable: A scorer does not come.
            Refusal: It is another one's.
        """
        await self._all(source.ready() for _, source in self._weighted.values())

    def check(self, row: Row) -> None:
        """Refuse a row that no reward is for.

        Raises:
            PromptRefused: `no_reward`.
        """
        if self._weighted and not self._asked(row):
            raise PromptRefused("no_reward", "by `only`, none of rollout.rewards is for this row")

    def _asked(self, row: Row) -> dict[str, tuple[float, Source]]:
        is_for = self._is_for
        return {n: of for n, of in self._weighted.items() if n not in is_for or is_for[n](row)}

    async def score(self, answer: Answer) -> Total:
        """Ask all rewards that are for the row at once; the first that fails ends the others.

        Raises:
            CompletionFailed: One of them failed, or the numbers are larger than a buffer takes.
        """
        asked = self._asked(answer.row)
        found = await self._all(source.values(answer) for _, source in asked.values())
        reward, parts = 0.0, {}
        for (name, (weight, _)), (value, named) in zip(asked.items(), found, strict=True):
            reward += weight * value
            parts |= {name: value} | {f"{name}/{part}": number for part, number in named.items()}
        if not all(abs(number) <= MAX_REWARD for number in (reward, *parts.values())):  # nan is none of them
            told = f"{parts} make {reward:g}; expected numbers of at most {MAX_REWARD:g}"
            raise CompletionFailed("reward_nonfinite", f"rollout.rewards: {told}")
        return Total(reward, parts)

    @staticmethod
    async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(call) for call in calls]
        except BaseExceptionGroup as failures:
            raise gravest(failures) from failures
        return [task.result() for task in running]


def _waits(source: Source) -> bool:
    return source.unanswered is not None and not source.unanswered.done()


class FunctionSource:
    """A reward function in processes of its own."""

    unanswered = None
    """They are this server's."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def ready(self) -> None:
        return

    async def values(self, answer: Answer) -> tuple[float, dict[str, float]]:
        score = await self._pool.score(answer.completion.text, answer.row)
        return score.reward, {part: value for part, value in score.parts.items() if part != "reward"}


class ModelSource:
    """A reward model behind its scorer: the raw score at the last token, clipped if so configured.

    Args:
        name: The reward's.
        scorer: Asked for the scores.
        config: Its section.
        tokenizer: Fingerprint of the policy's tokenizer.
    """

    def __init__(self, name: str, scorer: Scorer, config: ModelReward, tokenizer: str) -> None:
        self._name = name
        self._scorer = scorer
        self._clip = config.clip
        self._tokenizer = tokenizer
        self._takes_ids: bool | None = None
        self._answered = 0.0
        """When it scored last."""
        self.unanswered: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        welcome = await self._scorer.hello(SCORER_WAIT_S)
        self._takes_ids = welcome.tokenizer == self._tokenizer
        how = (
            "the token ids as sampled: its tokenizer is the policy's"
            if self._takes_ids
            else "the text, rendered anew: its tokenizer or chat template is not the policy's"
        )
        logger.info("reward %s: %s scores %s", self._name, welcome.model, how)

    async def values(self, answer: Answer) -> tuple[float, dict[str, float]]:
        assert self._takes_ids is not None, "scoring before the scorer is known"
        work, asked = self._work(answer), time.monotonic()
        try:
            score = await self._score(work)
        except Unreachable as error:
            if self._answered > asked:
                raise CompletionFailed("scorer_timeout", f"{error}, while it scores others") from None
            if not _waits(self):
                self.unanswered = asyncio.create_task(self._until_scored(work))
            raise CompletionFailed("scorer_silent", str(error)) from None
        except (ScoringFailed, BadMessage) as refusal:
            raise CompletionFailed("scorer_refused", f"{self._name}: {refusal}") from None
        return (score if self._clip is None else float(np.clip(score, -self._clip, self._clip))), {}

    async def _score(self, work: Ids | Words, timeout_s: float | None = None) -> float:
        try:
            score = await self._scorer.score(work, timeout_s)
        except Refusal:
            self._answered = time.monotonic()
            raise
        self._answered = time.monotonic()
        return score

    async def _until_scored(self, work: Ids | Words) -> None:
        with suppress(Refusal):  # that is an answer, too
            await self._score(work, FOR_EVER)

    def _work(self, answer: Answer) -> Ids | Words:
        completion = answer.completion
        if self._takes_ids:
            ids = [np.asarray(answer.prompt_ids, np.int32), completion.token_ids]
            return Ids(self._tokenizer, np.concatenate(ids))
        return Words(answer.row["prompt"], completion.text, completion.finish_reason == "stop")


async def open_rewards(
    rewards: Mapping[str, Reward],
    run_id: str,
    server: str,
    tokenizer: Any,
    stack: AsyncExitStack,
    logs: Path,
    reach: Reach | None = None,
    keys: ClientKeys | None = None,
) -> TotalReward:
    """Start the functions' processes, then the connections to the scorers.

    Args:
        rewards: By name; those of weight 0 are left out.
        run_id: The run.
        server: This server's name.
        tokenizer: The policy's.
        stack: Ends what was started.
        logs: Folder of what the functions print.
        reach: Gives a reward model by its name; None connects to its scorer.
        keys: For that.

    Raises:
        ValueError: A reward function cannot be imported.
    """

    async def connect(name: str, reward: ModelReward) -> Scorer:
        client = ScorerClient(name, reward.address, run_id, server, reward.timeout_s, keys)
        return await stack.enter_async_context(client)

    weighted: dict[str, tuple[float, Source]] = {}
    for name, reward in rewards.items():
        if reward.weight == 0:
            continue
        if isinstance(reward, FunctionReward):
            pool = RewardPool(reward, f"rollout.rewards.{name}", logs / f"{server}-{name}.printed")
            stack.push_async_callback(pool.close)
            await pool.start()
            weighted[name] = reward.weight, FunctionSource(pool)
        else:
            scorer = await (reach or connect)(name, reward)
            weighted[name] = reward.weight, ModelSource(name, scorer, reward, fingerprint(tokenizer))
    return TotalReward(weighted, {name: rewards[name].is_for for name in weighted})
