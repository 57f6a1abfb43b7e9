"""The learning-rate schedule, which is pure; what the optimizer does is seen in tests/integration."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from learner.config import OptimizerConfig
from learner.optimizer import MOST_SKIPPED, Trainable, learning_rate, set_rates, warn_of_warmup


def rates(steps, **config):
    return [learning_rate(OptimizerConfig(lr=1.0, **config), s, steps) for s in range(steps)]


def test_constant_after_a_linear_warmup():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_falls_from_lr_to_min_lr_behind_the_last_step(schedule):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2, min_lr=0.1)
    got = [learning_rate(config, step, 9) for step in range(10)]
    assert got[1] == 1.0
    assert got[2] == 1.0
    assert got[-1] == pytest.approx(0.1)
    assert got[2:] == sorted(set(got[2:]), reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_is_that_of_transformers(schedule, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=7)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    got = rates(7, schedule=schedule, warmup_steps=warmup)
    # But for its first step, which transformers warms up with a rate of 0.
    assert got[:warmup] == pytest.approx(expected[1 : warmup + 1])
    assert got[warmup:] == pytest.approx(expected[warmup:7])
    assert all(rate > 0 for rate in got)


def test_formulas_in_the_middle():
    assert rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(4, schedule="cosine")[1] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_a_run_as_short_as_its_warmup_and_a_step_beyond_the_end_are_defined():
    assert rates(2, schedule="cosine", warmup_steps=2) == [0.5, 1.0]
    assert rates(1, schedule="linear") == [1.0]
    assert rates(2, schedule="cosine", warmup_steps=4) == [0.25, 0.5]
    assert learning_rate(OptimizerConfig(lr=1.0, min_lr=0.2, schedule="linear"), 50, 5) == pytest.approx(0.2)


def test_a_rate_that_never_gets_where_it_is_to_go_is_told(caplog):
    warn_of_warmup(OptimizerConfig(warmup_steps=4), 4)
    assert not caplog.messages
    warn_of_warmup(OptimizerConfig(warmup_steps=5), 4)
    assert "warmup_steps=5 is more than the 4 steps" in caplog.text


def test_norms_and_biases_are_not_decayed():
    groups = [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 1.0}]
    config = OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9))
    set_rates(SimpleNamespace(param_groups=groups), 0.5, config)
    assert all(g["betas"] == (0.8, 0.9) for g in groups)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [g["lr"] for g in groups] == [0.5, 0.5]


def test_updates_that_are_skipped_without_end_end_the_run(monkeypatch):
    norms = iter([1.0] + [float("nan")] * (MOST_SKIPPED - 1) + [1.0] + [float("nan")] * MOST_SKIPPED)

    def stepped(optimizer, clip_grad):
        norm = next(norms)
        return norm, math.isfinite(norm)

    monkeypatch.setattr("learner.optimizer.apply_gradients", stepped)
    trainable = Trainable(None, None)
    for _ in range(2 * MOST_SKIPPED):
        trainable.step(1.0)
    assert trainable.updates.made == 2
    with pytest.raises(ValueError, match=rf"last {MOST_SKIPPED} updates were skipped, .* nan"):
        trainable.step(1.0)
