"""The scorer as a process: what it is made of, in which order it starts, and what ends it."""

import asyncio
import json
import logging
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TextIO

import uvloop

from buffer.client import FOR_EVER, BufferClient
from buffer.errors import Refusal
from buffer.keys import client_keys, server_keys
from buffer.stacks import Stillness
from rollout.config import RolloutExperiment
from rollout.endings import first_of, signalled, unending
from rollout.engine import EngineFailed
from rollout.engine_log import spared_terminal
from rollout.scorer.engine import PoolingEngine
from rollout.scorer.folder import model_reward
from rollout.scorer.local import open_model
from rollout.scorer.server import ScorerServer

logger = logging.getLogger(__name__)

OVER_POLL_S = 1.0
"""Between two looks whether the run is over; the buffer stays for three seconds after that."""
REPORT_S = 2.0


def run(experiment: RolloutExperiment, name: str) -> None:
    """Serve until the run is over or a signal comes.

    Args:
        experiment: The run.
        name: Of the reward in `rollout.rewards`.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        uvloop.run(_serve(experiment, name))
    except (EngineFailed, Refusal, OSError, ValueError) as error:
        logger.error("scorer %s stops: %s", name, error)
        sys.exit(1)


async def _serve(experiment: RolloutExperiment, name: str) -> None:
    reward = model_reward(experiment.rollout, experiment.model, name)
    keys = server_keys(experiment.security.keys, "scorer")
    stillness = Stillness(experiment.logging.stalled_s)
    stillness.see("starting")
    logger.info("scorer %s starts vLLM with %s: half a minute or so", name, reward.model)
    async with AsyncExitStack() as stack:
        with spared_terminal(Path(experiment.run_dir) / "logs" / f"{name}.vllm.log"):
            engine, renderer, welcome = await open_model(
                name, reward, experiment.model, experiment.data.system_prompt, stack
            )
        # It listens once it can answer: until then, whoever asks waits and says for whom.
        server = ScorerServer(engine, renderer, welcome, experiment.name, name, reward.address, keys)
        stack.callback(server.close)
        logger.info("scorer %s is up at %s: %s", name, reward.address, reward.model)
        lost = asyncio.create_task(_engine_lost(engine))
        await serve_until_over(experiment, name, server, lost, stillness)
    logger.info("scorer %s ends: %d scores", name, server.traffic.scores)


async def serve_until_over(
    experiment: RolloutExperiment,
    name: str,
    server: ScorerServer,
    lost: asyncio.Task[None],
    stillness: Stillness,
) -> None:
    """Answer until the run is over, a signal comes, or the engine is lost."""
    path = Path(experiment.run_dir) / "metrics" / f"scorer-{name}.jsonl"
    address = experiment.buffer.address
    keys = client_keys(experiment.security.keys, "scorer", "buffer")
    to_buffer = BufferClient(address, "observer", experiment.name, f"scorer-{name}", FOR_EVER, keys)
    async with to_buffer as buffer:
        await first_of(
            asyncio.create_task(unending(server.run())),
            lost,
            asyncio.create_task(_run_over(buffer)),
            asyncio.create_task(unending(report(path, server, stillness))),
            asyncio.create_task(signalled("stopping")),
        )


async def _run_over(buffer: BufferClient) -> None:
    while not (await buffer.status())["over"]:  # noqa: ASYNC110  the buffer is another process
        await asyncio.sleep(OVER_POLL_S)


async def _engine_lost(engine: PoolingEngine) -> None:
    raise EngineFailed(await engine.wait_failed())


async def report(path: Path, server: ScorerServer, stillness: Stillness) -> None:
    """Append a line every `REPORT_S`, and a last one when cancelled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                _append(file, server)
                if server.traffic.in_hand:
                    stillness.see(server.traffic.scores, server.traffic.failed)
                else:
                    stillness.end()  # it is no fault of a scorer's that nobody asks
        finally:
            stillness.end()
            _append(file, server)


def _append(file: TextIO, server: ScorerServer) -> None:
    file.write(json.dumps({"time": time.time(), **server.metrics()}) + "\n")
    file.flush()
