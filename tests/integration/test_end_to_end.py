"""The whole run as a user starts it: every service real, a made model that must learn, a kill on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.slow

STEPS = 14
REWARD = '''
def share_of_even_words(text, row):
    """A uniform policy gets about a half."""
    words = [w for w in text.split() if w.startswith("t")]
    return sum(int(w[1:]) % 2 == 0 for w in words) / max(len(words), 1)
'''


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """A folder with a model made from nothing, a reward of its own, prompts and the experiment file."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("end_to_end")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, 64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder / "model")
    (folder / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": f"t{i} t{i + 1}"} for i in range(3, 43)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = {
        "name": "end-to-end",
        "run_dir": "run",
        "model": {"path": "model", "max_length": 64, "dtype": "float32"},
        "data": {"train": {"kind": "jsonl", "path": "prompts.jsonl"}},
        "rollout": {
            "group_size": 8,
            "sampling": {"max_tokens": 12},
            "engine": {"kv_cache_gib": 0.25, "max_num_seqs": 64},
            "reward": {"function": "my_reward:share_of_even_words"},
        },
        "buffer": {"groups_per_batch": 4, "max_staleness": 2, "address": "tcp://127.0.0.1:0"},
        "sync": {"address": "tcp://127.0.0.1:0"},
        "learner": {"steps": STEPS, "optimizer": {"lr": 3e-3}, "checkpoint": {"every": 4}},
        "eval": {"source": {"kind": "jsonl", "path": "prompts.jsonl"}, "samples": 1},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(settings))
    return folder


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).parent / "slipstream"), "run", "experiment.yaml"]
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
            if here and "learner" in command and "torch.distributed.run" not in command:
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
    assert "learner" in (experiment / "output.txt").read_text()
    second = start(experiment)
    assert second.wait(300) == 0, (experiment / "output.txt").read_text()[-3000:]
    made = rows(experiment)
    assert [row["step"] for row in made] == list(range(1, STEPS + 1)), "every step once, in order"
    assert max(row["staleness/max"] for row in made) <= 2
    assert all(abs((row["rho/mean"] or 1) - 1) < 0.2 for row in made)
    rewards = [row["reward/mean"] for row in made]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert (experiment / "run/model/model.safetensors").exists()
    assert (experiment / "run/report/summary.md").exists()
    scores = [line for line in (experiment / "run/eval.jsonl").read_text().splitlines() if '"score"' in line]
    assert len(scores) >= 2, "before and after"
