"""Functions of the user's in the place of built-in ones, and the shipped examples of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from buffer.dotted import is_dotted, resolve
from buffer.records import Batch, Group, Trajectory
from configs.custom import anneal, brevity, dual_clip
from learner.advantages import advantages, moments
from learner.algorithm import AlgorithmConfig
from learner.losses import Denominators, objective
from learner.packing import pack

NOT_FUNCTIONS = {"number": 3}


def too_many(rewards):
    return np.zeros(len(rewards) + 1)


def infinite(rewards):
    return rewards * np.inf


def scalar_loss(logprobs, old_logprobs, batch):
    return -(logprobs * batch.advantages).mean()


def constant_loss(logprobs, old_logprobs, batch):
    return -(logprobs * batch.advantages).detach()


def clipped_loss(logprobs, old_logprobs, batch):
    r, a = torch.exp(logprobs - old_logprobs), batch.advantages
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)


def group(*completions: list[int], rewards=(1.0, 0.0)) -> Group:
    made = []
    for index, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        mask = np.array([0, 0, *[1] * len(completion)], np.uint8)
        ids = np.array([1, 2, *completion], np.int32)
        logprobs = np.where(mask > 0, -1.5, 0.0).astype(np.float32)
        versions = np.zeros(len(ids), np.int32)
        made.append(Trajectory(index, ids, mask, logprobs, versions, reward, {}, "stop"))
    return Group("g", "l", "p", "train", tuple(made))


def objective_of(loss: str, logprobs: torch.Tensor, old: torch.Tensor, advantages=(0.5, 0.5, -2.0)):
    (batch,) = pack([group([3, 4], [5])], [np.array([0.5, -2.0])], 64)
    batch = replace(batch, proximal_logprobs=old, advantages=torch.tensor(advantages))
    algorithm = AlgorithmConfig.model_validate({"loss": loss})
    return objective(logprobs, torch.zeros(3), batch, algorithm, Denominators(3, 2, 64), 0.0)


def test_the_example_loss_is_ppos_and_bounds_what_a_bad_token_costs():
    """Of three tokens a good one and two bad ones; the last one's ratio is e^1.5, past the bound of 3."""
    logprobs = torch.tensor([-1.0, -2.0, -0.1], requires_grad=True)
    old = torch.tensor([-1.1, -1.9, -1.6])
    loss, _ = objective_of("configs.custom.dual_clip:loss", logprobs, old, advantages=(0.5, -2.0, -2.0))
    loss.backward()
    ratios = [np.exp(0.1), np.exp(-0.1), dual_clip.WORST]
    rho = [np.exp(before + 1.5) for before in old.tolist()]
    lost = [-w * r * a / 3 for w, r, a in zip(rho, ratios, (0.5, -2.0, -2.0), strict=True)]
    assert float(loss) == pytest.approx(sum(lost), rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([*lost[:2], 0.0], rel=1e-5)


def test_what_tokens_weigh_with_a_loss_of_ones_own_is_told_by_its_gradient():
    """As of the built-in loss; the first one's is stopped, the last one's advantage is 0."""
    old, ours = torch.tensor([-1.5, -1.9, -1.6]), f"{__name__}:clipped_loss"
    built_in, mine = (
        objective_of(loss, torch.tensor([-1.0, -2.0, -0.9], requires_grad=True), old, (0.5, -2.0, 0.0))[1]
        for loss in ("ppo", ours)
    )
    told = [name for name in built_in if float(built_in[name]) != pytest.approx(float(mine[name]))]
    assert told == ["clipped"], "only where it clips is not known"


def test_a_loss_that_is_not_one_number_a_token_is_named():
    with pytest.raises(ValueError, match=r"scalar_loss returned \[\]; expected a loss for each of 3 tokens"):
        objective_of(f"{__name__}:scalar_loss", torch.zeros(3), torch.zeros(3))


def test_a_loss_that_trains_nothing_is_named():
    logprobs = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="constant_loss returned a loss without a gradient"):
        objective_of(f"{__name__}:constant_loss", logprobs, torch.zeros(3))
    with torch.no_grad():  # a pass that only measures
        objective_of(f"{__name__}:constant_loss", torch.zeros(3), torch.zeros(3))


def test_the_example_advantage_ranks_and_leaves_ties_alone():
    rewards = [np.array([0.0, 5.0, 5.0, 900.0]), np.array([1.0, 1.0])]
    found = advantages("configs.custom.anneal:ranks", rewards, moments(rewards))
    assert [values.tolist() for values in found] == [[-0.75, 0.0, 0.0, 0.75], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["too_many", "infinite"])
def test_advantages_that_do_not_fit_their_rewards_are_named(name):
    with pytest.raises(ValueError, match=f"{name} made .* expected as many, finite"):
        advantages(f"{__name__}:{name}", [np.ones(2)], moments([np.ones(2)]))


def test_the_example_loop_charges_for_length_and_changes_nothing_else():
    batch = Batch(0, (group([3, 4, 5], [6]),), {})
    charged = anneal.charged(batch, 0.1)
    assert [t.reward for t in charged.groups[0].trajectories] == pytest.approx([0.7, -0.1])
    assert [t.reward for t in batch.groups[0].trajectories] == [1.0, 0.0]
    assert charged.groups[0].trajectories[0].token_ids is batch.groups[0].trajectories[0].token_ids


def test_the_example_reward_wants_it_right_and_then_short():
    row = {"answer": "7"}
    assert brevity.reward("7", row) == {"right": 1.0, "short": 1.0}
    assert brevity.reward("so " * 19 + "7", row) == {"right": 1.0, "short": 0.5}
    assert brevity.reward("8", row) == {"right": 0.0, "short": 0.0}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no.such.module:f", "no.such.module:f: cannot be imported.*No module named 'no'"),
        (f"{__name__}:missing", "missing: cannot be imported.*has no attribute 'missing'"),
        (f"{__name__}:NOT_FUNCTIONS", "NOT_FUNCTIONS: is a dict; expected a function"),
    ],
)
def test_what_cannot_be_called_is_told(path, told):
    with pytest.raises(ValueError, match=told):
        resolve(path)


def test_what_has_the_shape_of_a_path():
    assert is_dotted("a.b_c:d")
    assert not any(map(is_dotted, ["ppo", "a:b:c", "a.b:", ":b", "a b:c", "a:1", "os.system('x'):f"]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"loss": "pppo"},
            "expected ppo, reinforce, cispo, gspo, dppo, m2po, dpo or your own package.module:function",
        ),
        ({"advantage": "grpoo"}, "expected grpo, dr_grpo, rloo, reinforce_plus_plus, gae or your own"),
        ({"loss": "a.b:c", "clip_low": 0.1}, "loss a.b:c does not clip by it, so clip_low would do nothing"),
        ({"advantage": "a:b", "kl": {"coefficient": 1, "placement": "reward"}}, "compares one number"),
    ],
)
def test_configurations_that_would_do_nothing_or_are_misspelt_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        AlgorithmConfig.model_validate(changes)
