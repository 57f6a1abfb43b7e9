"""The rollout server as a process: what it is made of, in which order it starts, and what ends it."""

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from buffer.client import BufferClient
from buffer.errors import Refusal
from buffer.experiment import ConfigError
from buffer.rendering import Renderer
from rollout.config import RolloutExperiment
from rollout.engine import Engine, EngineFailed
from rollout.groups import GroupRunner, SamplingPlan
from rollout.loop import RolloutLoop
from rollout.metrics import MeteredSink, Meters
from rollout.reward_pool import RewardPool
from sync.errors import SyncError
from sync.receiver import Receiver

logger = logging.getLogger(__name__)

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
        logger.error("rollout server %s stops: %s", name, error)
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
        max_tokens = evaluation.max_tokens or sampling.max_tokens
        plans["eval"] = SamplingPlan(evaluation.samples, evaluation.temperature, max_tokens)
    for kind, plan in plans.items():
        if plan.max_tokens >= experiment.model.max_length:
            key = "rollout.sampling.max_tokens" if kind == "train" else "eval.max_tokens"
            raise ConfigError(
                f"{key}: {plan.max_tokens} new tokens leave no room for a prompt in "
                f"model.max_length={experiment.model.max_length}; lower the one or raise the other"
            )
    return plans


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: There is none.
    """
    from transformers import AutoTokenizer

    if not (Path(path) / "config.json").exists():
        raise ConfigError(f"model.path: {path} has no config.json; expected a Hugging Face model folder")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: no tokenizer: {str(error).splitlines()[0]}") from None


async def _serve(experiment: RolloutExperiment, name: str) -> None:
    plans = sampling_plans(experiment)
    renderer = Renderer(
        load_tokenizer(experiment.model.path), experiment.model.max_length, experiment.data.system_prompt
    )
    async with AsyncExitStack() as stack:
        # Rewards first: a function that cannot be imported is told at once, not half a minute later.
        rewards = RewardPool(experiment.rollout.reward)
        stack.push_async_callback(rewards.close)
        await rewards.start()
        engine = _engine(experiment, name)
        stack.push_async_callback(engine.close)
        await engine.start()
        await serve_with(experiment, name, engine, rewards, renderer, plans)


async def serve_with(
    experiment: RolloutExperiment,
    name: str,
    engine: Engine,
    rewards: RewardPool,
    renderer: Renderer,
    plans: dict[str, SamplingPlan],
) -> None:
    """Join the buffer and the learner with an engine that is up, and work until something ends it."""
    rollout = experiment.rollout
    meters = Meters(name)
    receiver = Receiver(experiment.sync, experiment.name, name, MeteredSink(engine.sink, meters))
    runner = GroupRunner(
        engine, renderer, rewards, lambda: receiver.version, plans, rollout.group_timeout_s, meters
    )
    metrics_path = Path(experiment.run_dir) / "metrics" / f"rollout-{name}.jsonl"
    buffer = experiment.buffer
    async with BufferClient(buffer.address, "rollout", experiment.name, name) as client:
        renew_period_s = min(RENEW_S, buffer.lease_timeout_s / 4)
        loop = RolloutLoop(client, receiver, runner, rollout.max_groups, renew_period_s, meters)
        logger.info("rollout server %s is up: up to %d groups at a time", name, rollout.max_groups)
        await _first_of(
            asyncio.create_task(loop.run()),
            asyncio.create_task(_engine_lost(engine)),
            asyncio.create_task(_unending(receiver.run())),
            asyncio.create_task(_unending(meters.write(metrics_path, lambda: receiver.version))),
            asyncio.create_task(_signalled()),
        )
    logger.info("rollout server %s ends: %d groups, %d tokens", name, meters.groups, meters.tokens)


async def _first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait until one ends, end the others in the order given, and raise what went wrong, if anything did."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        await asyncio.wait([task])
    for task in sorted(done, key=tasks.index):
        error = task.exception() if not task.cancelled() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            raise error


async def _unending(work: Coroutine[Any, Any, object]) -> None:
    await work
    raise AssertionError("a background task of the server ended before the server did")


async def _engine_lost(engine: Engine) -> None:
    raise EngineFailed(await engine.wait_failed())


async def _signalled() -> None:
    """Wait for SIGTERM or SIGINT. A second one ends the process at once; its guard ends the engine."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def arrive(number: signal.Signals) -> None:
        logger.info("%s: handing the leases back", number.name)
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        arrived.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrive, number)
    await arrived.wait()


def _engine(experiment: RolloutExperiment, name: str) -> Engine:
    from rollout.vllm_engine import VLLMEngine, server_seed

    sampling = experiment.rollout.sampling
    seed = server_seed(experiment.seed, name)
    return VLLMEngine(experiment.model, experiment.rollout.engine, sampling.stop, seed)
