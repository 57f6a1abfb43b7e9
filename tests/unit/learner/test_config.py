"""Combinations that would train nothing, or not what was asked for, are refused in one line."""

import re
from pathlib import Path

import pytest
import yaml

from buffer.experiment import ConfigError, load
from learner.config import LearnerExperiment

VALUE = {"path": "reward-model"}
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


def test_dynamic_sampling_would_drop_every_group_of_one(refusal):
    learner = {"algorithm": {"advantage": "reinforce_plus_plus"}}
    text = refusal(rollout={"group_size": 1}, buffer={"dynamic_sampling": True}, learner=learner)
    assert "buffer.dynamic_sampling drops groups" in text


def test_more_updates_than_groups(refusal):
    text = refusal(buffer={"groups_per_batch": 2}, learner={"updates_per_batch": 3})
    assert "updates_per_batch=3" in text


@pytest.mark.parametrize("correction", [{"mask_low": 1.5}, {"mask_high": 0.9}, {"veto": 1.0}])
def test_a_mask_that_trains_nothing(refusal, correction):
    assert "ρ = 1" in refusal(learner={"algorithm": {"correction": correction}})


@pytest.mark.parametrize(
    ("correction", "reason"),
    [
        ({"kind": "bypass", "weight": "token"}, "weight would weigh by it once more"),
        ({"kind": "bypass", "cap": 2, "normalize": True}, "cap, normalize would weigh by it once more"),
        ({"kind": "bypass", "proximal": "interpolated"}, "kind bypass has no proximal policy"),
        ({"mask": "none", "mask_low": 0.1}, "mask none bounds no ρ, so mask_low would do nothing"),
        ({"weight": "none", "cap": 2}, "weight none is 1 everywhere, so cap would change no weight"),
        ({"weight": "none", "normalize": True}, "so normalize would change no weight"),
        ({"weight": "sequence"}, "grows with its length without bound; set cap"),
        ({"weight": "sequence", "cap": 1e6}, "more than 100 is none"),
        ({"weight": "sequence", "mask": "sequence", "mask_high": 1e5}, "more than 100 is none"),
        ({"kind": "bypass", "taper": True}, "taper would weigh by it once more"),
        ({"weight": "none", "taper": True}, "weight none is 1 everywhere, so taper would change no weight"),
        ({"taper": True, "cap": 2}, "which cap would undo or do nothing to"),
        ({"taper": True, "normalize": True}, "which normalize would undo or do nothing to"),
        ({"taper": True, "mask": "none", "mask_low": 0.5}, "mask none bounds no ρ"),
        ({"cap": 5}, "cap 5 is not below mask_high 5 of the same ρ"),
        ({"cap": 0.9}, "expected at least 1, got 0.9"),
        ({"proximal": "interpolated", "normalize": True}, "normalize takes the pass"),
        ({"proximal": "interpolated"}, "interpolated saves a pass, and updates_per_batch 1 makes none"),
    ],
)
def test_corrections_that_count_the_ratio_twice_or_do_nothing(refusal, correction, reason):
    assert reason in refusal(learner={"algorithm": {"correction": correction}})


BYPASS = {"kind": "bypass"}


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"loss": "dppo"}, "loss dppo has the ratio to the behavior policy in it"),
        ({"loss": "m2po"}, "loss m2po has the ratio to the behavior policy in it"),
        ({"loss": "m2po", "correction": BYPASS, "clip_high": 0.3}, "loss m2po does not clip by it"),
        (
            {"loss": "ppo", "dppo": {"penalty": 0.1}},
            "dppo is of loss dppo and would do nothing with loss ppo",
        ),
        ({"loss": "dppo", "correction": BYPASS, "m2po": {"second_moment": 1}}, "m2po is of loss m2po"),
        ({"loss": "gspo", "correction": BYPASS}, "set clip_low and clip_high, or kind decoupled"),
        ({"loss": "gspo", "correction": BYPASS, "clip_low": 0.1}, "set clip_low and clip_high"),
        (
            {"loss": "dppo", "correction": BYPASS, "clip_high": 1.0},
            "of loss dppo clip_high bounds by how much",
        ),
        (
            {"loss": "dppo", "correction": BYPASS, "clip_low": 5},
            "so it would stop nothing; expected less than 1",
        ),
        ({"overlong": {"penalty": 2}}, "without band no reward falls"),
        ({"overlong": {"band": 300}}, "overlong.band=300 is more than rollout.sampling.max_tokens=256"),
    ],
)
def test_losses_that_count_the_ratio_twice_or_ignore_a_setting(refusal, algorithm, reason):
    assert reason in refusal(learner={"algorithm": algorithm})


