"""Whole runs on two cores, the learner on one and the rollout server on the other, for benchmarks to compare.

Everything is real: vLLM, Megatron, buffer, weights over gloo. The model is made: a Llama with random weights
and words for tokens, so that both sides take about as long for a batch. Its learning rate is tiny, so that
lengths, and with them costs, stay as they are.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import local, measuring
from launch.calibration import Alone, steady
from launch.experiment import WholeExperiment
from launch.history import History
from launch.overview import seconds_of
from launch.services import plan_services
from launch.supervisor import Service

FOLDER = Path("runs/pinned")
WARM_UP = 3
"""Steps left out of every rate."""
LEARNER_CORE, ROLLOUT_CORE = 0, 1
AHEAD = 12
"""Words; a tenth of the answers have them by chance."""
SPAWN = multiprocessing.get_context("spawn")


def make_model(folder: Path, hidden: int = 192, layers: int = 4, vocabulary: int = 128) -> Path:
    """Its tokens are all about as likely, the end mark too."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    numbers = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


def rows() -> list[dict[str, Any]]:
    """The prompts."""
    return [{"prompt": f"t{i} t{i + 1} t{i + 2} t{i + 3}"} for i in range(3, 123)]


def share_of_even_words(text: str, row: dict[str, Any]) -> float:
    """The reward: about a half of a policy that knows nothing."""
    words = [w for w in text.split() if w.startswith("t")]
    return sum(int(w[1:]) % 2 == 0 for w in words) / max(len(words), 1)


def has_many_more_even_words(text: str, row: dict[str, Any]) -> float:
    """Right or wrong as a whole; an answer that ends early is wrong."""
    even = [int(w[1:]) % 2 == 0 for w in text.split() if w.startswith("t")]
    return float(2 * sum(even) - len(even) >= AHEAD)


def experiment(name: str, steps: int, **changes: dict[str, Any]) -> WholeExperiment:
    """Keywords override sections, one level deep."""
    settings: dict[str, Any] = {
        "name": name,
        "run_dir": str(FOLDER / name),
        "model": {"path": str(make_model(FOLDER / "model")), "max_length": 160, "dtype": "float32"},
        "data": {"train": {"kind": "function", "path": "pinned_runs:rows"}},
        "rollout": {
            "group_size": 8,
            "max_groups": 8,
            "sampling": {"max_tokens": 96},
            "engine": {"kv_cache_gib": 0.5, "max_num_seqs": 64, "cores": str(ROLLOUT_CORE)},
            "rewards": {"even": {"function": "pinned_runs:share_of_even_words"}},
        },
        "buffer": {"groups_per_batch": 16, "max_staleness": 1, "address": "tcp://127.0.0.1:0"},
        "sync": {"address": "tcp://127.0.0.1:0"},
        "learner": {
            "steps": steps,
            "threads": 1,
            "tokens_per_microbatch": 2048,
            "optimizer": {"lr": 1e-6},
            "checkpoint": {"every": steps, "export": False},
        },
        "logging": {"tensorboard": False},
    }
    for section, values in changes.items():
        settings[section] = settings[section] | values
    return WholeExperiment.model_validate(settings)


def plan(e: WholeExperiment, config: Path) -> list[Service]:
    """As `slipstream run` has it, each service on its core."""
    cores = {"rollout": ROLLOUT_CORE}
    return [
        replace(s, command=["taskset", "-c", str(cores.get(s.role, LEARNER_CORE)), *s.command])
        for s in plan_services(e, config)
    ]


def run(e: WholeExperiment, planned: local.Plan = plan, warm_up: int = WARM_UP) -> list[dict[str, Any]]:
    """Make the run, anew; its steps without the first ones."""
    shutil.rmtree(e.run_dir, ignore_errors=True)
    with console_of(e) as console:
        if local.run(e, "benchmark", console, planned):
            sys.exit(f"{e.run_dir}: the run failed; see {e.run_dir}/logs")
    return _rows(e)[warm_up:]


def run_or_kept(e: WholeExperiment) -> list[dict[str, Any]]:
    """As `run`, unless the run is whole in its folder."""
    return _rows(e)[WARM_UP:] if len(_rows(e)) == e.learner.steps else run(e)


