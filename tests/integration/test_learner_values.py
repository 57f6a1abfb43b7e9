"""PPO with a value model on real Megatron: every layout, a resume, and a policy that learns."""

import pytest
import torch
from learner_runs import STEPS, Run, continued, learn, make_model
from ppo_runs import PPO, assert_same_ppo
from safetensors.torch import load_file

from learner import conversion
from learner.config import ParallelConfig

pytestmark = pytest.mark.slow

ADAPTED = PPO | {"value": PPO["value"] | {"lora": {"rank": 4, "alpha": 8}}}
LEARNING = {
    "steps": 14,
    "algorithm": {"advantage": "gae"},
    "optimizer": {"lr": 2e-2},
    "value": {"optimizer": {"lr": 3e-3}},
    "checkpoint": {"every": 14},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """What one process does; the first run ended by SIGKILL at batch 3, behind the checkpoint of step 2."""
    root = tmp_path_factory.mktemp("one")
    killed = Run(root / "killed", model, options={"kill_at": 3}, **PPO)
    learn(1, [killed], killed=True)
    runs = {
        "whole": Run(root / "whole", model, **PPO),
        "resumed": continued(killed, model, "resumed", **PPO),
        "learning": Run(root / "learning", model, options={"own_samples": str(model)}, **LEARNING),
        "adapted, stopped": Run(root / "adapted", model, options={"stop_at": 3}, **ADAPTED),
        "adapted": Run(root / "adapted", model, **ADAPTED),
    }
    learn(1, list(runs.values()))
    return {"killed": killed, **runs}


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """What two processes do."""
    root = tmp_path_factory.mktemp("two")
    layouts = {"data": {"distributed_optimizer": True}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    runs = {name: Run(root / name, model, layout=layout, **PPO) for name, layout in layouts.items()}
    for name in ("data", "tensor"):
        runs[f"adapted {name}"] = Run(root / f"adapted-{name}", model, layout=layouts[name], **ADAPTED)
    learn(2, list(runs.values()))
    return runs


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_every_layout_gives_the_same_numbers(layout, one, two):
    rows = one["whole"].rows
    assert all(r["value/grad_norm"] > 0 for r in rows)
    assert len({r["kl/coefficient"] for r in rows}) == STEPS, "it moves"
    assert_same_ppo(two[layout], one["whole"], rel=1e-3)


def test_a_killed_learner_goes_on_exactly_with_its_value_model_and_its_kl_coefficient(one):
    assert [r["step"] for r in one["killed"].rows] == [1, 2, 3]
    assert "resumed from" in one["resumed"].log
    assert_same_ppo(one["resumed"], one["whole"], rel=0)


def test_a_checkpoint_of_both_models_is_cut_anew_and_converts_to_what_was_exported(one, tmp_path):
    checkpoint = one["whole"].folder / f"run/checkpoints/step-{STEPS:06d}"
    conversion.reshard(checkpoint, tmp_path / "cut", ParallelConfig(tensor=2, pipeline=2))
    conversion.megatron_to_hf(tmp_path / "cut", tmp_path / "value", value=True)
    conversion.megatron_to_hf(tmp_path / "cut", tmp_path / "policy")
    for folder, expected in (("value", one["whole"].values), ("policy", one["whole"].weights)):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_adapters_of_a_value_model_give_the_same_numbers_in_every_layout_and_over_a_stop(layout, one, two):
    assert "resumed from" in one["adapted"].log
    assert_same_ppo(two[f"adapted {layout}"], one["adapted"], rel=1e-3)


def test_adapters_of_a_value_model_are_fused_in_what_is_exported_and_converted(model, one, tmp_path):
    base, values = load_file(model / "model.safetensors"), one["adapted"].values
    changed = {name for name in values if name not in base or not torch.equal(values[name], base[name])}
    assert changed == {name for name in base if "_proj" in name} | {"score.weight"}
    checkpoint = one["adapted"].folder / f"run/checkpoints/step-{STEPS:06d}"
    conversion.megatron_to_hf(checkpoint, tmp_path / "value", value=True)
    found = load_file(tmp_path / "value" / "model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in values.items())
    with pytest.raises(ValueError, match="of a model with adapters it holds these alone"):
        conversion.reshard(checkpoint, tmp_path / "cut", ParallelConfig(tensor=2))


def test_a_policy_that_answers_itself_learns_with_the_advantages_of_its_value_model(one):
    rows = one["learning"].rows
    rewards = [r["reward/mean"] for r in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25, rewards
    assert all(r["rho/mean"] == pytest.approx(1, abs=1e-3) for r in rows), "its own samples, at once"
    assert rows[-1]["value/loss"] < rows[0]["value/loss"] / 2
    assert rows[-1]["value/return_mean"] == pytest.approx(rewards[-1], abs=0.1), "one reward, at the end"