def test_a_band_of_lengths_has_no_place_in_a_conversation(refusal):
    learner, rollout = {"algorithm": {"overlong": {"band": 8}}}, {"episode": "a.b:c"}
    assert "of a rollout.episode is each turn's limit" in refusal(learner=learner, rollout=rollout)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"rho_bar": 2}, "targets gae have no ρ, so rho_bar would do nothing"),
        ({"targets": "vtrace", "c_bar": 1.5}, "c_bar 1.5 is above rho_bar 1"),
        (
            {"ranks": {"processes": 3, "parallel": {"tensor": 2}}},
            "set learner.value.ranks.processes=2 or change learner.value.ranks.parallel",
        ),
        ({"ranks": {"timeout_s": 3600}}, "learner.value.ranks.timeout_s: expected"),
        ({"ranks": {"path": "x"}}, "learner.value.ranks.path: unknown key"),
    ],
)
def test_a_value_model_that_cannot_be_trained_as_it_is_told(refusal, value, reason):
    assert reason in refusal(learner={"algorithm": {"advantage": "gae"}, "value": {**VALUE, **value}})


def test_value_targets_of_another_policy_take_a_pass(tmp_path, refusal):
    learner = {"algorithm": {"advantage": "gae"}, "value": {**VALUE, "targets": "vtrace"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": learner}))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).learner.proximal_pass
    learner["algorithm"]["correction"] = {"proximal": "interpolated"}
    assert "value.targets vtrace takes the pass" in refusal(learner=learner | {"updates_per_batch": 2})


@pytest.mark.parametrize(
    ("loss", "clip", "aggregation", "level"),
    [
        ("ppo", (0.2, 0.2), "token", "token"),
        ("cispo", (1.0, 5.0), "token", "token"),
        ("gspo", (3e-4, 4e-4), "sequence", "geometric"),
    ],
)
def test_what_is_not_set_follows_the_loss(tmp_path, loss, clip, aggregation, level):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": {"algorithm": {"loss": loss}}}))
    of = load(tmp_path / "c.yaml", [], LearnerExperiment).learner.algorithm
    assert (of.clip, of.aggregation, of.weight_level) == (clip, aggregation, level)


NAMED = (Path(__file__).parents[3] / "docs/algorithms.md").read_text().partition("## By a paper's name")[2]
ROWS = re.findall(r"^\| ([^|`]+) \| `(\{.+?\})` \|", NAMED.partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize(("method", "settings"), ROWS)
def test_the_settings_of_a_papers_method_are_accepted(tmp_path, method, settings):
    algorithm = yaml.safe_load(settings)
    learner = {"updates_per_batch": 1 if algorithm.get("loss") == "reinforce" else 2, "algorithm": algorithm}
    sections = {"learner": learner, "rollout": {"sampling": {"max_tokens": 20480}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, **sections}))
    load(tmp_path / "c.yaml", [], LearnerExperiment)


def test_the_table_of_methods_is_read():
    assert len(ROWS) == 17


def test_what_staleness_forbids(refusal):
    learner = {"updates_per_batch": 2, "algorithm": {"correction": {"proximal": "interpolated"}}}
    text = refusal(learner=learner, buffer={"max_staleness": 11})
    assert "correction.proximal=interpolated with buffer.max_staleness=11" in text
    for uncorrected in (
        {"loss": "reinforce", "correction": {"kind": "bypass"}},
        {"loss": "reinforce", "correction": {"weight": "none", "mask": "none"}},
        {"correction": {"weight": "none", "mask": "none", "veto": 0}},
        {"correction": {"weight": "none", "mask": "none"}},
        {"correction": {"weight": "none", "mask": "none", "veto": 1e-30}},
        {"correction": {"weight": "none", "mask_low": 0, "mask_high": 1e30}},
        {"correction": {"weight": "none", "mask": "none", "veto": 1e-4}},
        {"correction": {"weight": "none", "mask_low": 0, "mask_high": 101}},
        {"loss": "reinforce", "correction": {"kind": "bypass", "veto": 2e-6}},
        {
            "loss": "reinforce",
            "correction": {"kind": "bypass", "mask": "token", "mask_low": 0, "mask_high": 1e5},
        },
    ):
        text = refusal(learner={"algorithm": uncorrected})
        assert "buffer.max_staleness=2 versions old would be trained as the policy's own" in text


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"weight": "none", "mask": "none", "veto": 0.01}},
        {"correction": {"weight": "none", "mask_low": 0, "mask_high": 100}},
        {"correction": {"weight": "none", "mask_low": 0.01, "mask_high": 1e9}},
        {"correction": {"weight": "none"}},
        {"correction": {"mask": "none"}},
        {"correction": {"kind": "bypass"}},
        {"loss": "reinforce", "correction": {"kind": "bypass", "mask": "geometric"}},
        {"loss": "reinforce", "correction": {"kind": "bypass", "veto": 0.1}},
    ],
)
def test_whatever_the_file_says_of_the_behavior_policy_corrects_for_age(tmp_path, algorithm):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": {"algorithm": algorithm}}))
    assert not load(tmp_path / "c.yaml", [], LearnerExperiment).learner.algorithm.ignores_age


