"""From one lease to one group: render the prompt, sample its completions together, score each as it ends."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from buffer.experiment import EvalConfig
from buffer.records import Group, Lease, Trajectory
from buffer.rendering import Renderer
from rollout.config import SamplingConfig
from rollout.engine import (
    Completion,
    CompletionAborted,
    CompletionFailed,
    Engine,
    EngineFailed,
    Request,
    gravest,
)
from rollout.episodes import answered
from rollout.metrics import Meters
from rollout.total_reward import Answer, Total

MAX_TEXT = 4000
"""Characters of a completion that travel with its trajectory, to be read by people."""
MAX_PROMPT = 500
"""And of its prompt."""
ANSWER_S = 10.0
"""An engine that lives makes one token within this time, whatever else it has in hand."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the completions of one kind of lease are sampled."""

    samples: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int | None = None


def evaluation_plan(evaluation: EvalConfig, sampling: SamplingConfig) -> SamplingPlan:
    """How the `eval` section samples; of the training's own sampling it takes the length it does not say."""
    return SamplingPlan(
        evaluation.samples,
        evaluation.temperature,
        evaluation.max_tokens or sampling.max_tokens,
        evaluation.top_p,
        evaluation.top_k,
    )


class Rewards(Protocol):
    @property
    def silent(self) -> list[str]: ...
    async def answered(self) -> None: ...
    async def ready(self) -> None: ...
    def check(self, row: dict[str, Any]) -> None: ...
    async def score(self, answer: Answer) -> Total: ...


