"""Combinations that would train nothing, or not what was asked for, are refused in one line."""

import pytest
import yaml

from buffer.experiment import ConfigError, load
from learner.config import LearnerExperiment

BASE = {"name": "x", "run_dir": "r", "model": {"path": "m"}}


@pytest.fixture
def refusal(tmp_path):
    def read(**sections):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, **sections}))
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "c.yaml", [], LearnerExperiment)
        text = str(caught.value)
        assert "\n" not in text
        return text

    return read


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_one_completion_a_prompt_has_nothing_to_compare(refusal, advantage):
    text = refusal(rollout={"group_size": 1}, learner={"algorithm": {"advantage": advantage}})
    assert f"learner.algorithm.advantage={advantage}" in text
    assert "rollout.group_size=1" in text


def test_one_completion_a_prompt_is_fine_for_reinforce_plus_plus(tmp_path):
    sections = {"rollout": {"group_size": 1}, "learner": {"algorithm": {"advantage": "reinforce_plus_plus"}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, **sections}))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).rollout.group_size == 1


def test_more_updates_than_groups(refusal):
    text = refusal(buffer={"groups_per_batch": 2}, learner={"updates_per_batch": 3})
    assert "updates_per_batch=3" in text


@pytest.mark.parametrize("correction", [{"mask_low": 1.5}, {"mask_high": 0.9}, {"veto": 1.0}])
def test_a_mask_that_trains_nothing(refusal, correction):
    assert "ρ = 1" in refusal(learner={"algorithm": {"correction": correction}})


def test_settings_that_would_do_nothing(refusal):
    bypass = {"kind": "bypass", "mask_high": 3}
    assert "mask_high would do nothing" in refusal(learner={"algorithm": {"correction": bypass}})
    assert "clip_low would do nothing" in refusal(
        learner={"algorithm": {"loss": "reinforce", "clip_low": 0.1}}
    )


def test_a_schedule_that_would_rise(refusal):
    assert "min_lr 0.1 is above lr 0.01" in refusal(learner={"optimizer": {"lr": 0.01, "min_lr": 0.1}})
