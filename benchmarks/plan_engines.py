"""What `slipstream plan` says engines and a learner take, against what those of whole runs take.

    python benchmarks/plan_engines.py

Real runs of two steps on CPU: a rollout server, a reward model's scorer, and a learner that publishes and
writes checkpoints. What the libraries of a process take the plan assumes, and nobody can tell it from the
rest; so runs are compared that differ in one thing, the layers of the models or the size of the caches, and
what that adds to a process by plan is held against what it adds to the process's memory (RssAnon, the highest
of looks 50 ms apart; of the learner with the version that it shares, RssShmem). Writes
benchmarks/results/plan_engines.json.
"""

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pinned_runs
from record import write_result

from launch.experiment import WholeExperiment
from launch.guard import descendants
from launch.plan import Target, of
from learner import families

HIDDEN, VOCABULARY, FEW, MANY = 512, 4096, 2, 18
LAYERS = {"few layers": FEW, "many layers": MANY, "few layers, large caches": FEW}
CACHE_GIB = {"few layers": 0.25, "many layers": 0.25, "few layers, large caches": 1.0}
STEPS = 2
LOOK_S = 0.05
KINDS = {"rollout server rank": "engine", "scorer helpful rank": "scorer's engine", "learner": "learner"}
"""As the plan calls them → as they are called here."""
NOT_REACHED = ("forward pass (estimate)", "runtime (assumed)")
"""Of what is held: for passes far larger than these runs make; and equal in all of them."""


def experiment_of(name: str) -> WholeExperiment:
    layers, engine = LAYERS[name], {"kv_cache_gib": CACHE_GIB[name], "max_num_seqs": 8}
    model = pinned_runs.make_model(pinned_runs.FOLDER / f"policy-{layers}", HIDDEN, layers, VOCABULARY)
    helpful = {"model": str(make_reward_model(model)), "dtype": "float32", "address": "tcp://127.0.0.1:0"}
    return pinned_runs.experiment(
        f"plan-{name.replace(',', '').replace(' ', '-')}",
        STEPS,
        model={"path": str(model)},
        rollout={
            "group_size": 2,
            "max_groups": 2,
            "sampling": {"max_tokens": 16},
            "engine": engine,
            "rewards": {"helpful": {**helpful, "engine": engine}},
        },
        buffer={"groups_per_batch": 2},
        learner={"tokens_per_microbatch": 256, "checkpoint": {"every": 1, "export": False}},
    )


def make_reward_model(policy: Path) -> Path:
    """Of the policy's shape, with a row for its output layer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = policy.with_name(policy.name.replace("policy", "reward"))
    if not (folder / "config.json").exists():
        torch.manual_seed(1)
        LlamaForSequenceClassification(LlamaConfig.from_pretrained(policy, num_labels=1)).save_pretrained(
            folder
        )
        AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def planned(e: WholeExperiment) -> dict[str, dict[str, float]]:
    """Kind of process → bytes by what they are for."""
    found: dict[str, dict[str, float]] = {}
    for kind in of(e, families.read(e.model.path), Target(gpu=False)).kinds:
        moment = kind.moments[kind.peak] if kind.peak else {}
        items = {k: v for k, v in (kind.held | moment).items() if k not in NOT_REACHED}
        found[KINDS[kind.name]] = items
    return found


@contextmanager
def looks() -> Iterator[dict[str, int]]:
    """Kind of process → the most bytes that one of it had while the context lasted."""
    most: dict[str, int] = defaultdict(int)
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            for pid in descendants():
                try:
                    kind = _kind_of(pid)
                    size = _status(pid, "RssAnon") + (_status(pid, "RssShmem") if kind == "learner" else 0)
                except OSError:
                    continue  # it has ended
                if kind:
                    most[kind] = max(most[kind], size << 10)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _kind_of(pid: int) -> str:
    words = _words(pid)
    if words[0].startswith("VLLM::Worker"):
        service = _words(_status(_status(pid, "PPid"), "PPid"))  # whose child is the engine's core
        return KINDS["scorer helpful rank" if "rollout.scorer" in service else "rollout server rank"]
    return "learner" if words[1:4] == ["-u", "-m", "learner"] else ""


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")


def _status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def compare(base: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Kind → MiB that one run takes more than another."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS.values():
        by_plan = sum(other["planned"][kind].values()) - sum(base["planned"][kind].values())
        by_looks = other["measured"][kind] - base["measured"][kind]
        found[kind] = {"planned_mib": round(by_plan / 2**20), "measured_mib": round(by_looks / 2**20)}
    return found


def main() -> None:
    # Large blocks go back to the kernel when they are freed: resident memory is then what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    runs: dict[str, dict[str, Any]] = {}
    for name in LAYERS:
        e = experiment_of(name)
        with looks() as measured:
            pinned_runs.run(e, warm_up=0)
        runs[name] = {"planned": planned(e), "measured": dict(measured)}
        print(name, json.dumps(runs[name]), flush=True)
        shutil.rmtree(e.run_dir)
    base, *others = LAYERS
    more = {f"{other} over {base}": compare(runs[base], runs[other]) for other in others}
    shape = {"hidden": HIDDEN, "vocabulary": VOCABULARY, "layers": LAYERS, "kv_cache_gib": CACHE_GIB}
    write_result("plan_engines", {"model": shape, "steps": STEPS, "more": more, "runs": runs})


if __name__ == "__main__":
    main()