class GroupRunner:
    """Makes groups; any number at a time.

    Args:
        engine: Samples the completions.
        renderer: Makes the prompt's token ids.
        rewards: Score a completion, off the event loop.
        version: The policy version now loaded.
        plans: By the lease's kind.
        timeout_s: For a whole group.
        meters: Told of every completion.
        episode: Where the user's function of several turns is; None asks for one reply.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        rewards: Rewards,
        version: Callable[[], int | None],
        plans: Mapping[str, SamplingPlan],
        timeout_s: float,
        meters: Meters,
        episode: str | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._rewards = rewards
        self._version = version
        self._plans = plans
        self._timeout_s = timeout_s
        self._meters = meters
        self._episode = episode
        self._probe: asyncio.Task[None] | None = None
        """A request for one token, made when a group is late: tells a hung engine from a slow prompt."""

    @property
    def silent(self) -> list[str]:
        """Who leaves this server without an answer: nothing comes of a lease until they give one."""
        waits = self._probe is not None and not self._probe.done()
        return [*(["the engine"] if waits else []), *self._rewards.silent]

    async def answered(self) -> None:
        """Wait until nobody is silent."""
        if self._probe is not None:
            await asyncio.wait([self._probe])
        await self._rewards.answered()

    async def ready(self) -> None:
        """Wait until groups can be scored; raises what keeps that from ever being so."""
        await self._rewards.ready()

    async def run(self, lease: Lease) -> Group:
        """The whole group; if one completion fails, the others are cancelled and so does the group.

        Raises:
            PromptRefused: The row can never be sampled from, or scored.
            CompletionFailed: A completion failed, `group_timeout`, or `engine_silent`, of which the prompt
                cannot be the cause; another try may go well.
            EngineFailed: The engine is gone.
        """
        plan = self._plans[lease.kind]
        self._rewards.check(lease.prompt.row)
        prompt_ids = self._renderer.render(lease.prompt.row, plan.max_tokens)
        sampled: list[int] = []
        try:
            return await self._group(lease, prompt_ids, plan, sampled)
        except BaseException:
            self._meters.wasted_tokens += sum(sampled)
            raise

    async def _group(
        self, lease: Lease, prompt_ids: list[int], plan: SamplingPlan, sampled: list[int]
    ) -> Group:
        """`sampled` is told of the tokens of every completion."""
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._trajectory(index, lease, prompt_ids, plan, sampled))
                    for index in range(plan.samples)
                ]
        except TimeoutError:
            late = f"not finished within {self._timeout_s:g} s"
            if await self._engine_answers(lease, prompt_ids):
                raise CompletionFailed("group_timeout", late) from None
            raise CompletionFailed("engine_silent", f"{late}, nor is one token more") from None
        except BaseExceptionGroup as failures:
            raise gravest(failures) from failures
        return Group(
            group_id=uuid.uuid4().hex,
            lease_id=lease.lease_id,
            prompt_id=lease.prompt.prompt_id,
            kind=lease.kind,
            trajectories=tuple(task.result() for task in running),
        )

    async def _engine_answers(self, lease: Lease, prompt_ids: list[int]) -> bool:
        """Whether it samples a token at all; late groups ask together."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._one_token(lease, prompt_ids))
        done, _ = await asyncio.wait([self._probe], timeout=min(ANSWER_S, self._timeout_s))
        return bool(done)

    async def _one_token(self, lease: Lease, prompt_ids: list[int]) -> None:
        version, plan = self._version(), self._plans[lease.kind]
        assert version is not None, "sampling before the first version"
        name = f"{lease.lease_id}/one-token"
        with suppress(CompletionFailed, EngineFailed):  # that is an answer, too
            await self._engine.generate(Request(name, prompt_ids, 1, plan.temperature, version))

    async def _trajectory(
        self, index: int, lease: Lease, prompt_ids: list[int], plan: SamplingPlan, sampled: list[int]
    ) -> Trajectory:
        async def sample(ids: list[int], turn: int) -> Completion:
            for tries in itertools.count():
                try:
                    completion = await self._engine.generate(request(ids, turn, tries))
                except CompletionAborted as aborted:
                    self._meters.wasted_tokens += aborted.tokens
                    continue
                self._meters.completed(completion)
                sampled.append(len(completion.token_ids))
                return completion
            raise AssertionError("counted to the end")

        def request(ids: list[int], turn: int, tries: int) -> Request:
            version = self._version()
            assert version is not None, "sampling before the first version"
            place = f"{index}" + (f"/{turn}" if turn else "") + (f"/again-{tries}" if tries else "")
            return Request(
                request_id=f"{lease.lease_id}/{place}",
                prompt_ids=ids,
                max_tokens=min(plan.max_tokens, self._renderer.room(len(ids))),
                temperature=plan.temperature,
                version=version,
                top_p=plan.top_p,
                top_k=plan.top_k,
            )

        facts: dict[str, Any] = {"prompt": last_words(lease.prompt.row.get("prompt"))}
        completion, row, spoken = await answered(
            self._episode, lease.prompt.row, prompt_ids, sample, self._renderer
        )
        if spoken:
            most = MAX_TEXT // completion.turns
            facts["conversation"] = [{**said, "content": said["content"][:most]} for said in spoken]
        total = await self._rewards.score(Answer(row, prompt_ids, completion))
        return trajectory(index, prompt_ids, completion, total, facts)


def last_words(prompt: Any) -> str:
    """The end of a prompt, text or messages, to be read by people."""
    said = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    return str(said)[-MAX_PROMPT:]


def trajectory(
    index: int, prompt_ids: list[int], completion: Completion, total: Total, facts: Mapping[str, Any]
) -> Trajectory:
    """Lay prompt and completion out as one sequence; only what the engine sampled is marked as trained.

    Args:
        facts: More for people to read.
    """
    start, length = len(prompt_ids), len(prompt_ids) + len(completion.token_ids)
    token_ids = np.empty(length, np.int32)
    token_ids[:start], token_ids[start:] = prompt_ids, completion.token_ids
    loss_mask = np.zeros(length, np.uint8)
    loss_mask[start:] = completion.sampled_mask
    behavior_logprobs = np.zeros(length, np.float32)
    behavior_logprobs[start:] = completion.logprobs
    versions = np.zeros(length, np.int32)
    versions[start:] = completion.versions
    return Trajectory(
        index=index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        versions=versions,
        reward=total.reward,
        reward_parts=total.parts,
        finish_reason=completion.finish_reason,
        turns=completion.turns,
        metadata={**facts, "text": completion.text[:MAX_TEXT]},
    )
