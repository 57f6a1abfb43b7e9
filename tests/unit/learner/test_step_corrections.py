"""A whole step of the policy: what corrections learn of the global batch before an update, and from what."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from buffer.records import Batch, Group, Trajectory
from learner import step as step_module
from learner.config import LearnerExperiment
from learner.losses import Denominators
from learner.metrics import StepReport
from learner.model import build_model
from learner.optimizer import Trainable, make_trainable
from learner.packing import MicroBatch
from learner.policy_losses import trusted_limit
from learner.step import Updater

INDEX = 7
REWARDS = [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.5, 0.0]]
"""Of each group; the third's are equal, so no pass is made over it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


def group(number: int) -> Group:
    draw = np.random.default_rng(number)
    prompt = draw.integers(3, 67, 4)
    made = []
    for index, reward in enumerate(REWARDS[number]):
        length = int(draw.integers(8, 20))
        ids = np.concatenate([prompt, draw.integers(3, 67, length)]).astype(np.int32)
        mask = np.array([0] * 4 + [1] * length, np.uint8)
        behavior = (draw.normal(-4.2, 0.3, len(ids)) * mask).astype(np.float32)
        versions = (INDEX - draw.integers(0, 3, len(ids)) * mask).astype(np.int32) * mask
        reason = "length" if (number, index) == (1, 1) else "stop"
        made.append(Trajectory(index, ids, mask, behavior, versions, reward, {}, reason))
    return Group(f"g{number}", "lease", str(number), "train", tuple(made))


BATCH = Batch(INDEX, tuple(group(n) for n in range(4)), {})


@dataclass
class Step:
    report: StepReport
    given: list[tuple[MicroBatch, Denominators]]
    """What the objective was called with."""
    computed: list[Tensor]
    """log π of those micro-batches, as it was then."""


@pytest.fixture
def trained(one_process, folder, monkeypatch):
    def step(
        budget: int = 64,
        updates: int = 1,
        lr: float = 1e-9,
        temperature: float = 1,
        staleness: int = 2,
        **algorithm,
    ) -> Step:
        of = LearnerExperiment.model_validate(
            {
                "name": "x",
                "run_dir": "r",
                "model": {"path": str(folder), "dtype": "float32", "max_length": 64},
                "buffer": {"groups_per_batch": 4, "max_staleness": staleness},
                "rollout": {"group_size": 2, "sampling": {"temperature": temperature}},
                "learner": {
                    "updates_per_batch": updates,
                    "tokens_per_microbatch": budget,
                    "optimizer": {"lr": lr},
                    "algorithm": algorithm,
                },
            }
        )
        policy = make_trainable(
            build_model(folder, of.learner.parallel, torch.float32), of.learner.optimizer, of.learner.parallel
        )
        given, computed, original = [], [], step_module.objective

        def remember(*args):
            given.append((args[2], args[4]))
            computed.append(args[0].detach())
            return original(*args)

        monkeypatch.setattr(step_module, "objective", remember)
        report = Updater(of, policy, None).update(BATCH)
        monkeypatch.setattr(step_module, "objective", original)
        return Step(report, given, computed)

    return step


@torch.no_grad()
def log_ratios(folder, temperature: float = 1) -> dict[float, float]:
    """log π / μ of every trained token that a gradient comes from, by its log μ, which is its own."""
    model, found = AutoModelForCausalLM.from_pretrained(folder), {}
    moving = [g for g in BATCH.groups if len({t.reward for t in g.trajectories}) > 1]
    for trajectory in (t for g in moving for t in g.trajectories):
        ids = torch.tensor(trajectory.token_ids[None], dtype=torch.int64)
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
        for t in np.flatnonzero(trajectory.loss_mask):
            mu = float(trajectory.behavior_logprobs[t])
            found[mu] = float(logprobs[t - 1, ids[0, t]]) - mu
    return found


def praised_tokens() -> dict[float, bool]:
    """Whether the token's advantage is above 0, by its log μ: of two completions the better one's is."""
    return {
        float(mu): t.reward == max(u.reward for u in g.trajectories)
        for g in BATCH.groups
        for t in g.trajectories
        for mu in t.behavior_logprobs[t.loss_mask > 0]
    }


