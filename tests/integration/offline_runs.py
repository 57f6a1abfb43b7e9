"""Runs of the offline stages on real Megatron: a made Llama, rows to teach it, and a run's folder."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROGRAM = Path(__file__).with_name("offline_jobs.py")
WORDS = ["<end>", "?", *"abcdefghijklmnop"]
END = 0
PADDING = WORDS.index("?")
BETA = 0.5


class Run:
    """One run's folder: what it is to do, and what it did."""

    def __init__(self, folder, data, kind, *, kill_at=None, steps=4, lr=2e-3, layout=None, **learner):
        self.folder, self.kind, self.kill_at = folder, kind, kill_at
        layout = {"tensor": 1, "pipeline": 1, "distributed_optimizer": False, **(layout or {})}
        stage = {"kind": kind} | ({"beta": BETA} if kind == "dpo" else {})
        rows = "taught" if kind == "sft" else "preferences"
        self.experiment = {
            "name": "offline",
            "run_dir": str(folder / "run"),
            "model": {"path": str(data / "model"), "dtype": "float32", "max_length": 32},
            "data": {"train": {"kind": "jsonl", "path": str(data / f"{rows}.jsonl")}},
            "stage": stage,
            "learner": {
                "steps": steps,
                "batch_size": 8,
                "tokens_per_microbatch": 64,
                "threads": 1,
                "processes": layout["tensor"] * layout["pipeline"],
                "parallel": layout,
                "optimizer": {"lr": lr, "schedule": "cosine", "warmup_steps": 2},
                "checkpoint": {"every": 2, "keep": 2},
                **({"ema": {"decay": 0.5}} if kind == "dpo" else {}),
                **learner,
            },
            "eval": {"source": {"kind": "jsonl", "path": str(data / f"{rows}-held-out.jsonl")}},
            "logging": {"tensorboard": False},
        }

    def job(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self.experiment))
        return {"config": str(config), "log": str(self.folder / "log"), "kill_at": self.kill_at}

    @property
    def rows(self):
        return [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]

    @property
    def log(self):
        return (self.folder / "log-0.txt").read_text()

    @property
    def model(self):
        return self.folder / "run" / "model"


def train(ranks, runs, killed=False):
    """Make the runs one after the other in one start of so many processes."""
    jobs = runs[0].folder.with_name(f"jobs-{runs[0].folder.name}.json")
    jobs.parent.mkdir(parents=True, exist_ok=True)
    jobs.write_text(json.dumps([run.job() for run in runs]))
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*start, str(PROGRAM), str(jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode != 0) == killed, done.stdout[-6000:]


def answer(prompt):
    """What SFT teaches: two words that name the prompt's last letter."""
    return {"a": "e i", "b": "f j", "c": "g k", "d": "h l"}[prompt[-1]]


def preference(chance):
    """A prompt with three responses, the better the more often its first letter comes; scores below 1."""
    prompt = " ".join(chance.choices(WORDS[6:], k=3))
    responses = [" ".join(chance.choices(WORDS[2:6], k=chance.randint(3, 6))) for _ in range(3)]
    return {"prompt": prompt, "response": responses, "score": [r.count("a") / 10 for r in responses]}


def make_data(folder):
    """A made Llama with its tokenizer, and rows to teach it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(0)
    prompts = [f"{a} {b}" for a, b in itertools.permutations("abcd", 2)]
    taught = [{"prompt": p, "response": answer(p)} for p in prompts]
    write(folder / "taught.jsonl", taught)
    write(folder / "taught-held-out.jsonl", taught[:5])
    tied = {"prompt": "e f", "response": ["a b", "c d"], "score": [0.5, 0.5]}
    long = {"prompt": "e " * 20, "response": ["a " * 20, "b"], "score": [1, 0]}
    write(folder / "preferences.jsonl", [*(preference(chance) for _ in range(160)), tied, long])
    write(folder / "preferences-held-out.jsonl", [preference(chance) for _ in range(40)])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
