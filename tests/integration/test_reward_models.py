"""Reward models on the real vLLM: scores as transformers gives them, and a whole run with one and a rule."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from buffer.errors import BadMessage
from rollout.scorer.client import ScorerClient
from rollout.scorer.rendering import fingerprint
from rollout.scorer.wire import Ids, Words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
ENGINE = {"kv_cache_gib": 0.25, "max_num_seqs": 32}
RULE = {"function": "my_reward:share_of_even_words", "weight": 1.0}


@pytest.fixture
def rewards(made_reward_model, free_address) -> dict:
    helpful = {"model": str(made_reward_model), "dtype": "float32", "weight": 0.25, "engine": ENGINE}
    return {"even": RULE, "helpful": helpful | {"address": free_address()}}


@pytest.fixture
def experiment(make_experiment, rewards) -> Path:
    rollout = {
        "group_size": 4,
        "sampling": {"max_tokens": 8},
        "engine": ENGINE,
        "rewards": rewards,
    }
    return make_experiment("judged", rollout=rollout, learner={"steps": 3}, eval={"samples": 1})


@torch.no_grad()
def hugging_face_score(model, ids: list[int]) -> float:
    return float(model(torch.tensor([ids])).logits)


def test_scores_are_those_of_transformers_raw_at_the_last_token(experiment, rewards, made_reward_model):
    log = experiment / "scorer.log"
    model = AutoModelForSequenceClassification.from_pretrained(made_reward_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(made_reward_model)
    chance = np.random.default_rng(0)
    sequences = [chance.integers(3, 64, n).tolist() for n in (*range(1, 40), 63, 64)]
    sequences += [[*sequences[20], 2], [*sequences[20], 5]]  # with an end mark, and cut off

    async def ask() -> tuple[list[float], float]:
        async with ScorerClient("helpful", rewards["helpful"]["address"], "judged", "test", 60) as client:
            welcome = await client.hello(20)
            assert welcome.tokenizer == fingerprint(tokenizer)
            works = [Ids(welcome.tokenizer, np.array(s, np.int32)) for s in sequences]
            scores = await asyncio.gather(*map(client.score, works))
            with pytest.raises(BadMessage, match="token_ids: 65 of them, at most 64"):
                await client.score(Ids(welcome.tokenizer, np.full(65, 3, np.int32)))
            return scores, await client.score(Words("t3 t4", "t9 t10", ended=True))

    command = [SLIPSTREAM, "scorer", "experiment.yaml", "--name", "helpful"]
    with log.open("wb") as file:
        scorer = subprocess.Popen(command, cwd=experiment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 240
        while "scorer helpful is up" not in log.read_text(errors="replace"):
            assert scorer.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        scores, of_text = asyncio.run(ask())
        scorer.send_signal(signal.SIGTERM)
        assert scorer.wait(30) == 0, log.read_text()[-3000:]
    finally:
        scorer.kill()
        scorer.wait()
    expected = [hugging_face_score(model, s) for s in sequences]
    assert max(map(abs, expected)) > 2, "a sigmoid would show"
    assert scores == pytest.approx(expected, abs=1e-5)
    text = [*tokenizer.encode("t3 t4"), *tokenizer.encode("t9 t10", add_special_tokens=False), 2]
    assert of_text == pytest.approx(hugging_face_score(model, text), abs=1e-5)
    last = json.loads((experiment / "run/metrics/scorer-helpful.jsonl").read_text().splitlines()[-1])
    assert (last["scores"], last["bad_messages"]) == (len(sequences) + 1, 1)


def test_a_whole_run_with_a_rule_and_a_reward_model(experiment):
    done = subprocess.run(
        [SLIPSTREAM, "run", "experiment.yaml"], cwd=experiment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 · even + 0.25 · helpful" in done.stdout
    run = experiment / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        even, helpful = row["reward_parts/even"], row["reward_parts/helpful"]
        assert row["reward/mean"] == pytest.approx(even + 0.25 * helpful, abs=1e-5)
        assert 0 <= even <= 1
        assert helpful != 0
    evaluated = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    parts = [row["reward_parts"] for row in evaluated if row["kind"] == "completion"]
    assert parts
    assert all(set(p) == {"even", "helpful"} for p in parts)
    assert "scores the token ids as sampled" in (run / "logs/server-0.log").read_text()
    log = (run / "logs/scorer-helpful.log").read_text()
    assert "scorer helpful ends:" in log
    summary = json.loads((run / "report/summary.json").read_text())
    assert set(summary["reward_parts"]) == {"even", "helpful"}
    assert (run / "report/reward_parts.png").exists()
    assert "helpful" in done.stdout.split("judged:")[-1]