def test_what_ignores_age_is_fine_for_tokens_without_one(tmp_path):
    learner = {"algorithm": {"loss": "reinforce", "correction": {"kind": "bypass"}}}
    sections = {"learner": learner, "buffer": {"max_staleness": 0}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, **sections}))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).learner.algorithm.ignores_age


@pytest.mark.parametrize("correction", [{}, {"kind": "bypass", "mask": "token"}])
def test_a_loss_without_a_ratio_makes_one_update_a_batch(refusal, correction):
    """The second would train on what the first has moved the policy away from."""
    algorithm = {"loss": "reinforce", "correction": correction}
    text = refusal(learner={"updates_per_batch": 2, "algorithm": algorithm})
    assert "loss reinforce has no ratio to the policy that the batch began with" in text
    assert "updates_per_batch=2" in text


def test_an_estimated_proximal_policy_saves_a_pass_or_is_refused(tmp_path, refusal):
    learner = {"updates_per_batch": 2, "algorithm": {"correction": {"proximal": "interpolated"}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": learner}))
    assert not load(tmp_path / "c.yaml", [], LearnerExperiment).learner.proximal_pass
    learner["algorithm"] |= {
        "advantage": "reinforce_plus_plus",
        "kl": {"coefficient": 0.1, "placement": "reward"},
    }
    assert "kl.placement reward takes the pass" in refusal(learner=learner)


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, False),
        ({"updates_per_batch": 2}, True),
        ({"updates_per_batch": 2, "algorithm": {"correction": {"kind": "bypass"}}}, False),
        ({"algorithm": {"correction": {"normalize": True}}}, True),
        ({"updates_per_batch": 2, "algorithm": {"loss": "dpo"}}, False),
    ],
)
def test_a_pass_comes_first_only_where_something_needs_it(tmp_path, learner, expected):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": learner}))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).learner.proximal_pass is expected


def test_settings_that_would_do_nothing(refusal):
    bypass = {"kind": "bypass", "mask_high": 3}
    assert "mask_high would do nothing" in refusal(learner={"algorithm": {"correction": bypass}})
    assert "clip_low would do nothing" in refusal(
        learner={"algorithm": {"loss": "reinforce", "clip_low": 0.1}}
    )


def test_a_schedule_that_would_rise(refusal):
    assert "min_lr 0.1 is above lr 0.01" in refusal(learner={"optimizer": {"lr": 0.01, "min_lr": 0.1}})


def test_gae_and_its_value_model_come_together(refusal):
    assert "set value.path to the folder it starts from" in refusal(
        learner={"algorithm": {"advantage": "gae"}}
    )
    assert "grpo has no value model, so value would do nothing" in refusal(learner={"value": VALUE})


def test_gae_compares_no_completions_and_has_an_optimizer_of_its_own(tmp_path):
    learner = {"algorithm": {"advantage": "gae"}, "value": {**VALUE, "optimizer": {"lr": 0.01}}}
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({**BASE, "rollout": {"group_size": 1}, "learner": learner})
    )
    read = load(tmp_path / "c.yaml", [], LearnerExperiment).learner
    assert read.value is not None
    assert (read.value.gamma, read.value.gae_lambda, read.value.clip) == (1.0, 0.95, 0.2)
    assert (read.value.optimizer.lr, read.optimizer.lr) == (0.01, 1e-6)


def kl(**changes):
    return {"algorithm": {"advantage": "reinforce_plus_plus", "kl": {"coefficient": 0.1, **changes}}}


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_kl_in_the_reward_needs_rewards_for_tokens(refusal, advantage):
    learner = kl(placement="reward")
    learner["algorithm"]["advantage"] = advantage
    assert f"advantage {advantage} compares one number of each completion" in refusal(learner=learner)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_estimator_that_would_drive_away_is_refused_in_the_reward(refusal, estimator):
    text = refusal(learner=kl(placement="reward", estimator=estimator))
    assert f"estimator {estimator} is never negative" in text


def test_an_estimator_that_pulls_nowhere_is_refused_in_the_loss(refusal):
    text = refusal(learner=kl(estimator="k1"))
    assert "estimator k1 has a gradient of 0 in expectation" in text
    assert "use k2 or k3" in text


