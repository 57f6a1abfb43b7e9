"""`slipstream measure`, on the real services: both sides of a run, each alone; `tune` from what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from buffer.recording import read_groups

pytestmark = pytest.mark.slow

STEPS, GROUPS, SLEEP_S = 6, 4, 0.4


def slipstream(folder: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "slipstream"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_side_is_measured_without_the_other(make_experiment):
    folder = make_experiment("measured", learner={"optimizer": {"lr": 3e-3}})
    shown = slipstream(
        folder, "measure", "experiment.yaml", "--steps", str(STEPS), "--train-seconds", str(SLEEP_S)
    )
    assert "alone, the servers take" in shown
    servers, learner = folder / "run/alone/servers", folder / "run/alone/learner"
    slept, trained = rows(servers), rows(learner)
    assert [r["step"] for r in slept] == [r["step"] for r in trained] == list(range(1, STEPS + 1))
    assert all(r["grad_norm"] == 0 and r["time/step"] >= SLEEP_S for r in slept), "nothing is trained"
    assert all(r["grad_norm"] > 0 for r in trained)
    recorded = read_groups(servers / "recorded")
    assert len(recorded) == STEPS * GROUPS
    assert all(t.versions.max() < STEPS for g in recorded for t in g.trajectories), "versions came in"
    given = [t.reward for g in recorded for t in g.trajectories]
    assert sum(r["reward/mean"] for r in trained) / STEPS == pytest.approx(sum(given) / len(given))
    log = "".join(path.read_text() for path in (learner / "logs").glob("server-0*"))
    assert f"{len(recorded)} recorded groups" in log
    assert "starts vLLM" not in log
    told = slipstream(folder, "tune", "experiment.yaml")
    assert "recommended: rollout.servers=" in told
    tuned = json.loads((folder / "run/tuning/tuning.json").read_text())
    assert tuned["own_setting"] == [], "there is no run of the setting itself"
    assert tuned["costs"]["work"]["mean"] > 0
