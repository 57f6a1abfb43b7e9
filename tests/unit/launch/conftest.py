"""A made run folder, such as the services leave one."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

STARTED = 1_700_000_000.0
STEP_S = 30.0


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (64, 8), "self_attn.k_proj": (32, 8), "self_attn.v_proj": (32, 8),
    "self_attn.o_proj": (8, 64), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16),
    "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip
SHAPES = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
SHAPES |= {f"model.layers.{i}.{name}.weight": shape for i in (0, 1) for name, shape in LAYER.items()}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes what a config check looks at of a Llama of two layers; keywords change its config."""

    def make(name: str, more: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | changes))
        tensors = {n: np.zeros(shape, np.float32) for n, shape in (SHAPES | (more or {})).items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return make


@pytest.fixture
def model_folder(make_model: Callable[..., Path]) -> Path:
    return make_model("model")


@pytest.fixture
def reward_folder(make_model: Callable[..., Path]) -> Path:
    head = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    return make_model("reward", {"score.weight": (1, 8)}, **head)


@pytest.fixture
def config_file(tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    source = {"kind": "function", "path": "rollout.tasks.addition:train"}
    path.write_text(
        yaml.safe_dump(
            {
                "name": "made",
                "run_dir": str(tmp_path / "run"),
                "model": {"path": str(model_folder), "max_length": 128},
                "data": {"train": source},
                "rollout": {"sampling": {"max_tokens": 48}},
                "learner": {"steps": 24},
                "eval": {"source": source, "target": 0.8, "every": 12},
            }
        )
    )
    return path


@pytest.fixture
def make_run(tmp_path: Path, config_file: Path) -> Callable[..., Path]:
    """Writes a run folder with this many steps made and this last score; returns it."""

    def make(steps: int = 24, last_score: float = 0.84) -> Path:
        from launch.experiment import dump, read

        run_dir = tmp_path / "run"
        (run_dir / "metrics").mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump(read(config_file, [])))
        write_lines(run_dir / "metrics.jsonl", [step_row(step) for step in range(1, steps + 1)])
        write_lines(run_dir / "metrics" / "rollout-server-0.jsonl", server_rows(steps))
        write_lines(run_dir / "metrics" / "buffer.jsonl", [buffer_row()])
        scores = {0: 0.2, 12: 0.5, 24: last_score}
        rows = [row for v, score in scores.items() if v <= steps for row in evaluation(v, score)]
        write_lines(run_dir / "eval.jsonl", rows)
        return run_dir

    return make


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_row(step: int) -> dict[str, Any]:
    chance = random.Random(step)
    return {
        "step": step,
        "time": STARTED + STEP_S * step,
        "time/step": STEP_S * (4 if step == 1 else 1),
        "time/wait_batch": 9.0 + chance.uniform(-3, 3),
        "time/forward_backward": 14.0 + chance.uniform(-2, 2),
        "time/optimizer": 1.5,
        "time/publish": 2.0,
        **({"time/checkpoint": 1.8} if step % 12 == 0 else {}),
        "reward/mean": 0.2 + 0.65 / (1 + math.exp(-(step - 13) / 3)) + chance.uniform(-0.06, 0.06),
        "staleness/mean": 1.2 + chance.uniform(-0.4, 0.4),
        "staleness/max": 2.0 if step > 3 else float(step - 1),
        "rho/mean": 1.01,
        "reward_parts/right": 0.4,
        "reward_parts/short": 0.125,
        "samples": 64,
        "tokens": 1800,
        "servers/tokens": 9000,
        "servers/wasted_tokens": 450 if step == 18 else 0,
        "buffer/wasted_tokens": 30 if step == 18 else 0,
        "sync/pause_seconds": 0.5 if step == 7 else 0.1,
    }


def server_rows(steps: int) -> list[dict[str, Any]]:
    rows = []
    for line in range(int(steps * STEP_S / 2)):
        rate = 300 + 60 * math.sin(line / 9) + random.Random(line).uniform(-80, 80)
        rows.append({
            "time": STARTED + 2 * line, "server": "server-0", "tokens_per_s": rate, "wasted_tokens": line,
            "running_groups": 8, "busy_s": 1.7, "groups_in_hand": 7.5,
            "waiting_s/leases": 0.3 * line, "waiting_s/weights": 4.0,
        })  # fmt: skip
    return rows


def buffer_row() -> dict[str, Any]:
    return {
        "time": STARTED + 700, "leased": 6, "stored": 3, "evicted": 2, "duplicates": 1,
        "wasted_tokens": 30,
        "dropped": {"failed": 4}, "requeued": {"evicted": 2, "lost": 3},
        "starvation": {
            "length_ratio": 0.9, "length_ks": 0.12, "reward_ks": 0.34, "evicted_length_ratio": 1.8,
        },
    }  # fmt: skip


def evaluation(version: int, score: float) -> list[dict[str, Any]]:
    sums = [(a, b) for a in range(2, 6) for b in (3, 7)]
    rows: list[dict[str, Any]] = [
        {
            "kind": "completion", "version": version, "prompt_id": f"eval/{version}/{number}", "index": index,
            "prompt": f"What is {a} + {b}?", "reward": float(version > 0),
            "completion": f"The sum is\n{a + b} | done" if version else f"Let's see: <{a}> and *{b}*",
        }
        for number, (a, b) in enumerate(sums)
        for index in range(2)
    ]  # fmt: skip
    results = {"score": score, "stderr": 0.03125, "pass@1": score / 2, "pass@2": score}
    return [*rows, {"kind": "score", "version": version, "completions": len(rows), **results}]
