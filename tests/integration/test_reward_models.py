"""Reward models on the real vLLM: scores as transformers gives them, and a whole run with two and a rule."""

import asyncio
import json
import shutil
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
from launch.guard import children
from rollout.scorer.client import ScorerClient
from rollout.scorer.rendering import fingerprint
from rollout.scorer.wire import Ids, Words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
ENGINE = {"kv_cache_gib": 0.25, "max_num_seqs": 32}
CLIP = 1.5
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


def workers(service: int) -> int:
    """The ranks of the engine that a process has started."""
    family, below = children(), [service]
    for process in below:
        below += family.get(process, [])
    names = [Path(f"/proc/{process}/cmdline").read_text() for process in below]
    return sum(name.startswith("VLLM::Worker") for name in names)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_are_those_of_transformers_raw_at_the_last_token(
    experiment, rewards, made_reward_model, ranks
):
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

    layout = f"rollout.rewards.helpful.engine.tensor_parallel={ranks}"
    command = [SLIPSTREAM, "scorer", "experiment.yaml", "--name", "helpful", layout]
    with log.open("wb") as file:
        scorer = subprocess.Popen(command, cwd=experiment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 240
        while "scorer helpful is up" not in log.read_text(errors="replace"):
            assert scorer.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        assert workers(scorer.pid) == ranks
        scores, of_text = asyncio.run(ask())
        scorer.send_signal(signal.SIGTERM)
        assert scorer.wait(30) == 0, log.read_text()[-3000:]
    finally:
        scorer.kill()
        scorer.wait()
    expected = [hugging_face_score(model, s) for s in sequences]
    assert max(map(abs, expected)) > 2, "a sigmoid would show"
    # Two ranks add in another order: of a score of 16 that is the last digit or two of float32.
    assert scores == pytest.approx(expected, rel=2e-6, abs=1e-5)
    text = [*tokenizer.encode("t3 t4"), *tokenizer.encode("t9 t10", add_special_tokens=False), 2]
    assert of_text == pytest.approx(hugging_face_score(model, text), rel=2e-6, abs=1e-5)
    last = json.loads((experiment / "run/metrics/scorer-helpful.jsonl").read_text().splitlines()[-1])
    assert (last["scores"], last["bad_messages"]) == (len(sequences) + 1, 1)


@pytest.fixture
def second_reward_model(made_reward_model, tmp_path) -> Path:
    """As the first one, and of another mind."""
    folder = tmp_path / "polite"
    shutil.copytree(made_reward_model, folder)
    model = AutoModelForSequenceClassification.from_pretrained(made_reward_model)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.score.weight, std=2.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_whole_run_of_the_example_with_a_rule_and_two_reward_models(
    make_experiment, rewards, second_reward_model, free_address
):
    """configs/custom/two-judges.yaml, whose weights these are but for one below 0."""
    helpful = rewards["helpful"] | {"weight": -0.25}
    polite = {key: helpful[key] for key in ("dtype", "engine")} | {"model": str(second_reward_model)}
    rollout = {
        "group_size": 4,
        "sampling": {"max_tokens": 8},
        "engine": ENGINE,
        "rewards": {
            "answer": {"function": RULE["function"]},
            "helpful": helpful,
            "polite": polite | {"clip": CLIP, "address": free_address()},
        },
    }
    base = str(Path(__file__).parents[2] / "configs/custom/two-judges.yaml")
    experiment = make_experiment(
        "judged", base=base, rollout=rollout, learner={"steps": 3}, eval={"samples": 1}
    )
    done = subprocess.run(
        [SLIPSTREAM, "run", "experiment.yaml"], cwd=experiment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 · answer + -0.25 · helpful + 0.1 · polite" in done.stdout
    run = experiment / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["reward_parts/answer"] <= 1
        assert row["reward_parts/helpful"] != 0
        assert row["reward_parts/polite"] not in (0, row["reward_parts/helpful"])
    evaluated = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    completions = [row for row in evaluated if row["kind"] == "completion"]
    polites = [row["reward_parts"]["polite"] for row in completions]
    assert max(map(abs, polites)) == CLIP, "some are clipped"
    for row in completions:
        parts = row["reward_parts"]
        assert set(parts) == {"answer", "helpful", "polite"}
        total = parts["answer"] - 0.25 * parts["helpful"] + 0.1 * parts["polite"]
        assert row["reward"] == pytest.approx(total, abs=1e-5)
    assert "scores the token ids as sampled" in (run / "logs/server-0.log").read_text()
    for name in ("helpful", "polite"):
        assert f"scorer {name} ends:" in (run / f"logs/scorer-{name}.log").read_text()
    summary = json.loads((run / "report/summary.json").read_text())
    assert set(summary["reward_parts"]) == {"answer", "helpful", "polite"}
    assert (run / "report/reward_parts.png").exists()
    assert "polite" in done.stdout.split("judged:")[-1]
