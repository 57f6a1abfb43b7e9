"""A whole step of PPO against Hugging Face models and loops over tokens: what each token is trained with."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from buffer.records import Batch, Group, Trajectory
from learner import critic as critic_module
from learner import step as step_module
from learner.advantages import EPSILON
from learner.config import LearnerExperiment
from learner.critic import Critic
from learner.losses import adapted
from learner.model import build_model
from learner.optimizer import Trainable, make_trainable, prepare_schedule
from learner.reference.local import Reference
from learner.step import Updater

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GAMMA, LAMBDA, BETA, CLIP, TEMPERATURE = 0.9, 0.8, 0.3, 1.5, 0.7
RHO_BAR, C_BAR = 1.4, 0.8
REWARDS = [[1.0, 1.0, 1.0], [0.0, 9.0, -1.0], [0.5, 0.0, 2.0]]
"""Of each group: equal ones first, then one beyond the clip."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference", "value")):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if name == "value" else AutoModelForCausalLM
        model = kind.from_config(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / name)
    return root


def group(number: int) -> Group:
    draw = np.random.default_rng(number)
    prompt = draw.integers(3, 67, 4)
    made = []
    for index, reward in enumerate(REWARDS[number]):
        length = int(draw.integers(2, 8))
        ids = np.concatenate([prompt, draw.integers(3, 67, length)]).astype(np.int32)
        mask = np.array([0] * 4 + [1] * length, np.uint8)
        if length > 4:
            mask[6] = 0  # a tool's token: a completion's next trained token is the one behind it
        behavior = (draw.normal(-4.2, 0.1, len(ids)) * mask).astype(np.float32)
        reason = "length" if index == 1 else "stop"
        versions = np.zeros(len(ids), np.int32)
        made.append(Trajectory(index, ids, mask, behavior, versions, reward, {}, reason))
    return Group(f"g{number}", "lease", str(number), "train", tuple(made))


BATCH = Batch(0, tuple(group(n) for n in range(3)), {})


def experiment(folders, targets="gae", falling=False, **algorithm) -> LearnerExperiment:
    value = {"path": str(folders / "value"), "gamma": GAMMA, "gae_lambda": LAMBDA, "optimizer": {"lr": 1e-9}}
    value["targets"] = targets
    if targets == "vtrace":
        value |= {"rho_bar": RHO_BAR, "c_bar": C_BAR}
    learner = {
        "steps": 4,
        "updates_per_batch": 2,
        "tokens_per_microbatch": 64,
        "optimizer": {"lr": 1e-9},
        "algorithm": {"reward_clip": CLIP, **algorithm},
    }
    if falling:
        learner["optimizer"] = {"lr": 2e-9, "schedule": "linear", "clip_grad": 0.25}
        value["optimizer"] = {"lr": 4e-9, "schedule": "linear", "clip_grad": 0.125}
    return LearnerExperiment.model_validate(
        {
            "name": "x",
            "run_dir": "r",
            "model": {"path": str(folders / "policy"), "dtype": "float32", "max_length": 64},
            "buffer": {"groups_per_batch": 3},
            "rollout": {"group_size": 3, "sampling": {"temperature": TEMPERATURE}},
            "learner": learner | ({"value": value} if algorithm["advantage"] == "gae" else {}),
        }
    )


@dataclass
class Token:
    """What one trained token is expected to be trained with."""

    advantage: float
    target: float
    """Its return."""
    value: float
    divergence: float
    """π/μ · (log π - log π_ref)."""


@pytest.fixture(scope="module")
def models(folders):
    found = [AutoModelForCausalLM.from_pretrained(folders / name) for name in ("policy", "reference")]
    return [*found, AutoModelForSequenceClassification.from_pretrained(folders / "value")]


@torch.no_grad()
def facts(models, trajectory: Trajectory) -> list[tuple[float, float, float, float]]:
    """Of each trained token: log μ, log π, log π_ref and V before it."""
    ids = torch.tensor(trajectory.token_ids[None], dtype=torch.int64)
    policy, reference = ((m(ids).logits[0] / TEMPERATURE).log_softmax(-1) for m in models[:2])
    values = models[2].model(ids).last_hidden_state[0] @ models[2].score.weight[0]
    return [
        (
            float(trajectory.behavior_logprobs[t]),
            float(policy[t - 1, ids[0, t]]),
            float(reference[t - 1, ids[0, t]]),
            float(values[t - 1]),
        )
        for t in np.flatnonzero(trajectory.loss_mask)
    ]


