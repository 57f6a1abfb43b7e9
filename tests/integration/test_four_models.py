"""PPO with four models in one run: a policy, its frozen reference, a reward model behind a scorer, and a
value model that starts from that reward model."""

import json
import math
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from buffer.groups import decode_group
from buffer.records import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
STEPS, LAMBDA, BETA, TARGET = 3, 0.9, 0.05, 0.5


@pytest.fixture(scope="module")
def run(make_experiment, made_reward_model) -> Path:
    """Of a run whose only reward is the reward model's score; its buffer still has what was trained."""
    engine = {"kv_cache_gib": 0.25, "max_num_seqs": 32}
    helpful = {"model": str(made_reward_model), "dtype": "float32", "engine": engine}
    rollout = {
        "group_size": 4,
        "sampling": {"max_tokens": 8},
        "engine": engine,
        "rewards": {"helpful": helpful | {"address": "tcp://127.0.0.1:0"}},
    }
    kl = {"coefficient": BETA, "placement": "reward", "target": TARGET, "horizon": 100}
    learner = {
        "steps": STEPS,
        "optimizer": {"lr": 3e-3},
        "algorithm": {"advantage": "gae", "kl": kl},
        "value": {"path": str(made_reward_model), "gae_lambda": LAMBDA, "optimizer": {"lr": 3e-3}},
        "checkpoint": {"every": STEPS},
    }
    folder = make_experiment("four", rollout=rollout, learner=learner, eval=None)
    done = subprocess.run(
        [SLIPSTREAM, "run", "experiment.yaml"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


@pytest.fixture(scope="module")
def rows(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reward_model(made_reward_model):
    return AutoModelForSequenceClassification.from_pretrained(made_reward_model, dtype=torch.float32)


def trained(run: Path, batch: int) -> list[Trajectory]:
    """The completions of a batch, as the learner got them."""
    with sqlite3.connect(run / "buffer.sqlite") as database:
        frames = database.execute(
            "SELECT meta, arrays FROM members JOIN payloads USING (sequence) WHERE batch = ?", [batch]
        ).fetchall()
    return [t for frame in frames for t in decode_group(*frame).trajectories]


@torch.no_grad()
def scores(model, trajectory: Trajectory) -> np.ndarray:
    """What the reward model's head says behind each token; a completion's score stands behind its last."""
    ids = torch.tensor(trajectory.token_ids[None], dtype=torch.int64)
    return (model.model(ids).last_hidden_state[0] @ model.score.weight[0]).double().numpy()


def test_every_reward_is_the_scorers(run, rows, reward_model):
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for step, row in enumerate(rows):
        batch = trained(run, step)
        assert len(batch) == 16
        expected = [float(scores(reward_model, t)[-1]) for t in batch]
        assert max(map(abs, expected)) > 2, "the case is to tell something"
        assert [t.reward for t in batch] == pytest.approx(expected, abs=1e-4)
        assert row["reward_parts/helpful"] == pytest.approx(sum(expected) / 16, abs=1e-4)
        assert row["reward/mean"] == row["reward_parts/helpful"]
    last = json.loads((run / "metrics/scorer-helpful.jsonl").read_text().splitlines()[-1])
    assert last["scores"] >= 16 * STEPS


def test_the_value_model_starts_as_the_reward_model_with_its_head_and_is_trained(
    run, rows, reward_model, made_reward_model
):
    """Its first loss is that of the reward model's own values and of GAE's returns, token by token."""
    losses, returns = [], []
    for trajectory in trained(run, 0):
        (places,) = np.nonzero(trajectory.loss_mask)
        values, ahead = scores(reward_model, trajectory)[places - 1], 0.0
        after = [*values[1:], 0.0]
        gained = [0.0] * (len(values) - 1) + [trajectory.reward]  # at first π is π_ref: no KL in it
        for value, following, reward in reversed(list(zip(values, after, gained, strict=True))):
            ahead = reward + following - value + LAMBDA * ahead
            returns.append(ahead + value)
            losses.append(0.5 * ahead**2)
    assert rows[0]["value/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert rows[0]["value/return_mean"] == pytest.approx(sum(returns) / len(returns), rel=1e-3)
    assert all(math.isfinite(row["value/loss"]) and row["value/grad_norm"] > 0 for row in rows)
    start, end = (load_file(f / "model.safetensors") for f in (made_reward_model, run / "value_model"))
    assert start.keys() == end.keys()
    assert not any(torch.equal(end[name], tensor) for name, tensor in start.items())


def test_the_policy_is_held_near_its_reference_in_every_tokens_reward(rows):
    assert rows[0]["kl/completion"] == pytest.approx(0, abs=1e-5), "at first it is the reference itself"
    assert abs(rows[-1]["kl/completion"]) > 1e-3
    assert rows[0]["kl/coefficient"] == BETA
    for row, following in pairwise(rows):
        off = min(max(row["kl/completion"] / TARGET - 1, -0.2), 0.2)
        assert following["kl/coefficient"] == pytest.approx(row["kl/coefficient"] * (1 + off * 16 / 100))
