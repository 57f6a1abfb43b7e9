"""The rollout server as a process: what it is made of, in which order it starts, and what ends it."""

import asyncio
import errno
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from buffer.client import FOR_EVER, BufferClient
from buffer.dotted import resolve
from buffer.errors import Refusal, Unreachable
from buffer.experiment import ConfigError
from buffer.keys import client_keys
from buffer.recording import read_groups
from buffer.rendering import Renderer
from buffer.stacks import Stillness
from buffer.tokenizers import load_tokenizer
from rollout.config import RolloutExperiment, engine_faults
from rollout.endings import first_of, signalled, unending
from rollout.engine import Engine, EngineFailed
from rollout.engine_log import spared_terminal
from rollout.groups import GroupRunner, SamplingPlan, evaluation_plan
from rollout.loop import RolloutLoop, Runner
from rollout.metrics import MeteredSink, Meters
from rollout.orphans import start_guard
from rollout.recorded import ReceivingSink, RecordedGroups
from rollout.total_reward import TotalReward, open_rewards
from sync.errors import SyncError
from sync.receiver import Receiver
from sync.sink import WeightSink

logger = logging.getLogger(__name__)

GREETING_S = 1.0
"""How long an answer of the buffer is waited for before vLLM starts."""
RENEW_S = 5.0
"""Between renewals; also how soon a server that is busy hears that its groups are not wanted any more."""