def test_weights_are_divided_by_their_mean_over_all_micro_batches(trained, folder):
    correction = {"normalize": True, "cap": 1.5, "veto": 0}
    one, several = (trained(budget, correction=correction) for budget in (512, 64))
    assert len(one.given) == 1 < len(several.given)
    rho = [math.exp(x) for x in log_ratios(folder).values()]
    weights = [min(x, 1.5) for x in rho if 0.5 <= x <= 5]
    expected = sum(weights) / len(weights)
    assert abs(expected - 1) > 0.02, "the case is to tell something"
    for _, total in [*one.given, *several.given]:
        assert total.mean_weight == pytest.approx(expected, rel=1e-4)
    plain = trained(512, correction=correction | {"normalize": False})
    norms = [s.report.grad_norms[0] for s in (one, several, plain)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0] * expected, rel=1e-4), "the gradient is linear in the weights"


def test_the_proximal_policy_is_estimated_only_once_the_policy_has_left_it(trained):
    step = trained(512, updates=2, correction={"proximal": "interpolated"})
    (first, _), (second, _) = step.given
    assert first.proximal_logprobs is first.proximal_share is second.proximal_logprobs is None
    ages = INDEX - second.versions.float()
    assert second.proximal_share is not None
    assert second.proximal_share.tolist() == pytest.approx((ages / (ages + 0.5)).tolist())
    assert 0 < len(set(ages.tolist())) <= 3


def test_only_updates_that_were_made_move_the_policy_from_the_proximal_one(trained, monkeypatch):
    """One whose gradient is not finite is none."""
    made = iter([False, True, False, True])
    monkeypatch.setattr(Trainable, "step", lambda *_: (1.0, next(made)))
    step = trained(512, updates=4, correction={"proximal": "interpolated"})
    shares = [batch.proximal_share for batch, _ in step.given]
    assert shares[:2] == [None, None]
    for (batch, _), share in zip(step.given[2:], shares[2:], strict=True):
        age = INDEX - batch.versions.float()
        assert share.tolist() == pytest.approx((age / (age + 1 / 4)).tolist())


def test_m2po_trusts_the_same_tokens_in_one_micro_batch_and_in_several(trained, folder):
    settings = {"loss": "m2po", "correction": {"kind": "bypass"}, "m2po": {"second_moment": 0.05}}
    one, several = (trained(budget, **settings) for budget in (512, 64))
    assert len(one.given) == 1 < len(several.given)
    logs, praised = log_ratios(folder), praised_tokens()
    away = [mu for mu in logs if (logs[mu] > 0) == praised[mu]]
    held = sorted(away, key=lambda mu: logs[mu] ** 2)
    while sum(logs[mu] ** 2 for mu in held) / len(held) > 0.05:
        held.pop()
    assert 0 < len(held) < len(away), "the case is to tell something"
    towards = [mu for mu in logs if mu not in away]
    assert max(logs[mu] ** 2 for mu in towards) > max(logs[mu] ** 2 for mu in held), "and stays all the same"
    kept = held + towards
    for step in (one, several):
        found = [
            mu
            for b, _ in step.given
            for mu, ok in zip(b.behavior_logprobs.tolist(), b.trusted, strict=True)
            if ok
        ]
        assert sorted(found) == sorted(kept)
        assert step.report.row()["clip_fraction"] == pytest.approx(1 - len(kept) / len(logs))
    assert several.report.grad_norms[0] == pytest.approx(one.report.grad_norms[0], rel=1e-4)


