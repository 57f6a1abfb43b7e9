"""What `slipstream plan` says a learner rank takes, against what real ranks take.

    python benchmarks/plan_memory.py

Made models on CPU. Each rank is a fresh process that makes its model, an optimizer where it trains one, and
two real updates on groups as long as the config allows, as the learner does, or the ranks of a value model;
then it writes a checkpoint. Ranks of the reference make two passes. Measured is the peak of resident memory
during the second and during the checkpoint (VmHWM, reset before each) beyond what the process held before it
made the model; predicted is the plan's total at that moment without the share it assumes for that. Writes
benchmarks/results/plan_memory.json.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
PROMPT, COMPLETION, GROUP = 256, 384, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "one rank, float32": {},
    "one rank, float32, recompute": {"recompute": True},
    "tensor 2, float32": {"parallel": {"tensor": 2}},
    "pipeline 2, float32": {"parallel": {"pipeline": 2}},
    "data 2, bfloat16, distributed optimizer, recompute": {
        "recompute": True,
        "parallel": {"distributed_optimizer": True},
        "processes": 2,
    },
    "one rank, float32, adapters": {"lora": {"rank": 16}},
    "policy and value model on one rank, float32": {"algorithm": {"advantage": "gae"}, "value": {}},
    "value model on one rank of its own, float32": {
        "algorithm": {"advantage": "gae"},
        "value": {"ranks": {"address": "tcp://127.0.0.1:7003"}},
    },
    "reference on one rank of its own, float32": {
        "algorithm": {"kl": {"coefficient": 0.05}},
        "reference": {"address": "tcp://127.0.0.1:7004"},
    },
}
KINDS = {"value model on": "value model", "reference on": "reference"}
"""How a setting begins whose ranks are not the learner's → how the plan calls them."""


def experiment_of(name: str, folder: str) -> dict[str, Any]:
    learner = dict(SETTINGS[name])
    layout = learner.get("parallel", {})
    if "value" in learner:
        learner["value"] = {"path": f"{folder}/value", **learner["value"]}
    learner.setdefault("processes", layout.get("tensor", 1) * layout.get("pipeline", 1))
    return {
        "name": "plan",
        "run_dir": folder,
        "model": {
            "path": f"{folder}/model",
            "max_length": PROMPT + COMPLETION,
            "dtype": "bfloat16" if "bfloat16" in name else "float32",
        },
        "data": {"train": {"kind": "jsonl", "path": "unused"}},
        "rollout": {"group_size": GROUP, "sampling": {"max_tokens": COMPLETION}},
        "learner": {**learner, "tokens_per_microbatch": PROMPT + GROUP * COMPLETION},
    }


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(folder: Path, name: str) -> None:
    """One rank: writes to `rank-N` the bytes that it took, by moment."""
    import torch

    from learner import parallel
    from learner.checkpoint_parts import save_part
    from learner.config import LearnerExperiment

    fields = experiment_of(name, str(folder))
    experiment = LearnerExperiment.model_validate({k: v for k, v in fields.items() if k != "data"})
    learner = experiment.learner
    torch.set_num_threads(1)
    parallel.initialize(learner.parallel, 1)
    for module in ("learner.model", "learner.service", "learner.step"):
        importlib.import_module(module)  # libraries are in memory by now: the plan has a share for them
    before = resident("VmRSS")
    step, trained = {"value model": value_step, "reference": reference_step}.get(kind_of(name), policy_step)(
        experiment
    )

    def peak(of: Callable[[], object]) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        of()
        return resident("VmHWM") - before

    step(batch(0, learner.parallel.pipeline))
    found = {"work": peak(lambda: step(batch(1, learner.parallel.pipeline)))}

    def write() -> None:
        for number, part in enumerate(trained):
            save_part(folder / f"checkpoint-{number}", part, learner.parallel.distributed_optimizer)

    if trained:
        found["checkpoint"] = peak(write)
    (folder / f"rank-{parallel.rank()}").write_text(json.dumps(found))
    parallel.shutdown()


def kind_of(name: str) -> str:
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), "learner")


Step = Callable[[Any], object]


def policy_step(experiment: Any) -> tuple[Step, list[Any]]:
    """As `learner/service.py` puts it together, with what it has on the same ranks; and what a checkpoint is
    of."""
    import torch

    from learner.model import build_model
    from learner.optimizer import make_trainable
    from learner.service import value_model
    from learner.step import Updater

    learner = experiment.learner
    dtype = getattr(torch, experiment.model.dtype)
    model = build_model(
        experiment.model.path, learner.parallel, dtype, learner.recompute, adapters=learner.lora
    )
    critic = value_model(experiment, learner.parallel) if learner.value is not None else None
    trainable = make_trainable(model, learner.optimizer, learner.parallel)
    return Updater(experiment, trainable, None, critic).update, [
        trainable,
        *([critic.trainable] if critic is not None else []),
    ]