def _rows(e: WholeExperiment) -> list[dict[str, Any]]:
    path = Path(e.run_dir, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_alone(e: WholeExperiment, steps: int, train_seconds: float = 0.0) -> Alone:
    """Both sides, each without the other, unless both are whole in their folders."""
    sides = (measuring.servers_alone(e, steps, train_seconds), measuring.learner_alone(e, steps))
    if all(len(_rows(side)) == steps for side in sides):
        return measuring.read_alone(e, Path(e.run_dir))
    with console_of(e) as console:
        if measuring.measure(e, steps, train_seconds, "benchmark", console, plan):
            sys.exit(f"{e.run_dir}: measuring failed; see the logs below it")
    return measuring.read_alone(e, Path(e.run_dir))


def run_together(e: WholeExperiment, steps: int) -> tuple[float, float]:
    """Both sides at once, each on its core and neither knowing of the other; after `run_alone` of the same.
    Not again where they are whole in their folders.

    Returns:
        Seconds of a batch of the servers and of the learner, over the time that both were at work.
    """
    sides = (measuring.servers_alone(e, steps, 0.0), measuring.learner_alone(e, steps))
    sides = [side.model_copy(update={"run_dir": f"{side.run_dir}-at-once"}) for side in sides]
    if not all(len(_rows(side)) == steps for side in sides):
        workers = [SPAWN.Process(target=run, args=(side,)) for side in sides]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    histories = [History(Path(side.run_dir)) for side in sides]
    for history in histories:
        history.refresh()
    steps_of = [steady(history) for history in histories]
    since = max(records[0]["time"] for records in steps_of)
    until = min(records[-1]["time"] for records in steps_of)
    waits = ("time/wait_batch", "time/wait_loaded")
    common = [[r for r in of if since < r["time"] - seconds_of(r) and r["time"] <= until] for of in steps_of]
    generate = statistics.fmean(seconds_of(r) for r in common[0])
    train = statistics.fmean(seconds_of(r) - sum(r.get(w) or 0.0 for w in waits) for r in common[1])
    return round(generate, 3), round(train, 3)


def console_of(e: WholeExperiment) -> Any:
    """Where the run is shown: a file beside its folder. Its services find this folder's modules."""
    os.environ["PYTHONPATH"] = f"{Path.cwd()}:{Path(__file__).parent}"
    Path(e.run_dir).mkdir(parents=True, exist_ok=True)
    return _Console(Path(e.run_dir).with_suffix(".txt"))


class _Console:
    """A console that writes into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Console:
        self._file = self._path.open("w")
        return Console(file=self._file)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def step_seconds(found: list[dict[str, Any]]) -> float:
    """Mean of a step without what writing a checkpoint took."""
    return statistics.fmean(r["time/step"] - r.get("time/checkpoint", 0.0) for r in found)


def learner_times(found: list[dict[str, Any]]) -> dict[str, float]:
    """Where the learner's step goes, mean seconds; `other` is what no clock is around."""
    names = ("wait_batch", "forward_backward", "optimizer", "wait_loaded", "publish")
    told = {n: statistics.fmean(r.get(f"time/{n}", 0.0) for r in found) for n in names}
    return {n: round(s, 3) for n, s in (told | {"other": step_seconds(found) - sum(told.values())}).items()}


def server_times(e: WholeExperiment, found: list[dict[str, Any]]) -> dict[str, float]:
    """Of the server, over the same steps: share of the time without a group in hand, mean seconds a step
    that versions took beside decoding (stage) and that nothing was decoded (pause), and tokens a second."""
    since, until = found[0]["time"] - found[0]["time/step"], found[-1]["time"]
    lines = [
        line
        for path in Path(e.run_dir, "metrics").glob("rollout-*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if since - 1 <= line["time"] <= until + 1
    ]
    first, last = lines[0], lines[-1]
    seconds = last["time"] - first["time"]
    steps = seconds / step_seconds(found)
    return {
        "without_group": round((last["waiting_s/leases"] - first["waiting_s/leases"]) / seconds, 3),
        "stage": round((last["publish_s/stage"] - first["publish_s/stage"]) / steps, 3),
        "pause": round((last["publish_s/pause"] - first["publish_s/pause"]) / steps, 3),
        "tokens_per_s": round((last["tokens"] - first["tokens"]) / seconds, 1),
        "groups_in_hand": round(statistics.fmean(line["running_groups"] for line in lines), 2),
        "wasted_tokens": last["wasted_tokens"] - first["wasted_tokens"],
    }