def run(experiment: RolloutExperiment, name: str) -> None:
    """Serve until the run is over or a signal comes.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        uvloop.run(_serve(experiment, name))
    except (EngineFailed, SyncError, Refusal, OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Of a write to an open file the system names none.
            reason = (
                f"{experiment.run_dir}: cannot be written: {error.strerror}; make room and start it again"
            )
        logger.error("rollout server %s stops: %s", name, reason)
        sys.exit(1)


def sampling_plans(experiment: RolloutExperiment) -> dict[str, SamplingPlan]:
    """How each kind of lease is sampled.

    Raises:
        ConfigError: Completions could not fit beside any prompt.
    """
    rollout, evaluation = experiment.rollout, experiment.eval
    sampling = rollout.sampling
    plans = {"train": SamplingPlan(rollout.group_size, sampling.temperature, sampling.max_tokens)}
    if evaluation is not None:
        plans["eval"] = evaluation_plan(evaluation, sampling)
    for kind, plan in plans.items():
        if plan.max_tokens >= experiment.model.max_length:
            key = "rollout.sampling.max_tokens" if kind == "train" else "eval.max_tokens"
            raise ConfigError(
                f"{key}: {plan.max_tokens} new tokens leave no room for a prompt in "
                f"model.max_length={experiment.model.max_length}; lower the one or raise the other"
            )
    return plans


async def _serve(experiment: RolloutExperiment, name: str) -> None:
    if experiment.rollout.recorded is not None:
        await _serve_recorded(experiment, name, experiment.rollout.recorded)
        return
    if faults := engine_faults("rollout.engine", experiment.rollout.engine):
        raise ConfigError("\n".join(faults))
    plans = sampling_plans(experiment)
    tokenizer = load_tokenizer("model.path", experiment.model.path)
    renderer = Renderer(tokenizer, experiment.model.max_length, experiment.data.system_prompt)
    if experiment.rollout.episode:
        resolve(experiment.rollout.episode)
    async with AsyncExitStack() as stack:
        guard = start_guard()  # over the rewards' processes too, and what they start
        stack.push_async_callback(asyncio.to_thread, guard.communicate)
        # Rewards first: a function that cannot be imported is told at once, not half a minute later.
        configured, logs = experiment.rollout.rewards, Path(experiment.run_dir) / "logs"
        keys = client_keys(experiment.security.keys, "rollout", "scorer")
        rewards = await open_rewards(configured, experiment.name, name, tokenizer, stack, logs, keys=keys)
        starting = Stillness(experiment.logging.stalled_s)
        stack.callback(starting.end)
        starting.see("starting")
        await _greet(experiment, name)
        logger.info("rollout server %s starts vLLM with %s: half a minute or so", name, experiment.model.path)
        engine = _engine(experiment, name)
        stack.push_async_callback(engine.close)
        with spared_terminal(logs / f"{name}.vllm.log"):
            await engine.start()
        await serve_with(experiment, name, engine, rewards, renderer, plans)


async def _greet(experiment: RolloutExperiment, name: str) -> None:
    """A buffer that is there already and is another run's, or has other keys or another temperature, is told
    of before vLLM starts.

    Raises:
        WrongRun: It is another run's.
        ValueError: Its learner would take what is sampled here for another distribution's.
    """
    keys = client_keys(experiment.security.keys, "rollout", "buffer")
    address, run = experiment.buffer.address, experiment.name
    async with BufferClient(address, "observer", run, f"{name}-greeting", GREETING_S, keys) as buffer:
        with suppress(Unreachable):  # it may come later; then it is waited for
            _agree(experiment, await buffer.status())


def _agree(experiment: RolloutExperiment, status: dict[str, Any]) -> None:
    mine, theirs = experiment.rollout.sampling.temperature, status["temperature"]
    if mine != theirs:
        raise ValueError(
            f"rollout.sampling.temperature={mine} here, and the buffer was started with {theirs}; start both "
            "with the same"
        )


async def _join(experiment: RolloutExperiment, buffer: BufferClient, loop: RolloutLoop) -> None:
    """Work, once the buffer is there; it may have come after the greeting."""
    _agree(experiment, await buffer.status())
    await loop.run()


async def serve_with(
    experiment: RolloutExperiment,
    name: str,
    engine: Engine,
    rewards: TotalReward,
    renderer: Renderer,
    plans: dict[str, SamplingPlan],
) -> None:
    """Join the buffer and the learner with an engine that is up, and work until something ends it."""
    rollout = experiment.rollout

    def runner(version: Callable[[], int | None], meters: Meters) -> Runner:
        return GroupRunner(
            engine, renderer, rewards, version, plans, rollout.group_timeout_s, meters, rollout.episode
        )

    await _work(experiment, name, engine.sink, engine.wait_failed, runner)


async def _serve_recorded(experiment: RolloutExperiment, name: str, folder: str) -> None:
    """Without an engine, which then cannot fail either."""
    groups = read_groups(Path(folder))
    logger.info("rollout server %s gives out %d recorded groups, and generates nothing", name, len(groups))
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_failed() -> str:
        return await never

    with closing(ReceivingSink(experiment.sync.transfer_timeout_s)) as sink:
        await _work(experiment, name, sink, wait_failed, partial(RecordedGroups, groups))


async def _work(
    experiment: RolloutExperiment,
    name: str,
    weights: WeightSink,
    wait_failed: Callable[[], Awaitable[str]],
    make_runner: Callable[[Callable[[], int | None], Meters], Runner],
) -> None:
    """What serves, joined with buffer and learner, until something ends it."""
    rollout, meters = experiment.rollout, Meters(name)
    keys = {peer: client_keys(experiment.security.keys, "rollout", peer) for peer in ("buffer", "learner")}
    sink = MeteredSink(weights, meters)
    receiver = Receiver(experiment.sync, experiment.name, name, sink, keys["learner"], meters.counted)
    runner = make_runner(lambda: receiver.version, meters)
    metrics_path = Path(experiment.run_dir) / "metrics" / f"rollout-{name}.jsonl"
    buffer = experiment.buffer
    to_buffer = BufferClient(buffer.address, "rollout", experiment.name, name, FOR_EVER, keys["buffer"])
    async with to_buffer as client:
        renew_period_s = min(RENEW_S, buffer.lease_timeout_s / 4)
        loop = RolloutLoop(client, receiver, runner, rollout.max_groups, renew_period_s, meters)
        logger.info("rollout server %s is up: up to %d groups at a time", name, rollout.max_groups)
        stillness = Stillness(experiment.logging.stalled_s)
        written = meters.write(metrics_path, lambda: receiver.version, stillness)
        await first_of(
            asyncio.create_task(_join(experiment, client, loop)),
            asyncio.create_task(_engine_lost(wait_failed)),
            asyncio.create_task(unending(receiver.run())),
            asyncio.create_task(unending(written)),
            asyncio.create_task(signalled("handing the leases back")),
        )
    logger.info("rollout server %s ends: %d groups, %d tokens", name, meters.groups, meters.tokens)


async def _engine_lost(wait_failed: Callable[[], Awaitable[str]]) -> None:
    raise EngineFailed(await wait_failed())


def _engine(experiment: RolloutExperiment, name: str) -> Engine:
    from rollout.vllm_engine import VLLMEngine, server_seed

    sampling = experiment.rollout.sampling
    seed = server_seed(experiment.seed, name)
    rollout = experiment.rollout
    return VLLMEngine(experiment.model, rollout.engine, sampling.stop, seed, rollout.on_update)
