"""Each stage's objective on a micro-batch, against its formula; and that parts add up."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.offline.config import DpoConfig, RewardConfig, SftConfig
from learner.offline.encoding import Encoded
from learner.offline.packing import empty, pack
from learner.offline.stages import make_stage


def encoded(*lengths, scores=()):
    return Encoded(
        np.array([1, 2], np.int32), tuple(np.arange(3, 3 + n, dtype=np.int32) for n in lengths), scores
    )


SFT, REWARD = make_stage(SftConfig(kind="sft")), make_stage(RewardConfig(kind="reward"))
DPO = make_stage(DpoConfig(kind="dpo", beta=0.5))


def logprobs(count, seed=0):
    return -torch.rand(count, generator=torch.Generator().manual_seed(seed)) - 0.1


def test_sft_is_the_mean_over_all_tokens_of_the_global_batch():
    one, two = pack([encoded(4)], 64)[0], pack([encoded(1)], 64)[0]
    first, second = logprobs(4), logprobs(1, 1)
    parts = [SFT.objective((x, None), b, 5.0)[0] for x, b in ((first, one), (second, two))]
    assert sum(parts).item() == pytest.approx(-torch.cat([first, second]).mean().item())
    assert SFT.size(encoded(4)) + SFT.size(encoded(1)) == 5
    assert SFT.row({"loss": 2.0}) == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2.0))}


def test_an_empty_micro_batch_adds_nothing_to_any_stage():
    filler = replace(empty(), reference_logprobs=torch.tensor([-1.0]))
    for stage, output in ((SFT, (logprobs(1), None)), (DPO, (logprobs(1), None)), (REWARD, logprobs(1))):
        loss, sums = stage.objective(output, filler, 3.0)
        assert loss.item() == 0
        assert {name: float(value) for name, value in sums.items()} == dict.fromkeys(stage.sums, 0.0)


def test_the_reward_models_loss_is_over_the_scores_of_the_responses():
    (batch,) = pack([encoded(3, 1, 2, scores=(0.7, 0.3, 0.3))], 64, only_ends=True)
    scores = torch.tensor([0.2, 0.9, -0.4])
    loss, sums = REWARD.objective(scores, batch, 2.0)
    expected = [math.log1p(math.exp(-(0.2 - 0.9))), math.log1p(math.exp(-(0.2 + 0.4)))]
    assert loss.item() == pytest.approx(sum(expected) / 2 / 2.0)
    row = REWARD.row({name: float(value) for name, value in sums.items()})
    assert row["accuracy"] == 0.5
    assert row["margin"] == pytest.approx(((0.2 - 0.9) + (0.2 + 0.4)) / 2)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_sums_over_tokens_and_measures_from_the_reference(loss):
    stage = make_stage(DpoConfig(kind="dpo", beta=0.5, loss=loss))
    (batch,) = pack([encoded(3, 2, scores=(0.0, 1.0))], 64)
    policy, reference = logprobs(5), logprobs(5, 1)
    found, sums = stage.objective((policy, None), replace(batch, reference_logprobs=reference), 1.0)
    gained = (policy - reference).tolist()
    other, preferred = sum(gained[:3]), sum(gained[3:])
    d = preferred - other
    expected = math.log1p(math.exp(-0.5 * d)) if loss == "sigmoid" else (d - 1.0) ** 2
    assert found.item() == pytest.approx(expected, rel=1e-5)
    row = stage.row({name: float(value) for name, value in sums.items()})
    assert row["margin"] == pytest.approx(0.5 * d, rel=1e-5)
    assert row["reward/preferred"] == pytest.approx(0.5 * preferred, rel=1e-5)
    assert row["accuracy"] == float(d > 0)


def test_at_the_reference_itself_dpo_knows_nothing():
    (batch,) = pack([encoded(3, 2, scores=(0.0, 1.0))], 64)
    policy = logprobs(5)
    loss, sums = DPO.objective((policy, None), replace(batch, reference_logprobs=policy.clone()), 1.0)
    assert loss.item() == pytest.approx(math.log(2))
    assert DPO.row({name: float(value) for name, value in sums.items()})["accuracy"] == 0.5


def test_an_example_of_equal_scores_teaches_nothing():
    assert REWARD.size(encoded(1, 2, scores=(0.7, 0.7))) == 0
    assert REWARD.size(encoded(1, 2, 3, scores=(0.7, 0.7, 0.3))) == 1


def test_an_example_of_equal_responses_teaches_nothing():
    """Whatever is preferred: they get the same score, and the same logprob."""
    assert DPO.size(encoded(2, 2, scores=(1.0, 0.0))) == 0
    assert DPO.size(encoded(2, 2, 1, scores=(1.0, 0.0, 0.0))) == 1


def test_of_no_pair_the_row_tells_no_mean():
    assert DPO.row({"loss": 0.0, "pairs": 0.0, "correct": 0.0, "preferred": 0.0, "other": 0.0}) == {
        "pairs": 0
    }
