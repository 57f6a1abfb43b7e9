"""A pipeline killed with -9 inside its stages: the same command goes on inside the stage, and does none of
those that are done again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch.guard import children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = {"sft": 300, "rl": 16}
EVERY = {"sft": 20, "rl": 4}
COMMAND = [str(Path(sys.executable).with_name("slipstream")), "pipeline", "pipeline.yaml"]


@pytest.fixture
def folder(make_experiment, made_model) -> Path:
    rl = {"steps": STEPS["rl"], "optimizer": {"lr": 1e-3}, "checkpoint": {"every": EVERY["rl"]}}
    folder = make_experiment("pipeline-kill", learner=rl)
    rows = [{"prompt": f"t{i} t{i + 1}", "response": f"t{i + 2} t{i + 3}"} for i in range(3, 43)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    sft = {
        "name": "sft",
        "run_dir": "unused",
        "model": {"path": str(made_model), "max_length": 64, "dtype": "float32"},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
        "stage": {"kind": "sft"},
        "learner": {"steps": STEPS["sft"], "batch_size": 4, "checkpoint": {"every": EVERY["sft"]}},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(sft))
    stages = [
        {"name": "sft", "command": "sft", "config": "sft.yaml"},
        {"name": "rl", "command": "run", "config": "experiment.yaml", "overrides": {"model.path": "{sft}"}},
        {
            "name": "scores",
            "command": "evaluate",
            "config": "experiment.yaml",
            "overrides": {"model.path": "{rl}"},
        },
    ]
    (folder / "pipeline.yaml").write_text(yaml.safe_dump({"name": "p", "run_dir": "all", "stages": stages}))
    return folder


def steps(folder: Path, stage: str) -> list[int]:
    path = folder / "all" / stage / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def start(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(COMMAND, cwd=folder, stdout=output, stderr=output)


def told(folder: Path) -> str:
    return (folder / "output.txt").read_text(errors="replace")[-3000:]


def working_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.readlink(process / "cwd") == str(folder):
                    found.append((process / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return [command for command in found if command]


def kill_inside(folder: Path, stage: str, at: int) -> None:
    """Start, and at a step of the stage kill its command and the pipeline's, without a word."""
    pipeline = start(folder)
    deadline = time.monotonic() + 300
    while max(steps(folder, stage), default=0) < at:
        assert pipeline.poll() is None, told(folder)
        assert time.monotonic() < deadline, told(folder)
        time.sleep(0.01)
    (command,) = children()[pipeline.pid]
    pipeline.kill()
    os.kill(command, signal.SIGKILL)
    pipeline.wait()
    while working_in(folder):
        assert time.monotonic() < deadline, working_in(folder)
        time.sleep(0.1)
    assert not (folder / "all" / stage / "model").exists(), "inside the stage, not behind it"


def resumed_from(folder: Path, stage: str) -> list[int]:
    log = (folder / "all" / stage / "logs/learner.log").read_text()
    return [int(line.rsplit("step-", 1)[1][:6]) for line in log.splitlines() if "resumed from" in line]


@pytest.mark.long
def test_the_same_command_goes_on_inside_the_stage_that_was_killed(folder):
    kill_inside(folder, "sft", EVERY["sft"] + 5)
    kill_inside(folder, "rl", EVERY["rl"] + 2)
    assert all(at >= EVERY["sft"] for at in resumed_from(folder, "sft"))
    assert len(resumed_from(folder, "sft")) == 1
    assert steps(folder, "sft")[-STEPS["sft"] :] == list(range(1, STEPS["sft"] + 1)), "every step once"
    made = {p: p.stat().st_mtime_ns for p in (folder / "all/sft").rglob("*") if p.is_file()}
    weights = folder / "all/sft/model/model.safetensors"
    assert weights in made

    last = start(folder)
    assert last.wait(400) == 0, told(folder)
    (again,) = resumed_from(folder, "rl")
    assert again >= EVERY["rl"]
    assert steps(folder, "rl") == list(range(1, STEPS["rl"] + 1)), "every step once, in order"
    assert (folder / "all/scores/evaluation/results.json").exists()
    kept = [p for p in made if p.parent.name in ("model", "checkpoints") or p.name == "metrics.jsonl"]
    assert all(p.stat().st_mtime_ns == made[p] for p in kept), "a stage that is done is not done again"
    assert len(resumed_from(folder, "sft")) == 1
    assert not working_in(folder)
