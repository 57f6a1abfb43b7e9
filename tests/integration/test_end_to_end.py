"""The whole run as a user starts it: every service real, a made model that must learn, a kill on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = 14


@pytest.fixture(scope="module")
def experiment(make_experiment) -> Path:
    return make_experiment("end-to-end", learner={"steps": STEPS}, eval={"every": 3, "samples": 4})


def start(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).parent / "slipstream"), "run", "experiment.yaml", *overrides]
    output = (folder / "output.txt").open("a")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, text=True)


def rows(folder: Path) -> list[dict]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(folder: Path, run: "subprocess.Popen[str]", step: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(row["step"] >= step for row in rows(folder)):
        assert run.poll() is None, (folder / "output.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.5)


def learner_ranks(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                here = os.readlink(entry / "cwd") == str(folder)
            except OSError:
                continue
            if here and "learner" in command and "learner.torchrun" not in command:
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(600)
def test_a_run_whose_learner_is_killed_resumes_and_learns(experiment: Path):
    first = start(experiment)
    wait_for_step(experiment, first, 5, 240)
    ranks = learner_ranks(experiment)
    assert ranks
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    assert first.wait(120) != 0
    told = (experiment / "output.txt").read_text()
    assert re.search(r"^learner .*; whole log: ", told, re.M), told[-2000:]
    assert "  learner │ " in told, "with the last lines of its log"
    second = start(experiment)
    assert second.wait(300) == 0, (experiment / "output.txt").read_text()[-3000:]
    made = rows(experiment)
    assert [row["step"] for row in made] == list(range(1, STEPS + 1)), "every step once, in order"
    assert max(row["staleness/max"] for row in made) <= 2
    rhos = [row["rho/mean"] for row in made if row["gradient_fraction"]]
    assert len(rhos) > STEPS // 2
    assert all(abs(rho - 1) < 0.2 for rho in rhos)
    rewards = [row["reward/mean"] for row in made]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert (experiment / "run/model/model.safetensors").exists()
    assert (experiment / "run/report/summary.md").exists()
    lines = [json.loads(line) for line in (experiment / "run/eval.jsonl").read_text().splitlines()]
    evaluated = {line["version"]: line["completions"] for line in lines if line["kind"] == "score"}
    assert evaluated == dict.fromkeys((0, 3, 6, 9, 12, STEPS), 40 * 4), "before, during and after"
    others = [
        line for line in lines if line["kind"] == "completion" and line["sampled_by"] != 2 * [line["version"]]
    ]
    assert not others, "sampled by the version that is evaluated and by no other"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_finished_run_trains_on_when_it_is_given_more_steps(make_experiment):
    folder = make_experiment("more-steps")
    for steps in (2, 4):
        run = start(folder, f"learner.steps={steps}")
        assert run.wait(200) == 0, (folder / "output.txt").read_text()[-3000:]
        assert [row["step"] for row in rows(folder)] == list(range(1, steps + 1))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_whose_reward_always_fails_ends_and_says_why(make_experiment):
    """The data would go round for ever."""
    folder = make_experiment("failing")
    (folder / "my_reward.py").write_text(
        "def share_of_even_words(text, row):\n    raise KeyError('number')\n"
    )
    run = start(folder)
    assert run.wait(300) == 1, (folder / "output.txt").read_text()[-3000:]
    told = (folder / "output.txt").read_text()
    assert "prompts were all given up (reward_raised" in told
    assert "KeyError: 'number'" in told, "the screen has the server's warnings"
    assert rows(folder) == []
