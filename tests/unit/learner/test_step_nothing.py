"""Batches that teach nothing: no weight moves, the version goes on, and the next batch trains."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from buffer.records import Batch, Group, Trajectory
from learner import loop
from learner.config import LearnerExperiment
from learner.critic import Critic
from learner.feed import Command
from learner.flow import Flow
from learner.metrics import StepReport, batch_row
from learner.model import build_model
from learner.optimizer import Trainable, make_trainable, prepare_schedule
from learner.reference.local import Reference
from learner.step import Updater

KL = {"coefficient": 0.1, "target": 0.5, "horizon": 100}
ALL_CUT = {
    "grpo": {"advantage": "grpo"},
    "kl": {"advantage": "grpo", "kl": KL},
    "normalized": {"advantage": "grpo", "correction": {"normalize": True}},
    "reinforce": {"advantage": "reinforce_plus_plus", "kl": KL | {"placement": "reward"}},
    "ppo": {"advantage": "gae", "kl": KL | {"placement": "reward"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "policy")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "value")
    return root


def batch(index: int, rewards: tuple[float, float], finish_reason: str) -> Batch:
    draw = np.random.default_rng(index)

    def trajectory(number: int, prompt: np.ndarray) -> Trajectory:
        ids = np.concatenate([prompt, draw.integers(3, 67, 6)]).astype(np.int32)
        mask = np.array([0] * 4 + [1] * 6, np.uint8)
        behavior = (draw.normal(-4.2, 0.1, 10) * mask).astype(np.float32)
        versions = mask.astype(np.int32) * index
        return Trajectory(number, ids, mask, behavior, versions, rewards[number], {}, finish_reason)

    def group(name: str) -> Group:
        prompt = draw.integers(3, 67, 4)
        return Group(name, "lease", name, "train", tuple(trajectory(n, prompt) for n in range(2)))

    return Batch(index, (group(f"{index}/0"), group(f"{index}/1")), {})


class Made:
    """A run of the main loop over the batches: its rows, and the weights of every version."""

    def __init__(self, flow: Flow, rows: list[dict[str, Any]], versions: list[list[Tensor]]) -> None:
        self.flow, self.rows, self.versions = flow, rows, versions

    def moved(self, version: int) -> list[bool]:
        """Of each of its tensors, whether it is another than in the version before."""
        pairs = zip(self.versions[version - 1], self.versions[version], strict=True)
        return [not torch.equal(before, after) for before, after in pairs]


@pytest.fixture
def made(one_process, folders, tmp_path) -> Callable[..., Made]:
    """Everything real but what is around the learner: buffer, sender, checkpoints, the journal."""

    def make(batches: list[Batch], updates: int = 1, **algorithm: Any) -> Made:
        value = {"path": str(folders / "value"), "optimizer": {"lr": 1e-2}}
        of = LearnerExperiment.model_validate(
            {
                "name": "x",
                "run_dir": str(tmp_path),
                "model": {"path": str(folders / "policy"), "dtype": "float32", "max_length": 64},
                "buffer": {"groups_per_batch": 2},
                "rollout": {"group_size": 2},
                "learner": {
                    "steps": len(batches),
                    "updates_per_batch": updates,
                    "optimizer": {"lr": 1e-2},
                    "checkpoint": {"every": 99},
                    "algorithm": algorithm,
                    **({"value": value} if algorithm["advantage"] == "gae" else {}),
                },
            }
        )
        policy, critic = trainable(of, "policy"), None
        if of.learner.value is not None:
            critic = Critic(of.learner.value, trainable(of, "value"), of.learner.steps)
        reference = build_model(folders / "policy", of.learner.parallel, torch.float32).requires_grad_(False)
        prepare_schedule(reference.config)
        updater = Updater(of, policy, Reference(reference) if "kl" in algorithm else None, critic)
        models = [policy.model, *([critic.trainable.model] if critic is not None else [])]
        versions: list[list[Tensor]] = []

        def publish(version: int) -> None:
            assert version == len(versions)
            versions.append([p.detach().clone() for model in models for p in model.parameters()])

        publish(0)
        rows: list[dict[str, Any]] = []

        def write(step: int, shard: Batch, report: StepReport, *others: object) -> None:
            rows.append({"step": step, **batch_row(shard, 2), **report.row()})

        parts: dict[str, Any] = {
            "feed": SimpleNamespace(next=lambda index, wanted: (Command.TRAIN, batches[index])),
            "publishing": SimpleNamespace(publish=publish, settle=lambda: None, is_first=False, last=None),
            "reporter": SimpleNamespace(timed=lambda name: nullcontext(), write=write),
            "checkpoints": SimpleNamespace(save=lambda *a: None, safe_step=lambda: 0),
        }
        parts["feed"].committed = lambda step: None
        flow = Flow(of, policy, updater, stop=None, version=0, **parts)  # type: ignore[arg-type]
        loop.train(flow)
        return Made(flow, rows, versions)

    def trainable(of: LearnerExperiment, name: str) -> Trainable:
        head = "score" if name == "value" else "vocabulary"
        model = build_model(folders / name, of.learner.parallel, torch.float32, head=head)
        optimizer = (
            of.learner.value.optimizer if name == "value" and of.learner.value else of.learner.optimizer
        )
        return make_trainable(model, optimizer, of.learner.parallel)

    return make


def assert_finite(row: dict[str, Any]) -> None:
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    assert all(map(math.isfinite, numbers.values())), numbers


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("case", ALL_CUT)
def test_a_batch_of_cut_completions_makes_a_version_and_no_update(made, case, updates):
    """Between two that train: optimizers that are under way would move the weights by momentum alone."""
    reasons = ("stop", "length", "stop")
    batches = [batch(index, (0.0, 1.0), reason) for index, reason in enumerate(reasons)]
    run = made(batches, updates, overlong={"filter": True}, **ALL_CUT[case])
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert run.flow.version == 3
    assert all(run.moved(1))
    assert not any(run.moved(2))
    assert all(run.moved(3))
    nothing = run.rows[1]
    assert_finite(nothing)
    told = ("tokens", "loss", "grad_norm", "skipped_updates", "gradient_fraction", "kl/completion")
    assert [nothing[name] for name in told] == [0] * len(told)
    assert (nothing["samples"], nothing["completion/cut_fraction"]) == (4, 1)
    assert (nothing["rho/mean"], nothing["ess"]) == (None, None)
    assert run.rows[2]["kl/coefficient"] == nothing["kl/coefficient"], "nothing was measured to move it by"
    if case == "ppo":
        assert (nothing["value/loss"], nothing["value/grad_norm"], nothing["value/skipped_updates"]) == (
            0,
            0,
            0,
        )


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_a_batch_of_equal_rewards_makes_a_version_of_the_same_weights(made, advantage, updates):
    run = made([batch(0, (1.0, 1.0), "stop"), batch(1, (0.0, 1.0), "stop")], updates, advantage=advantage)
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.flow.version == 2
    assert not any(run.moved(1))
    assert all(run.moved(2))
    nothing = run.rows[0]
    assert_finite(nothing)
    assert (nothing["loss"], nothing["grad_norm"], nothing["skipped_updates"]) == (0, 0, 0)
    assert (nothing["tokens"], nothing["gradient_fraction"], nothing["reward/equal_groups"]) == (24, 0, 1)
