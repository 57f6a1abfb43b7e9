"""A whole step of online DPO against Hugging Face models and a loop over pairs."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from buffer.records import Batch, Group, Trajectory
from learner.checkpoint import Checkpoints, Setup
from learner.config import LearnerExperiment
from learner.model import build_model
from learner.optimizer import make_trainable, prepare_schedule
from learner.reference.local import Reference
from learner.step import Updater

REWARDS = [[1.0, 1.0, 1.0], [0.0, 9.0, -1.0], [0.5, 0.0, 0.5], [2.0, 1.0, 1.0]]
"""Of each group: no pair, three pairs, two pairs; none, as the best completion has no trained token."""
TIED, BETA = (0, 3), 0.4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=67, max_position_embeddings=64, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / name)
    return root


def group(number: int) -> Group:
    draw = np.random.default_rng(number)
    prompt, made = draw.integers(3, 67, 4), []
    for index, reward in enumerate(REWARDS[number]):
        # One group is longer than a micro-batch's budget.
        length = int(draw.integers(20, 25) if number == 1 else draw.integers(5, 12))
        ids = np.concatenate([prompt, draw.integers(3, 67, length)]).astype(np.int32)
        mask = np.array([0] * 4 + [1] * length, np.uint8)
        mask[6] = 0  # a tool's token is no part of the completion's probability
        if (number, index) == (3, 0):
            mask[:] = 0
        behavior = (draw.normal(-4.2, 0.1, len(ids)) * mask).astype(np.float32)
        versions = np.zeros(len(ids), np.int32)
        made.append(Trajectory(index, ids, mask, behavior, versions, reward, {}, "stop"))
    return Group(f"g{number}", "lease", str(number), "train", tuple(made))


def batch(*numbers: int) -> Batch:
    return Batch(0, tuple(group(n) for n in numbers), {})


@pytest.fixture
def updater(one_process, folders):
    """An updater and its policy."""

    def make(rate=1e-9, updates=1, sharded=False, **algorithm):
        fields = {
            "name": "x",
            "run_dir": "r",
            "model": {"path": str(folders / "policy"), "dtype": "float32", "max_length": 64},
            "buffer": {"groups_per_batch": 4},
            "rollout": {"group_size": 3, "sampling": {"temperature": 0.7}},
            "learner": {
                "updates_per_batch": updates,
                "tokens_per_microbatch": 64,
                "optimizer": {"lr": rate},
                "parallel": {"distributed_optimizer": sharded},
                "algorithm": {"loss": "dpo", "dpo": {"beta": BETA}, **algorithm},
            },
        }
        of = LearnerExperiment.model_validate(fields)
        layout = of.learner.parallel
        policy, reference = (build_model(folders / n, layout, torch.float32) for n in ("policy", "reference"))
        prepare_schedule(reference.requires_grad_(False).config)
        trainable = make_trainable(policy, of.learner.optimizer, layout)
        return Updater(of, trainable, Reference(reference)), trainable

    return make


@torch.no_grad()
def values(folders, groups: Batch, weighted=False) -> list[list[float]]:
    """Σ log π / π_ref of each completion, at the sampling temperature; or Σ π/μ · log π / π_ref."""
    models = [AutoModelForCausalLM.from_pretrained(folders / n) for n in ("policy", "reference")]

    def value(t: Trajectory) -> float:
        ids = torch.tensor(t.token_ids[None], dtype=torch.int64)
        logprobs = [(m(ids).logits[0] / 0.7).log_softmax(-1) for m in models]
        total = 0.0
        for place in np.flatnonzero(t.loss_mask):
            policy, reference = (float(of[place - 1, ids[0, place]]) for of in logprobs)
            weight = math.exp(policy - t.behavior_logprobs[place]) if weighted else 1.0
            total += weight * (policy - reference)
        return total

    return [[value(t) for t in g.trajectories] for g in groups.groups]


def test_loss_and_what_is_told_are_those_of_the_pairs(updater, folders):
    made, _ = updater()
    everything = batch(0, 1, 2, 3)
    row, found = made.update(everything).row(), values(folders, everything)
    losses, differences, chosen = [], [], []
    for number in (1, 2):
        pairs = [p for p in permutations(range(3), 2) if REWARDS[number][p[0]] > REWARDS[number][p[1]]]
        gaps = [found[number][i] - found[number][j] for i, j in pairs]
        losses.append(sum(math.log1p(math.exp(-BETA * d)) for d in gaps) / len(gaps))
        differences += gaps
        chosen += [found[number][i] for i, _ in pairs]
    assert row["loss"] == pytest.approx(sum(losses) / 2, rel=1e-3)
    assert (row["dpo/pairs"], row["dpo/groups_without_pair"]) == (5, len(TIED))
    assert row["dpo/accuracy"] == sum(d > 0 for d in differences) / 5
    assert row["dpo/margin"] == pytest.approx(BETA * sum(differences) / 5, rel=1e-3)
    assert row["dpo/chosen"] == pytest.approx(BETA * sum(chosen) / 5, rel=1e-3)
    weighted = values(folders, everything, weighted=True)
    divergence = sum(v for number in (1, 2) for v in weighted[number]) / 6
    assert row["kl/completion"] == pytest.approx(divergence, rel=1e-3)


def test_groups_without_a_pair_change_nothing_for_the_others(updater):
    rows = [updater()[0].update(batch(*numbers)).row() for numbers in ((0, 1, 2, 3), (1, 2))]
    for key in ("loss", "grad_norm", "dpo/margin", "tokens"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-5), key


def test_a_batch_without_any_pair_makes_no_step(updater):
    made, trainable = updater(rate=0.1)
    before = [p.detach().clone() for p in trainable.model.parameters()]
    row = made.update(batch(*TIED)).row()
    assert all(torch.equal(p, old) for p, old in zip(trainable.model.parameters(), before, strict=True))
    assert (row["dpo/pairs"], row["dpo/groups_without_pair"], row["dpo/accuracy"]) == (0, 2, None)
    assert (row["tokens"], row["skipped_updates"]) == (0, 0)


def test_of_equal_rewards_the_shorter_completion_is_preferred_where_length_costs(updater, folders):
    made, _ = updater(overlong={"band": 256})
    tied = batch(0)
    lengths = [int(t.loss_mask.sum()) for t in tied.groups[0].trajectories]
    pairs = [(i, j) for i, j in permutations(range(3), 2) if lengths[i] < lengths[j]]
    assert pairs, "the case is to tell something"
    row, (found,) = made.update(tied).row(), values(folders, tied)
    gaps = [found[i] - found[j] for i, j in pairs]
    assert (row["dpo/pairs"], row["dpo/groups_without_pair"]) == (len(pairs), 0)
    assert row["dpo/margin"] == pytest.approx(BETA * sum(gaps) / len(pairs), rel=1e-3)


def test_a_completion_that_is_cut_has_no_pair_where_cut_ones_are_not_trained(updater):
    whole = batch(2)
    (group_,) = whole.groups
    last = [replace(t, finish_reason="length") if t.reward == 0 else t for t in group_.trajectories]
    cut = replace(whole, groups=(replace(group_, trajectories=tuple(last)),))
    rows = [updater(overlong={"filter": f})[0].update(cut).row() for f in (False, True)]
    assert [row["dpo/pairs"] for row in rows] == [2, 0]
    assert [row["dpo/groups_without_pair"] for row in rows] == [0, 1]


@pytest.mark.parametrize("updates", [1, 2])
def test_pairs_are_put_in_order(updater, updates):
    made, _ = updater(rate=5e-3, updates=updates)
    rows = [made.update(batch(0, 1, 2, 3)).row() for _ in range(12)]
    assert rows[-1]["dpo/accuracy"] == 1 > rows[0]["dpo/accuracy"]
    assert rows[-1]["dpo/margin"] > rows[0]["dpo/margin"] + 1
    assert rows[-1]["loss"] < rows[0]["loss"] / 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_had_no_pair_so_far_resumes_from_its_checkpoint(updater, tmp_path, sharded):
    """Its optimizer has made no step yet."""
    setup = Setup("float32", sharded, 1, 1, 1, 1, "digest", "model")
    (whole, first), (resumed, second) = (updater(rate=5e-3, sharded=sharded) for _ in range(2))
    whole.update(batch(*TIED))
    Checkpoints(tmp_path, 2, setup).save(1, first)
    assert Checkpoints(tmp_path, 2, setup).resume(second) == 1
    for made in (whole, resumed):
        for _ in range(2):
            made.update(batch(0, 1, 2, 3))
    parameters = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in parameters)
