"""The learner with a scripted buffer and a sender that only remembers: a program, run by torchrun or alone.

    python scripted_learner.py JOBS

`JOBS` is a JSON list of runs, made one after the other in the same processes: `config`, the folder `out`, and
`options`. `out` gets what was published last (safetensors), what the buffer was told in which order, and the
logs. At batch `kill_at` a rank kills itself with SIGKILL, at `stop_at` with SIGTERM, at `ends_at` the data
ends; of `kill_in`, a moment of KILLED_IN and a number, it survives so many and kills itself in the next.
`frontier` is the buffer's. With `own_samples`, the model's folder, a batch is what the published policy
answers, and its reward the share of even tokens. Each batch of `gates` comes once there is a file
`open-INDEX` in the folder. A collective takes at most `collective_s`, and the buffer answers the first
question of each kind, or of those in `silent`, after `silent_s`. `bound` is its max_staleness.
"""

import asyncio
import importlib
import itertools
import json
import logging
import math
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from buffer.config import BufferConfig
from buffer.errors import DataExhausted
from buffer.experiment import load
from buffer.records import Batch, Group, Trajectory
from learner.config import LearnerExperiment

VOCABULARY = 128
KILLED_IN = {
    "checkpoint": ("learner.checkpoint", "complete"),
    "export": ("learner.safetensors_folder", "_write_rest"),
}
"""Moment → the function that is called then: tensors of a checkpoint, or of the exported model, are in files,
and what makes them whole is not."""


def group(rng: np.random.Generator, name: str, version: int) -> Group:
    prompt = rng.integers(0, VOCABULARY, rng.integers(2, 9))
    trajectories = []
    for index in range(4):
        length = int(rng.integers(1, 12))
        ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]).astype(np.int32)
        mask = np.array([0] * len(prompt) + [1] * length, np.uint8)
        if length > 4:
            mask[len(prompt) + 2] = 0  # a tool's token inside the completion
        noise = rng.normal(-math.log(VOCABULARY), 0.05, len(ids)).astype(np.float32)
        reward = float(rng.integers(0, 3))
        # One part only a few completions have: some ranks then know its name, and some do not.
        parts = {"drawn": reward} | ({"rare": 2.0} if name.endswith("/0") and index == 0 else {})
        trajectories.append(
            Trajectory(
                index=index,
                token_ids=ids,
                loss_mask=mask,
                behavior_logprobs=noise * mask,
                versions=(mask * version).astype(np.int32),
                reward=reward,
                reward_parts=parts,
                finish_reason="stop",
                metadata={"text": name},
            )
        )
    return Group(name, "lease", name, "train", tuple(trajectories))