def value_step(experiment: Any) -> tuple[Step, list[Any]]:
    """As `learner/value/service.py` is asked: for the values of a batch, and then for an update."""
    import torch

    from learner.parts import parts_of
    from learner.service import value_model

    critic = value_model(experiment, experiment.learner.value.ranks.parallel)

    def step(groups: Any) -> None:
        for part in parts_of(groups, experiment):
            report = critic.begin(groups.index)
            values = critic.values_of(part.micro_batches)
            part.fill("old_values", values)
            part.fill("returns", [torch.ones_like(of) for of in values])
            critic.update(part.micro_batches, part.total, report)

    return step, [critic.trainable]


def reference_step(experiment: Any) -> tuple[Step, list[Any]]:
    """As `learner/reference/service.py` is asked."""
    import torch

    from learner.model import build_model
    from learner.optimizer import prepare_schedule
    from learner.parts import parts_of
    from learner.passes import target_logprobs

    dtype = getattr(torch, experiment.model.dtype)
    model = build_model(experiment.model.path, experiment.learner.reference.parallel, dtype)
    model.requires_grad_(False)
    prepare_schedule(model.config)
    return lambda groups: [target_logprobs(model, p.micro_batches) for p in parts_of(groups, experiment)], []


def batch(index: int, count: int) -> Any:
    """A micro-batch for each pipeline stage: groups of full length whose completions all teach something."""
    import numpy as np

    from buffer.records import Batch, Group, Trajectory

    draw = np.random.default_rng(index)
    length = PROMPT + COMPLETION
    groups: list[Group] = []
    for number in range(count):
        prompt = draw.integers(3, SHAPE["vocab_size"], PROMPT, dtype=np.int32)
        rows = [
            Trajectory(
                index=i,
                token_ids=np.concatenate(
                    [prompt, draw.integers(3, SHAPE["vocab_size"], COMPLETION, dtype=np.int32)]
                ),
                loss_mask=(np.arange(length) >= PROMPT).astype(np.uint8),
                behavior_logprobs=np.full(length, -9.0, np.float32),
                versions=np.zeros(length, np.int32),
                reward=float(i % 2),
                reward_parts={},
                finish_reason="length",
            )
            for i in range(GROUP)
        ]
        groups.append(Group(f"g{number}", "l", f"0/{number}", "train", tuple(rows)))
    return Batch(index, tuple(groups), {})


def predict(folder: str, name: str) -> list[dict[str, float]]:
    """Bytes of each rank by moment, without what the plan assumes for libraries."""
    from launch.experiment import WholeExperiment
    from launch.plan import Target, of
    from learner import families

    experiment = WholeExperiment.model_validate(experiment_of(name, folder))
    made = of(experiment, families.read(f"{folder}/model"), Target(gpu=False))
    kinds = [kind for kind in made.kinds if kind.name.startswith(kind_of(name))]
    sizes: list[dict[str, float]] = []
    for kind in kinds:
        # No version is published here.
        held = sum(kind.held.values()) - kind.held["runtime (assumed)"]
        held -= kind.held.get("published version", 0.0)
        sums = {at: held + sum(of.values()) for at, of in kind.moments.items() if at != "publishing"}
        checkpoint = sums.pop("checkpoint", held)
        sizes += [{"work": max(sums.values()), "checkpoint": checkpoint}] * kind.ranks
    return sizes


def main() -> None:
    import torch
    from record import write_result
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    runs: dict[str, Any] = {}
    # Large blocks go back to the kernel when they are freed: resident memory is then what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(f"{folder}/model")
            scored = LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)
            LlamaForSequenceClassification(scored).save_pretrained(f"{folder}/value")
            expected = predict(folder, name)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={len(expected)}", __file__, folder, name]
            subprocess.run(command, env=environment, check=True)
            found = [json.loads((Path(folder) / f"rank-{rank}").read_text()) for rank in range(len(expected))]
        runs[name] = {
            moment: {
                "predicted_mib": [round(of[moment] / 2**20) for of in expected],
                "measured_mib": [round(of[moment] / 2**20) for of in found],
                "error_percent": [
                    round(100 * (p[moment] / m[moment] - 1), 1) for p, m in zip(expected, found, strict=True)
                ],
            }
            for moment in found[0]
        }
        print(name, json.dumps(runs[name]), flush=True)
    errors = [abs(error) for run in runs.values() for at in run.values() for error in at["error_percent"]]
    figures = {"model": SHAPE, "prompt_tokens": PROMPT, "completion_tokens": COMPLETION}
    figures |= {"group_size": GROUP, "runs": runs, "largest_error_percent": max(errors)}
    write_result("plan_memory", figures)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
