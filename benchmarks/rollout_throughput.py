"""What does the rollout server cost over bare vLLM? Tokens per second of both, in turns, on one engine.

The server's side is all of it: leases and durable acknowledgements over ZeroMQ from a buffer in its own
process, chat template, rewards in their own process, groups. The bare side hands prompts of the same data,
already rendered, with the same sampling parameters to the very same AsyncLLM. Weights are a label here: no
learner runs.

    python benchmarks/rollout_throughput.py [--rounds 5] [--groups 24] [--group-size 8] [--new-tokens 48]
"""

import argparse
import asyncio
import contextlib
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml
from record import write_result

from buffer.client import BufferClient
from buffer.experiment import load
from buffer.processor import native_dtype
from buffer.rendering import Renderer
from buffer.tokenizers import load_tokenizer
from rollout.config import FunctionReward, RolloutExperiment
from rollout.engine import Request
from rollout.groups import GroupRunner
from rollout.loop import RolloutLoop
from rollout.metrics import Meters
from rollout.reward_pool import RewardPool
from rollout.service import sampling_plans
from rollout.tasks import addition
from rollout.total_reward import FunctionSource, TotalReward
from rollout.vllm_engine import VLLMEngine

MODEL = ".cache/models/SmolLM2-135M-Instruct"


class LabelledWeights:
    """Stands in for the receiver: every version is the weights that the engine started with."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.version = 0

    async def wait_first_version(self) -> int:
        return self.version

    async def become(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self.version = version


def experiment_file(folder: Path, options: argparse.Namespace) -> Path:
    """One version's worth of groups may be in hand: each round is started by publishing the next version."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    experiment = {
        "name": "rollout-throughput",
        "run_dir": str(folder / "run"),
        "model": {"path": MODEL, "max_length": 512, "dtype": options.dtype},
        "data": {"train": {"kind": "function", "path": "rollout.tasks.addition:train"}},
        "buffer": {
            "address": f"tcp://127.0.0.1:{port}",
            "groups_per_batch": options.groups,
            "max_staleness": 0,
        },
        "rollout": {
            "group_size": options.group_size,
            "max_groups": options.groups,
            "sampling": {"max_tokens": options.new_tokens},
        },
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


async def serve_round(client: BufferClient, weights: LabelledWeights, index: int) -> tuple[int, float]:
    """Publish, so that the server may lease one batch; wait until the batch is on disk. Tokens, seconds."""
    await weights.become(index)
    start = time.perf_counter()
    await client.published(index)
    batch = await client.batch(index, 0, 1, timeout_s=600)
    seconds = time.perf_counter() - start
    assert batch is not None
    return sum(int(t.loss_mask.sum()) for group in batch.groups for t in group.trajectories), seconds


async def bare_round(engine: VLLMEngine, prompts: list[list[int]], options: argparse.Namespace, index: int):
    """The same number of requests, all at once, nothing done with the answers. Tokens, seconds."""
    from vllm.inputs.engine import tokens_input

    async def one(number: int, prompt_ids: list[int]) -> int:
        request = Request(f"bare-{index}-{number}", prompt_ids, options.new_tokens, 1.0, index)
        prompt = tokens_input(prompt_ids, cache_salt=str(index))
        answers = engine.llm.generate(prompt, engine.sampling_params(request), request.request_id)
        return [len(answer.outputs[0].token_ids) async for answer in answers][-1]

    requests = [prompt_ids for prompt_ids in prompts for _ in range(options.group_size)]
    start = time.perf_counter()
    tokens = await asyncio.gather(*(one(number, ids) for number, ids in enumerate(requests)))
    return sum(tokens), time.perf_counter() - start


def service_cpu_seconds() -> float:
    """CPU time so far of all but the engine's own processes: this one, the buffer and the rewards.

    Unlike tokens per second it hardly depends on what else the machine is doing.
    """
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    outside = [p for p in processes if not "".join(p.cmdline()[:1]).startswith("VLLM::")]
    return sum(p.cpu_times().user + p.cpu_times().system for p in outside)