def own_groups(weights: Path, model: str, index: int) -> list[Group]:
    """Six prompts with four completions each, sampled from weights in the model folder's architecture."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.load_state_dict(load_file(weights), strict=False)
    draw = torch.Generator().manual_seed(index)
    prompts = torch.randint(0, VOCABULARY, (6, 3), generator=draw)
    ids, known = prompts.repeat_interleave(4, 0), []
    with torch.no_grad():
        for _ in range(8):
            logprobs = policy(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1, generator=draw)
            ids = torch.cat([ids, token], 1)
            known.append(logprobs.gather(1, token))
    behavior = torch.cat([torch.zeros(24, 3), *known], 1).numpy()
    mask = np.array([0] * 3 + [1] * 8, np.uint8)
    made = [
        Trajectory(
            index=row % 4,
            token_ids=ids[row].numpy().astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=behavior[row],
            versions=(mask * index).astype(np.int32),
            reward=float((ids[row, 3:] % 2 == 0).float().mean()),
            reward_parts={},
            finish_reason="length",
        )
        for row in range(24)
    ]
    names = [f"{index}/{n}" for n in range(6)]
    return [Group(n, "lease", n, "train", tuple(made[4 * i : 4 * i + 4])) for i, n in enumerate(names)]


class ScriptedBuffer:
    """Batch i is the same for everybody who asks, however it is sharded."""

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self._out = out
        self._options = options
        self._answered: set[str] = set()

    async def _silence(self, verb: str) -> None:
        if verb not in self._answered and verb in self._options.get("silent", [verb]):
            self._answered.add(verb)
            await asyncio.sleep(self._options.get("silent_s", 0))

    async def __aenter__(self) -> "ScriptedBuffer":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None:
        if dp_rank:  # the first one's wait is everybody's
            await self._silence("batch")
        if index == self._options.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._options.get("stop_at"):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        gate = self._out / f"open-{index}"
        while index in self._options.get("gates", []) and not gate.exists():  # noqa: ASYNC110  a file
            await asyncio.sleep(0.02)
        if index == self._options.get("ends_at"):
            raise DataExhausted("the epochs end")
        rng = np.random.default_rng(index)
        if model := self._options.get("own_samples"):
            groups = own_groups(self._out / "published.safetensors", model, index)
            return Batch(index, tuple(groups), {"groups": 6, "tokens": sum(g.num_tokens for g in groups)})
        groups = [group(rng, f"{index}/{n}", max(0, index - n % 3)) for n in range(6)]
        tokens = sum(g.num_tokens for g in groups)
        return Batch(index, tuple(groups[dp_rank::dp_size]), {"groups": 6, "tokens": tokens})

    async def published(self, version: int) -> None:
        await self._silence("published")
        self._note("published", version)

    async def committed(self, index: int) -> None:
        await self._silence("committed")
        self._note("committed", index)

    async def finished(self, version: int) -> None:
        self._note("finished", version)

    async def status(self) -> dict[str, object]:
        await self._silence("status")
        bound = self._options.get("bound", BufferConfig().max_staleness)
        told = {"frontier": self._options.get("frontier", 0), "over": True, "max_staleness": bound}
        return told | {"temperature": self._options.get("temperature", 1.0), "wasted_tokens": 0}

    def _note(self, what: str, number: int) -> None:
        with (self._out / "told.jsonl").open("a") as file:
            file.write(json.dumps([what, number]) + "\n")


class RememberingSender:
    def __init__(self, out: Path) -> None:
        self._out = out
        self._looks = 0

    def __enter__(self) -> "RememberingSender":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wants_publish(self) -> bool:
        return False

    def wait_for_members(self, count: int, timeout_s: float) -> bool:
        return True

    def publish(self, version, specs, tensors):
        from safetensors.torch import save_file

        from sync.publisher import PublishReport

        named = {name: tensor.detach().clone().contiguous() for name, tensor in tensors}
        assert [s.name for s in specs] == list(named)
        save_file(named, self._out / "published.safetensors")
        with (self._out / "told.jsonl").open("a") as file:
            file.write(json.dumps(["sent", version]) + "\n")
        self._report = PublishReport(version, ["server-0"])
        return self._report

    def wait_loaded(self):
        return self._report

    def counted(self):
        """Ten tokens more at every look, of which one for nothing."""
        self._looks += 1
        return {"tokens": 10 * self._looks, "wasted_tokens": self._looks}


def run(job: dict[str, Any]) -> None:
    from learner.service import serve

    if "RANK" in os.environ:
        _join_world(job["out"], job["options"].get("collective_s", 300.0))
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(out / f"log-{os.environ.get('RANK', '0')}.txt")
    logging.getLogger().addHandler(handler)
    experiment = load(job["config"], [], LearnerExperiment)
    if "kill_in" in job["options"]:
        _die_in(*job["options"]["kill_in"])
    serve(
        experiment,
        lambda _: ScriptedBuffer(out, job["options"]),
        lambda _: RememberingSender(out),
    )
    logging.getLogger().removeHandler(handler)


def _die_in(moment: str, survived: int) -> None:
    name, function = KILLED_IN[moment]
    module = importlib.import_module(name)
    whole, times = getattr(module, function), itertools.count()

    def dying(*arguments: Any, **named: Any) -> Any:
        if next(times) == survived:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **named)

    setattr(module, function, dying)


def _join_world(name: str, collective_s: float) -> None:
    """Start the processes' group under a name of its own: they start one for every run."""
    import torch.distributed as dist

    from learner import parallel

    parallel.COLLECTIVE_S = collective_s

    of = os.environ
    store = dist.TCPStore(of["MASTER_ADDR"], int(of["MASTER_PORT"]), is_master=False)
    world = {"rank": int(of["RANK"]), "world_size": int(of["WORLD_SIZE"])}
    timeout = timedelta(seconds=collective_s)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), timeout=timeout, **world)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)


if __name__ == "__main__":
    main()
