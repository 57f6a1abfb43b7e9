"""Runs of the learner with a scripted buffer and sender, made from tests and compared with each other.

Starting processes takes most of the time, so all runs of a world size share them (`scripted_learner.py`).
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from hand_started import rows_in
from safetensors.torch import load_file, save_file

from learner.config import LearnerExperiment

PROGRAM = Path(__file__).with_name("scripted_learner.py")
STEPS = 4
COMPARED = (
    *("loss", "grad_norm", "rho/mean", "ess", "kl/k3", "entropy", "staleness/mean"),
    *("reward/mean", "reward_parts/drawn", "reward_parts/rare"),
)


class Run:
    """One run's folder: what it is to do, and what it did."""

    def __init__(self, folder: Path, model: Path, *, options=None, dtype="float32", **learner) -> None:
        self.folder = folder
        self.options = options or {}
        sizes = {"tensor": 1, "pipeline": 1, "expert": 1}
        layout = {**sizes, "distributed_optimizer": False, **learner.pop("layout", {})}
        checkpoint = {"every": 2, "keep": 2, "export": False, **learner.pop("checkpoint", {})}
        if "value" in learner:
            # A language model's folder does: it gets a new score row.
            learner["value"] = {"path": str(model), **learner["value"]}
        self.experiment = {
            "name": "scripted",
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": dtype, "max_length": 64},
            "buffer": {"groups_per_batch": 6},
            "rollout": {"group_size": 4},
            "learner": {
                "steps": STEPS,
                "tokens_per_microbatch": 64,
                "threads": 1,
                "processes": layout["pipeline"] * math.lcm(layout["tensor"], layout["expert"]),
                "parallel": layout,
                # Gradient norms are about 0.7, so that every step is clipped; the last one moves weights too,
                # so that whatever a resume at step 3 loses shows.
                "optimizer": {
                    "lr": 1e-2,
                    "min_lr": 5e-3,
                    "weight_decay": 0.1,
                    "schedule": "linear",
                    "warmup_steps": 2,
                    "clip_grad": 0.4,
                },
                "checkpoint": checkpoint,
                **learner,
            },
            "logging": {"tensorboard": False, "samples_every": 2},
        }

    def job(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        # Several runs may share a folder, one after the other, and all are described before the first.
        config = self.folder / f"config-{self.experiment['learner']['steps']}.yaml"
        config.write_text(yaml.safe_dump(self.experiment))
        return {"config": str(config), "out": str(self.folder / "out"), "options": self.options}

    @property
    def parsed(self):
        return LearnerExperiment.model_validate(self.experiment)

    @property
    def rows(self):
        return rows_in(self.folder / "run/metrics.jsonl")

    @property
    def weights(self):
        return load_file(self.folder / "out/published.safetensors")

    @property
    def values(self):
        """The exported value model's."""
        return load_file(self.folder / "run/value_model/model.safetensors")

    @property
    def log(self):
        return (self.folder / "out/log-0.txt").read_text()

    def told(self, what):
        lines = (self.folder / "out/told.jsonl").read_text().splitlines()
        return [number for name, number in map(json.loads, lines) if name == what]


def learn(ranks: int, runs: list[Run], killed: bool = False) -> None:
    """Make the runs one after the other in one start of so many processes."""
    started = begin(ranks, runs)
    try:
        told, _ = started.communicate(timeout=240)
    finally:
        started.kill()
    assert (started.returncode != 0) == killed, told[-6000:]


def begin(ranks: int, runs: list[Run]) -> "subprocess.Popen[str]":
    """As `learn`, without waiting for it."""
    jobs = runs[0].folder / f"jobs-{len(runs)}.json"
    described = [run.job() for run in runs]
    jobs.write_text(json.dumps(described))
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*start, str(PROGRAM), str(jobs)],
        # As `python -m learner` has it from the root of the repository: `configs` can be imported.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_same(got: Run, expected: Run, rel: float) -> None:
    assert [r["step"] for r in got.rows] == [r["step"] for r in expected.rows]
    for one, two in zip(got.rows, expected.rows, strict=True):
        for key in COMPARED:
            assert one[key] == pytest.approx(two[key], rel=rel, abs=rel / 10), (one["step"], key)
    assert set(got.weights) == set(expected.weights)
    for name, tensor in expected.weights.items():
        assert torch.allclose(got.weights[name], tensor, rtol=rel, atol=rel), name


def make_model(path: Path, layers: int = 2, kv_heads: int = 2) -> Path:
    """A made Llama with 4 heads, of which unless told otherwise each part splits in two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def trained_elsewhere(model: Path, folder: Path) -> Path:
    """The same model, one step of training later."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t + 1e-4 for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def continued(run: Run, model: Path, name: str, **settings) -> Run:
    """A copy of a killed run's folder, to be gone on with."""
    folder = run.folder.with_name(name)
    shutil.copytree(run.folder, folder)
    return Run(folder, model, **settings)


class Learning:
    """A learner that stops before each gated batch until it is opened."""

    def __init__(self, run: Run, ranks: int = 1) -> None:
        self.run = run
        self.process = begin(ranks, [run])

    def until(self, condition, timeout_s=240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0][-3000:]
            assert time.monotonic() < deadline, self.run.log[-3000:]
            time.sleep(0.05)

    def says(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.told(text) >= times)

    def told(self, text: str) -> int:
        log = self.run.folder / "out/log-0.txt"
        return log.read_text().count(text) if log.exists() else 0

    def made(self, steps: int) -> None:
        self.until(lambda: len(self.run.rows) == steps)

    def open(self, index: int) -> None:
        (self.run.folder / f"out/open-{index}").touch()


@contextmanager
def learning(run: Run, ranks: int = 1):
    made = Learning(run, ranks)
    try:
        yield made
        told, _ = made.process.communicate(timeout=120)
        assert made.process.returncode == 0, told[-3000:]
    finally:
        made.process.kill()