def test_m2po_trusts_by_what_the_policy_is_at_each_update(trained, folder):
    """Not by what it was before the batch's first one."""
    limit, temperature = 0.05, 0.7
    settings = {"loss": "m2po", "correction": {"kind": "bypass"}, "m2po": {"second_moment": limit}}
    step = trained(512, updates=2, lr=0.02, temperature=temperature, **settings)
    before = log_ratios(folder, temperature)

    def expected(batch: MicroBatch, logs: Tensor) -> list[bool]:
        away = batch.advantages * logs > 0
        return (~away | (logs**2 <= trusted_limit(logs[away] ** 2, limit))).tolist()

    assert len(step.given) == 2
    for number, ((batch, _), logprobs) in enumerate(zip(step.given, step.computed, strict=True)):
        assert batch.trusted is not None
        assert batch.trusted.tolist() == expected(batch, logprobs - batch.behavior_logprobs)
        stale = torch.tensor([before[mu] for mu in batch.behavior_logprobs.tolist()])
        assert number == 0 or batch.trusted.tolist() != expected(batch, stale)


def test_the_proximal_policy_is_that_before_the_batchs_first_update(trained, folder):
    step = trained(512, updates=2, lr=0.02, temperature=0.7)
    before = log_ratios(folder, 0.7)
    assert len(step.given) == 2
    for batch, _ in step.given:
        assert batch.proximal_logprobs is not None
        found = (batch.proximal_logprobs - batch.behavior_logprobs).tolist()
        assert found == pytest.approx([before[mu] for mu in batch.behavior_logprobs.tolist()], abs=1e-4)
    moved = (step.computed[1] - step.given[1][0].proximal_logprobs).abs()
    assert moved.max() > 0.1, "the case is to tell something"


def test_dppo_trains_equal_groups_too_for_its_penalty(trained):
    step = trained(512, loss="dppo", correction={"kind": "bypass"})
    assert step.report.row()["gradient_fraction"] == 1
    assert trained(512, loss="dppo", correction={"kind": "bypass"}, dppo={"penalty": 0}).report.row()[
        "gradient_fraction"
    ] < 1  # fmt: skip


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus"])
def test_a_cut_completion_is_not_trained_and_its_reward_still_counts(trained, advantage):
    plain, filtered = (trained(512, advantage=advantage, overlong={"filter": f}) for f in (False, True))
    (before, _), (after, total) = plain.given[0], filtered.given[0]
    cut = BATCH.groups[1].trajectories[1]
    mine = set(cut.behavior_logprobs[cut.loss_mask > 0].tolist())
    assert set(before.behavior_logprobs.tolist()) - set(after.behavior_logprobs.tolist()) == mine
    assert total.tokens == plain.given[0][1].tokens - len(mine)
    assert total.sequences == plain.given[0][1].sequences - 1
    advantages = dict(zip(before.behavior_logprobs.tolist(), before.advantages.tolist(), strict=True))
    for mu, advantage in zip(after.behavior_logprobs.tolist(), after.advantages.tolist(), strict=True):
        assert advantage == advantages[mu]


@pytest.mark.parametrize("clip", [None, 0.4])
def test_a_long_completions_reward_is_what_it_is_less_its_penalty(trained, clip):
    """Its own group's rewards are equal before. The limit is a rollout's 256; the band begins between the two
    lengths, and the penalty is on top of what the clip leaves of the reward."""
    first, second = BATCH.groups[2].trajectories
    lengths = [int(t.loss_mask.sum()) for t in (first, second)]
    short, long = sorted(lengths)
    assert short + 1 < long, "the case is to tell something"
    band = 256 - short - 1
    algorithm = {"advantage": "dr_grpo", "reward_clip": clip, "overlong": {"band": band, "penalty": 0.5}}
    given = trained(512, **algorithm).given[0][0]
    advantages = dict(zip(given.behavior_logprobs.tolist(), given.advantages.tolist(), strict=True))
    penalties = [-0.5 * max(0, n - short - 1) / band for n in lengths]
    mu = float(first.behavior_logprobs[first.loss_mask > 0][0])
    assert advantages[mu] == pytest.approx((penalties[0] - penalties[1]) / 2, rel=1e-4)


def test_a_step_tapers_where_tokens_may_be_old(trained):
    masked = {
        name: trained(**settings).report.row()["mask_fraction"]
        for name, settings in {
            "fresh": {"staleness": 2},
            "old": {"staleness": 3},
            "tapered": {"correction": {"taper": True}},
        }.items()
    }
    assert masked["old"] == masked["tapered"] != masked["fresh"]