@pytest.mark.parametrize("changes", [{"placement": "reward"}, {"target": 6}])
def test_a_coefficient_of_nothing_can_neither_be_placed_nor_adapted(refusal, changes):
    text = refusal(learner=kl(**changes, coefficient=0.0))
    assert f"coefficient 0 stays 0, so {next(iter(changes))} would do nothing" in text


def test_a_horizon_needs_a_target_and_at_least_one_batch(refusal):
    assert "without target" in refusal(learner=kl(horizon=500))
    text = refusal(learner=kl(target=6, horizon=5), buffer={"groups_per_batch": 2}, rollout={"group_size": 3})
    assert "kl.horizon=5 is less than one batch's 6 completions" in text


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({"reference": {}}, "algorithm has no reference (kl.coefficient is 0 and loss is not dpo)"),
        ({**kl(), "reference": {}, "lora": {}}, "with lora the reference is the policy's own frozen weights"),
        (
            {**kl(), "reference": {"processes": 3, "parallel": {"tensor": 2}}},
            "learner.reference: processes 3 is not a multiple of tensor · pipeline = 2; "
            "set learner.reference.processes=2 or change learner.reference.parallel",
        ),
        (
            {**kl(), "reference": {"parallel": {"expert": 2}}},
            "parallel.expert = 2; change processes or learner.reference.parallel",
        ),
        ({**kl(), "reference": {"parallel": {"distributed_optimizer": True}}}, "has no optimizer"),
        ({**kl(), "reference": {"timeout_s": 3600}}, "learner.reference.timeout_s: expected"),
    ],
)
def test_ranks_of_their_own_are_of_a_reference_that_there_is(refusal, learner, reason):
    assert reason in refusal(learner=learner)


def test_the_estimator_follows_its_place(tmp_path):
    for placement, expected in (("loss", "k3"), ("reward", "k1")):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": kl(placement=placement)}))
        read = load(tmp_path / "c.yaml", [], LearnerExperiment)
        assert read.learner.algorithm.kl.estimate == expected


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"advantage": "rloo"}, "advantage would do nothing with loss dpo: dpo compares the completions"),
        ({"clip_high": 0.3}, "clip_high would do nothing with loss dpo"),
        ({"aggregate": "sequence"}, "aggregate would do nothing with loss dpo"),
        ({"correction": {"kind": "bypass"}}, "no ratio to the sampling policy"),
        ({"kl": {"coefficient": 0.1}}, "dpo.beta is what holds the policy to the reference"),
        ({"entropy": 0.01}, "entropy would do nothing"),
    ],
)
def test_online_dpo_refuses_what_it_does_not_use(refusal, setting, reason):
    assert reason in refusal(learner={"algorithm": {"loss": "dpo", **setting}})


def test_online_dpo_needs_pairs_and_is_alone_with_its_settings(refusal):
    text = refusal(rollout={"group_size": 1}, learner={"algorithm": {"loss": "dpo"}})
    assert "rollout.group_size=1 has no pair" in text
    assert "dpo is of loss dpo and would do nothing with loss ppo" in refusal(
        learner={"algorithm": {"dpo": {"beta": 0.5}}}
    )
    smoothed = {"loss": "dpo", "dpo": {"loss": "ipo", "label_smoothing": 0.1}}
    assert "no labels to smooth" in refusal(learner={"algorithm": smoothed})


def test_online_dpo_reads_back_as_it_was_resolved(tmp_path):
    """A resolved file names every key, the defaults too."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "learner": {"algorithm": {"loss": "dpo"}}}))
    read = load(tmp_path / "c.yaml", [], LearnerExperiment)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(read.model_dump(mode="json")))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).learner.algorithm.needs_reference


@pytest.mark.parametrize(
    ("staleness", "algorithm", "tapers"),
    [
        (2, {}, False),
        (3, {}, True),
        (3, {"correction": {"proximal": "computed", "veto": 0.0}}, True),
        (0, {"correction": {"taper": True}}, True),
        (8, {"correction": {"taper": False}}, False),
        (8, {"correction": {"cap": 2.0}}, False),
        (8, {"correction": {"mask": "none"}}, False),
        (8, {"correction": {"mask_low": 0.0}}, False),
        (8, {"correction": {"kind": "bypass"}}, False),
        (8, {"loss": "gspo"}, False),
        (8, {"loss": "cispo"}, False),
        (8, {"advantage": "reinforce_plus_plus", "kl": {"coefficient": 0.1, "placement": "reward"}}, False),
    ],
)
def test_what_is_old_is_tapered_unless_the_file_has_a_word_about_it(tmp_path, staleness, algorithm, tapers):
    sections = {"buffer": {"max_staleness": staleness}, "learner": {"algorithm": algorithm}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, **sections}))
    assert load(tmp_path / "c.yaml", [], LearnerExperiment).algorithm.correction.taper is tapers