async def measure(experiment: RolloutExperiment, options: argparse.Namespace) -> dict[str, list[Any]]:
    pool = RewardPool(
        FunctionReward(function="rollout.rewards:exact_number"),
        "rollout.rewards.answer",
        Path(experiment.run_dir) / "printed",
    )
    await pool.start()
    rewards = TotalReward({"answer": (1.0, FunctionSource(pool))})
    engine = VLLMEngine(experiment.model, experiment.rollout.engine)
    await engine.start()
    weights, meters = LabelledWeights(engine.llm), Meters("bench")
    renderer = Renderer(load_tokenizer("--model", MODEL), experiment.model.max_length)
    plans = sampling_plans(experiment)
    runner = GroupRunner(engine, renderer, rewards, lambda: weights.version, plans, 600, meters)
    prompts = [renderer.render(row, options.new_tokens) for row in addition.train(experiment.seed)]
    address, rounds = experiment.buffer.address, {"server": [], "bare": []}
    async with (
        BufferClient(address, "rollout", experiment.name, "bench") as server_client,
        BufferClient(address, "learner", experiment.name, "bench-learner") as client,
    ):
        loop = RolloutLoop(server_client, weights, runner, experiment.rollout.max_groups, 5.0, meters)
        await weights.become(0)
        serving = asyncio.create_task(loop.run())
        for index in range(options.rounds + 1):
            start = index * options.groups % (len(prompts) - options.groups)
            chosen = prompts[start : start + options.groups]
            sides = [
                ("server", lambda i=index: serve_round(client, weights, i)),
                ("bare", lambda i=index, c=chosen: bare_round(engine, c, options, i)),
            ]
            for name, side in sides if index % 2 else reversed(sides):
                before = service_cpu_seconds()
                tokens, seconds = await side()
                spent = service_cpu_seconds() - before
                print(
                    f"round {index} {name}: {tokens} tokens, {seconds:.2f} s, {spent:.2f} CPU s", flush=True
                )
                if index:  # the first round warms both up
                    rounds[name].append((tokens, round(seconds, 3), round(spent, 3)))
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    assert not meters.failures, meters.failures
    await engine.close()
    await pool.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("rounds", 5), ("groups", 24), ("group-size", 8), ("new-tokens", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default=native_dtype())
    options = parser.parse_args()
    logging.basicConfig(level="WARNING")
    with tempfile.TemporaryDirectory() as folder:
        path = experiment_file(Path(folder), options)
        buffer = subprocess.Popen([sys.executable, "-m", "buffer", str(path), "logging.level=WARNING"])
        try:
            rounds = uvloop.run(measure(load(path, [], RolloutExperiment), options))
        finally:
            buffer.terminate()
            buffer.wait(30)
    rates = {name: sum(r[0] for r in runs) / sum(r[1] for r in runs) for name, runs in rounds.items()}
    cpu = {name: 1000 * sum(r[2] for r in runs) / sum(r[0] for r in runs) for name, runs in rounds.items()}
    ratios = [s[0] / s[1] / (b[0] / b[1]) for s, b in zip(rounds["server"], rounds["bare"], strict=True)]
    write_result(
        "rollout_throughput",
        {
            "claim": "The rollout server generates at least 0.97 of the tokens/s of the bare engine",
            "ratio": rates["server"] / rates["bare"],
            "ratio_median_of_rounds": statistics.median(ratios),
            "server_tokens_per_s": rates["server"],
            "bare_tokens_per_s": rates["bare"],
            "server_cpu_s_per_1000_tokens": cpu["server"],
            "bare_cpu_s_per_1000_tokens": cpu["bare"],
            "tokens_seconds_cpu_seconds": rounds,
            "settings": vars(options),
        },
    )


if __name__ == "__main__":
    main()
