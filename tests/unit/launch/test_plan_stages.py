"""Plans of offline stages and pipelines: the same arithmetic, on what these hold."""

import json
from pathlib import Path

import pytest
import yaml

from launch.plan import GIB, Target
from launch.plan_changes import changes
from launch.plan_screen import as_json
from launch.plan_stages import of_experiment, plans
from learner import budget, families
from learner.config import ParallelConfig

HOME = Path(__file__).parents[3]
SHAPE = str(HOME / "configs/shapes/llama-2-7b")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file beside others; returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(name, fields):
        (tmp_path / name).write_text(yaml.safe_dump(fields))
        return tmp_path / name

    return write


def stage(kind, **learner):
    return {
        "name": kind,
        "run_dir": f"runs/{kind}",
        "model": {"path": SHAPE, "max_length": 2048},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "epochs": 1},
        "stage": {"kind": kind},
        "learner": {"parallel": {"distributed_optimizer": False}, **learner},
    }


def only(found):
    (plan,) = found
    (kind,) = plan.kinds
    return kind


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_a_stage_holds_its_model_and_what_its_loss_needs(written, kind):
    held = only(plans(written("a.yaml", stage(kind)), [], Target(device_gib=200))).held
    family = families.read(SHAPE, "score" if kind == "reward" else "vocabulary")
    count = budget.parameters(family, ParallelConfig(), 0)
    assert (held["weights"], held["gradients"], held["optimizer"]) == (2 * count, 4 * count, 12 * count)
    assert held.get("reference model") == (2 * count if kind == "dpo" else None)


def test_adapters_need_no_reference_and_a_reward_model_computes_no_logits(written):
    lora = only(plans(written("a.yaml", stage("dpo", lora={"rank": 4})), [], Target(device_gib=200)))
    assert "reference model" not in lora.held
    assert "adapters" in lora.held
    scored, told = (
        only(plans(written("a.yaml", stage(kind)), [], Target(device_gib=200))).moments["training"]
        for kind in ("reward", "dpo")
    )
    assert "logits and output layer" in told
    assert "logits and output layer" not in scored


def test_a_pair_is_never_divided(written):
    """So that it takes its two responses' tokens, however few a micro-batch is to have."""
    small = {"tokens_per_microbatch": 64, "recompute": True}
    inputs = [
        only(plans(written("a.yaml", stage(kind, **small)), [], Target(device_gib=200))).moments["training"]
        for kind in ("sft", "dpo")
    ]
    one, two = (found["inputs of layers"] for found in inputs)
    family = families.read(SHAPE)
    assert one == 2048 * family.layers * family.hidden * 2
    assert two == (1 + 2 * 2047) * family.layers * family.hidden * 2


def test_what_is_proposed_to_a_stage_fits(written):
    target = Target(devices=8, device_gib=80)
    (made,) = plans(written("a.yaml", stage("sft")), [], target)
    assert made.reasons()
    settings = [word.rstrip(";") for line in changes(made) for word in line.split() if "=" in word]
    (changed,) = plans(written("a.yaml", stage("sft")), settings, target)
    assert changed.reasons() == []
    (on_cpu,) = plans(written("a.yaml", stage("sft")), [], Target(gpu=False, device_gib=8))
    assert [line.split(":")[0] for line in changes(on_cpu)] == ["learner"], "there is no server to change"


def test_every_stage_of_a_pipeline_is_planned_from_the_models_it_will_have(written):
    scored = {"helpful": {"model": "{reward}"}}
    run = {
        "name": "rl",
        "run_dir": "runs/rl",
        "model": {"path": "unused", "max_length": 512},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
        "rollout": {"rewards": {"helpful": {"model": "unused"}}},
        "eval": {"source": {"kind": "jsonl", "path": "rows.jsonl"}},
    }
    written("sft.yaml", stage("sft"))
    written("reward.yaml", stage("reward"))
    written("run.yaml", run)
    stages = [
        {"name": "sft", "command": "sft", "config": "sft.yaml"},
        {"name": "reward", "command": "reward", "config": "reward.yaml",
         "overrides": {"model.path": "{sft}"}},
        {"name": "rl", "command": "run", "config": "run.yaml",
         "overrides": {"model.path": "{sft}", "rollout.rewards.helpful.model": "{reward}"}},
        {"name": "scores", "command": "evaluate", "config": "run.yaml",
         "overrides": {"model.path": "{rl}", "rollout.rewards": scored}},
    ]  # fmt: skip
    path = written("pipeline.yaml", {"name": "p", "run_dir": "runs/p", "stages": stages})
    made = plans(path, [], Target(device_gib=80))
    assert [plan.experiment.name for plan in made] == ["p-sft", "p-reward", "p-rl", "p-scores"]
    assert [[kind.name for kind in plan.kinds] for plan in made] == [
        ["learner"],
        ["learner"],
        ["learner", "scorer helpful rank", "rollout server rank"],
        ["scorer helpful rank", "evaluation rank"],
    ]
    told = json.loads(as_json(made))
    assert [each["name"] for each in told["stages"]] == ["p-sft", "p-reward", "p-rl", "p-scores"]
    assert [bool(each["publish_seconds_by_gbit"]) for each in told["stages"]] == [False, False, True, False]
    assert made[3].kinds[1].held["weights"] / GIB == pytest.approx(12.6, abs=0.1)
    for plan in made:
        assert of_experiment(plan.experiment, plan.target) == plan
        assert changes(plan) == [] or plan.reasons()