def oracle(
    models, gamma, lam, in_reward, with_values, behavior=False, truncated=lambda rho, bar: 1.0
) -> dict[float, Token]:
    """By the token's log μ, which is its own.

    Args:
        truncated: Of a token's ρ and RHO_BAR what weighs its step's error, with C_BAR what carries back the
            next one's.
    """
    tokens: dict[float, Token] = {}
    for trajectory in (t for g in BATCH.groups for t in g.trajectories):
        known = facts(models, trajectory)
        values = [v if with_values else 0.0 for *_, v in known] + [0.0]
        carried = 0.0
        for t in reversed(range(len(known))):
            mu, logprob, reference, _ = known[t]
            reward = -in_reward * ((mu if behavior else logprob) - reference)
            if t == len(known) - 1:
                reward += min(max(trajectory.reward, -CLIP), CLIP)
            error, rho = reward + gamma * values[t + 1] - values[t], math.exp(logprob - mu)
            advantage = error + gamma * lam * carried
            carried = truncated(rho, RHO_BAR) * error + gamma * lam * truncated(rho, C_BAR) * carried
            tokens[mu] = Token(advantage, carried + values[t], values[t], rho * (logprob - reference))
    found = [token.advantage for token in tokens.values()]
    mean = sum(found) / len(found)
    std = math.sqrt(sum((a - mean) ** 2 for a in found) / len(found))
    for token in tokens.values():
        token.advantage = (token.advantage - mean) / (std + EPSILON)
    return tokens


@pytest.fixture
def trained(one_process, folders, monkeypatch):
    """Runs a step; gives its updater, its report and the micro-batches that both models were trained on."""

    def step(falling=False, **algorithm):
        of = experiment(folders, falling=falling, **algorithm)
        layout, kept = of.learner.parallel, {"policy": [], "value": []}

        def build(name, head="vocabulary"):
            return build_model(folders / name, layout, torch.float32, head=head)

        reference = build("reference").requires_grad_(False)
        prepare_schedule(reference.config)
        policy = make_trainable(build("policy"), of.learner.optimizer, layout)
        critic = None
        if of.learner.value is not None:
            value = make_trainable(build("value", "score"), of.learner.value.optimizer, layout)
            critic = Critic(of.learner.value, value, of.learner.steps)
        for module, name, place in (
            (step_module, "objective", "policy"),
            (critic_module, "value_objective", "value"),
        ):
            original = getattr(module, name)

            def remember(*args, original=original, place=place):
                kept[place].append(next(a for a in args if hasattr(a, "behavior_logprobs")))
                return original(*args)

            monkeypatch.setattr(module, name, remember)
        updater = Updater(of, policy, Reference(reference), critic)
        return updater, updater.update(replace(BATCH, index=2) if falling else BATCH), kept

    return step


def assert_trained_with(kept, expected: dict[float, Token], values: bool) -> None:
    got = []
    for batch in kept:
        columns = [batch.behavior_logprobs, batch.advantages]
        columns += [batch.returns, batch.old_values] if values else []
        got += list(zip(*(c.tolist() for c in columns), strict=True))
    assert sorted(row[0] for row in got) == sorted(expected), "every trained token once"
    for mu, advantage, *rest in got:
        token = expected[mu]
        assert advantage == pytest.approx(token.advantage, abs=1e-3)
        assert rest == pytest.approx([token.target, token.value] if values else [], abs=1e-4)


