"""An alarm is one line with advice when a number goes bad, and again only after it was good."""

import logging
from dataclasses import replace

import pytest
import torch

from buffer.records import Batch
from learner.alarms import Alarms
from learner.algorithm import AlgorithmConfig
from learner.config import LearnerExperiment
from learner.losses import Denominators, objective
from learner.metrics import Journal, StepReport
from learner.packing import empty
from learner.reporting import Reporter, alarms_of


def heard(numbers, dtype="bfloat16") -> list[str]:
    alarms = Alarms(dtype)
    return [line for step, (ess, rho) in enumerate(numbers) for line in alarms.hear(step, ess, rho)]


def test_nothing_is_said_of_good_numbers_or_of_none():
    assert heard([(1.0, 1.0), (0.5, 0.95001), (None, None), (0.9, 1.0499)]) == []


def test_a_small_effective_sample_is_told_once_at_each_onset():
    lines = heard([(0.9, 1.0), (0.49, 1.0), (0.2, 1.0), (None, None), (0.3, 1.0), (0.6, 1.0), (0.1, 1.0)])
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 6"]
    assert "lower buffer.max_staleness" in lines[0].replace("Lower", "lower")


@pytest.mark.parametrize(
    ("staleness", "correction", "left_out", "advised"),
    [
        (2, {}, 0.0, True),
        (8, {}, 0.0, False),
        (2, {"kind": "bypass"}, 0.0, False),
        (2, {"weight": "none"}, 0.0, False),
        (2, {"cap": 1.0}, 0.0, False),
        (2, {}, 0.6, False),
    ],
)
def test_a_cap_is_advised_only_where_it_takes_the_place_of_nothing_better(
    staleness, correction, left_out, advised
):
    """Nor where there is one, or the tokens are masked: it could not end the alarm."""
    fields = {"name": "it", "run_dir": "runs/it", "model": {"path": "m"}}
    buffer, learner = {"max_staleness": staleness}, {"algorithm": {"correction": correction}}
    experiment = LearnerExperiment.model_validate({**fields, "buffer": buffer, "learner": learner})
    (line,) = alarms_of(experiment).hear(1, 0.3, 1.0, left_out)
    assert ("correction.cap" in line) == advised


@pytest.mark.parametrize("rho", [0.949, 1.051])
def test_a_mean_off_one_is_told_on_either_side(rho):
    (line,) = heard([(1.0, rho), (1.0, rho)])
    assert f"the mean of ρ is {rho:.3f}" in line
    assert "model.dtype=float32" in line
    (line,) = heard([(1.0, rho)], "float32")
    assert "dtype" not in line
    assert "lower buffer.max_staleness" in line


def test_both_may_ring_at_once():
    assert len(heard([(0.1, 2.0)])) == 2


def row_of(logs, advantage=1.0, **correction):
    """Of a batch whose tokens have these log ρ, each in a completion of its own."""
    n = len(logs)
    batch = replace(
        empty(),
        target_ids=torch.arange(n),
        target_positions=torch.arange(n),
        behavior_logprobs=-1.0 - torch.tensor(logs),
        advantages=torch.full((n,), advantage),
        weights=torch.ones(n),
        sequence_index=torch.arange(n),
        versions=torch.zeros(n, dtype=torch.int32),
    )
    algorithm = AlgorithmConfig.model_validate({"correction": correction})
    made = objective(torch.full((n,), -1.0), torch.zeros(n), batch, algorithm, Denominators(n, n, n), 0.0)
    report = StepReport(lr=0.1)
    report.add({name: float(value) for name, value in made[1].items()}, 1.0, True)
    return report.row()


def rung(row):
    return Alarms("float32").hear(1, row["ess"], row["rho/bounded"], row["mask_fraction"])


@pytest.mark.parametrize("correction", [{}, {"cap": 1.0, "mask": "none"}, {"taper": True}])
def test_one_token_that_is_far_off_and_hardly_trained_rings_nothing(correction):
    row = row_of([8.0] + [0.0] * 9_999, **correction)
    assert (row["rho/ess"], row["rho/mean"]) == pytest.approx((0.0019, 1.298), rel=0.02)
    assert row["ess"] == pytest.approx(1.0, abs=2e-4)
    assert row["rho/bounded"] == pytest.approx(1.0, abs=1e-3)
    assert rung(row) == []


def test_one_token_that_makes_the_gradient_rings():
    (line,) = rung(row_of([8.0] + [0.0] * 9_999, mask="none"))
    assert "few tokens make the gradient" in line
    assert "correction.cap" in line
    (line,) = rung(row_of([8.0] + [0.0] * 9_999, -1.0, kind="bypass"))
    assert "few tokens make the gradient" in line


def test_a_batch_that_is_mostly_masked_rings_and_no_cap_is_advised():
    lines = rung(row_of([8.0, 8.0, 0.0]))
    assert "few tokens make the gradient" in lines[0]
    assert "correction.cap" not in lines[0]


@pytest.mark.parametrize("off", [0.06, -0.06])
def test_a_distance_that_all_tokens_have_rings(off):
    (line,) = rung(row_of([off] * 10))
    assert "the mean of ρ is" in line


@pytest.mark.parametrize(("recorded", "told"), [(None, ["step 1", "step 1"]), ("runs/one/recorded", [])])
def test_the_reporter_logs_them_as_warnings_but_of_groups_that_were_recorded(
    tmp_path, monkeypatch, caplog, recorded, told
):
    """Which the policy of now never sampled, whatever version they are labelled with."""
    fields = {"name": "it", "run_dir": str(tmp_path), "model": {"path": "m"}}
    experiment = LearnerExperiment.model_validate({**fields, "rollout": {"recorded": recorded}})
    monkeypatch.setattr("learner.reporting.batch_row", lambda shard, limit: ABOUT)
    reporter = Reporter(Journal(tmp_path, False, 0), experiment, dict, int)
    sums = {"tokens": 10.0, "rho_bounded": 12.0, "weight": 12.0, "weight_squares": 40.0}
    report = StepReport(lr=0.1, sums=sums)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            reporter.write(step, Batch(0, (), {}), report, None, {})
    reporter.close()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line[:6] for line in warnings] == told


ABOUT = {"samples": 1, "all_tokens": 1, "reward/mean": 0.0, "staleness/mean": 0.0, "time/wait_batch": 0.0}
