"""An alarm is one line with advice when a number goes bad, and again only after it was good."""

import logging

import pytest

from buffer.records import Batch
from learner.alarms import Alarms
from learner.config import LearnerExperiment
from learner.metrics import Journal, StepReport
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
    ("staleness", "correction", "advised"), [(2, {}, True), (8, {}, False), (2, {"kind": "bypass"}, False)]
)
def test_a_cap_is_advised_only_where_it_takes_the_place_of_nothing_better(staleness, correction, advised):
    fields = {"name": "it", "run_dir": "runs/it", "model": {"path": "m"}}
    buffer, learner = {"max_staleness": staleness}, {"algorithm": {"correction": correction}}
    experiment = LearnerExperiment.model_validate({**fields, "buffer": buffer, "learner": learner})
    (line,) = alarms_of(experiment).hear(1, 0.3, 1.0)
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


@pytest.mark.parametrize(("recorded", "told"), [(None, ["step 1", "step 1"]), ("runs/one/recorded", [])])
def test_the_reporter_logs_them_as_warnings_but_of_groups_that_were_recorded(
    tmp_path, monkeypatch, caplog, recorded, told
):
    """Which the policy of now never sampled, whatever version they are labelled with."""
    fields = {"name": "it", "run_dir": str(tmp_path), "model": {"path": "m"}}
    experiment = LearnerExperiment.model_validate({**fields, "rollout": {"recorded": recorded}})
    monkeypatch.setattr("learner.reporting.batch_row", lambda shard, limit: ABOUT)
    reporter = Reporter(Journal(tmp_path, False, 0), experiment, dict)
    report = StepReport(lr=0.1, sums={"tokens": 10.0, "rho": 12.0, "rho_squares": 40.0})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            reporter.write(step, Batch(0, (), {}), report, None, {})
    reporter.close()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line[:6] for line in warnings] == told


ABOUT = {"samples": 1, "all_tokens": 1, "reward/mean": 0.0, "staleness/mean": 0.0, "time/wait_batch": 0.0}