def test_ppo_with_the_kl_in_the_reward(trained, models):
    kl = {"coefficient": BETA, "placement": "reward", "target": 0.5, "horizon": 100}
    updater, report, kept = trained(advantage="gae", kl=kl)
    expected = oracle(models, GAMMA, LAMBDA, BETA, True)
    assert_trained_with(kept["policy"], expected, values=True)
    assert_trained_with(kept["value"], expected, values=True)
    row = report.row()
    tokens = list(expected.values())
    returns, errors = np.array([t.target for t in tokens]), np.array([t.target - t.value for t in tokens])
    assert row["value/return_mean"] == pytest.approx(returns.mean(), rel=1e-4)
    assert row["value/explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), rel=1e-3)
    assert row["value/loss"] * 2 == pytest.approx(sum_of_update_losses(kept["value"], expected), rel=1e-3)
    divergence = sum(t.divergence for t in tokens) / 9
    assert row["kl/completion"] == pytest.approx(divergence, rel=1e-4)
    assert row["kl/coefficient"] == BETA
    after = updater.position()
    assert after["kl_coefficient"] == pytest.approx(adapted(BETA, divergence, 9, 0.5, 100))
    assert after["kl_coefficient"] != BETA


def sum_of_update_losses(kept, expected) -> float:
    """Each update's mean over its tokens of half the squared error; nothing is past the band yet."""
    total = 0.0
    for batch in kept:
        tokens = [expected[mu] for mu in batch.behavior_logprobs.tolist()]
        total += sum(0.5 * (t.value - t.target) ** 2 for t in tokens) / len(tokens)
    return total


def test_ppo_without_a_kl_and_with_the_behavior_policy_in_its_place(trained, models):
    _, _, kept = trained(advantage="gae")
    assert_trained_with(kept["policy"], oracle(models, GAMMA, LAMBDA, 0.0, True), values=True)
    kl = {"coefficient": BETA, "placement": "reward"}
    _, _, kept = trained(advantage="gae", kl=kl, correction={"kind": "bypass"})
    assert_trained_with(kept["policy"], oracle(models, GAMMA, LAMBDA, BETA, True, behavior=True), values=True)


@pytest.mark.parametrize("kind", ["decoupled", "bypass"])
def test_values_can_be_of_the_proximal_policy_where_another_one_sampled(trained, models, kind):
    _, _, kept = trained(advantage="gae", targets="vtrace", correction={"kind": kind})
    expected = oracle(models, GAMMA, LAMBDA, 0.0, True, truncated=lambda rho, bar: min(bar, rho))
    plain = oracle(models, GAMMA, LAMBDA, 0.0, True)
    assert max(abs(expected[mu].target - plain[mu].target) for mu in plain) > 0.1, (
        "the case is to tell something"
    )
    assert_trained_with(kept["policy"], expected, values=True)
    assert_trained_with(kept["value"], expected, values=True)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_distance_is_counted_once_and_rates_and_clips_are_those_of_the_step(
    trained, monkeypatch, placement
):
    """At batch 2 of 4, of a policy and a value model whose rates fall."""
    given, clips, rates = [], [], []
    original = step_module.objective

    def remember(*args):
        given.append(args[5])
        return original(*args)

    def step(self, clip_grad):
        clips.append(clip_grad)
        rates.append([group["lr"] for group in self.optimizer.param_groups])
        return made(self, clip_grad)

    monkeypatch.setattr(step_module, "objective", remember)
    made = Trainable.step
    monkeypatch.setattr(Trainable, "step", step)
    kl = {"coefficient": BETA, "placement": placement}
    _, report, _ = trained(advantage="gae", kl=kl, falling=True)
    assert set(given) == {BETA if placement == "loss" else 0.0}
    row = report.row()
    assert (row["lr"], row["value/lr"]) == pytest.approx((1e-9, 2e-9))
    assert clips == [0.125, 0.25, 0.125, 0.25]
    for number, found in enumerate(rates):
        assert found == pytest.approx([2e-9 if number % 2 == 0 else 1e-9] * len(found))


def test_reinforce_plus_plus_with_the_kl_in_the_reward_takes_what_is_still_to_come(trained, models):
    kl = {"coefficient": BETA, "placement": "reward"}
    _, report, kept = trained(advantage="reinforce_plus_plus", kl=kl)
    assert_trained_with(kept["policy"], oracle(models, 1.0, 1.0, BETA, False), values=False)
    assert kept["value"] == []
    assert "value/loss" not in report.row()


def test_a_coefficient_that_moves_goes_on_from_the_checkpoint_and_a_fixed_one_from_the_configuration(
    trained,
):
    moving = {"coefficient": BETA, "placement": "reward", "target": 0.5, "horizon": 100}
    updater, _, _ = trained(advantage="reinforce_plus_plus", kl=moving)
    told = json.loads(json.dumps(updater.position()))
    assert told["kl_coefficient"] != BETA, "it has moved"
    told["kl_coefficient"] *= 3  # where no other updater comes by itself
    fresh, _, _ = trained(advantage="reinforce_plus_plus", kl=moving)
    fresh.restore(told)
    assert fresh.position() == told
    fixed, _, _ = trained(advantage="reinforce_plus_plus", kl={"coefficient": 0.1, "placement": "reward"})
    fixed.restore(told)
    assert fixed.position() == {"kl_coefficient": 0.1}


def test_values_that_are_not_finite_end_the_step_with_what_to_do(trained, monkeypatch):
    nan = torch.tensor(math.nan)
    monkeypatch.setattr(
        Critic, "values", lambda _, batches, report: [nan.expand(len(m.target_ids)) for m in batches]
    )
    with pytest.raises(ValueError, match=r"advantages are not finite.*learner\.value\.optimizer\.lr"):
        trained(advantage="gae")
