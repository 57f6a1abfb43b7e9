"""Sums into a row, and the journal over a restart."""

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from buffer.records import Group, Trajectory
from learner.advantages import Moments
from learner.metrics import Journal, StepReport, Timings, ValueReport, effective_share, staleness


def sums(tokens, **changes):
    names = ("rho", "rho_squares", "behavior_k1", "behavior_k3", "entropy", "clipped", "masked", "vetoed")
    return {**dict.fromkeys(names, 0.0), "tokens": tokens, "loss": 0.0, "rho_max": 0.0, **changes}


def trajectory(versions, mask):
    n = len(mask)
    mask = np.array(mask, np.uint8)
    versions = np.array(versions, np.int32)
    return Trajectory(0, np.zeros(n, np.int32), mask, np.zeros(n, np.float32), versions, 1.0, {}, "stop")


def test_means_are_over_the_tokens_of_all_updates_and_the_loss_over_updates():
    report = StepReport(lr=0.1, trained_tokens=50)
    report.add(sums(10.0, rho=10.0, masked=1.0, rho_max=2.0, inverse_rho_max=1.25, loss=0.5), 3.0, True)
    report.add(sums(30.0, rho=50.0, masked=3.0, rho_max=1.5, inverse_rho_max=4.0, loss=1.5), 5.0, False)
    row = report.row()
    assert row["tokens"] == 50
    assert row["gradient_fraction"] == 40 / 50
    assert row["rho/mean"] == pytest.approx(1.5)
    assert row["rho/max"] == 2.0
    assert row["rho/min"] == 0.25
    assert row["mask_fraction"] == pytest.approx(0.1)
    assert row["loss"] == pytest.approx(1.0)
    assert row["grad_norm"] == pytest.approx(4.0)
    assert row["skipped_updates"] == 1


def test_a_batch_without_gradient_has_no_ratio():
    row = StepReport(lr=0.1, trained_tokens=9).row()
    assert row["ess"] is None
    for name in (
        "rho/mean",
        "rho/bounded",
        "rho/ess",
        "rho/min",
        "kl/k1",
        "kl/k3",
        "kl/reference",
        "entropy",
    ):
        assert row[name] is None
    assert row["clip_fraction"] == 0
    assert row["gradient_fraction"] == 0


def test_divergence_is_of_a_completion_over_all_updates():
    report = StepReport(lr=0.1, kl_coefficient=0.05, completions=4)
    report.add(sums(10.0, reference_k1=1.5), 1.0, True)
    report.add(sums(30.0, reference_k1=0.5), 1.0, True)
    assert report.divergence == pytest.approx(0.5)
    assert (report.row()["kl/completion"], report.row()["kl/coefficient"]) == (0.5, 0.05)


def test_a_value_model_has_its_own_numbers_and_no_other_run_has_them():
    value = ValueReport(lr=0.2, returns=Moments(4, 8.0, 20.0), errors=Moments(4, 0.0, 1.0))
    value.add({"loss": 0.5, "clipped": 1.0, "tokens": 10.0}, 2.0, True)
    value.add({"loss": 1.5, "clipped": 3.0, "tokens": 30.0}, 4.0, False)
    row = StepReport(lr=0.1, value=value).row()
    assert row["value/loss"] == pytest.approx(1.0)
    assert row["value/clip_fraction"] == pytest.approx(0.1)
    assert row["value/return_mean"] == pytest.approx(2.0)
    assert row["value/explained_variance"] == pytest.approx(0.75)
    assert (row["value/lr"], row["value/grad_norm"], row["value/skipped_updates"]) == (0.2, 3.0, 1)
    assert not any(key.startswith("value/") for key in StepReport(lr=0.1).row())


def test_online_dpo_tells_its_pairs_and_no_other_run_has_them():
    report = StepReport(lr=0.1, beta=0.5, tied_groups=3)
    report.add(sums(10.0, pairs=6.0, correct=4.5, preferred=12.0, other=-6.0), 1.0, True)
    report.add(sums(10.0, pairs=2.0, correct=1.5, preferred=4.0, other=-2.0), 1.0, True)
    row = report.row()
    assert (row["dpo/pairs"], row["dpo/groups_without_pair"], row["dpo/accuracy"]) == (8, 3, 0.75)
    assert (row["dpo/chosen"], row["dpo/rejected"], row["dpo/margin"]) == (1.0, -0.5, 1.5)
    empty = StepReport(lr=0.1, beta=0.5, tied_groups=6).row()
    assert (empty["dpo/pairs"], empty["dpo/accuracy"], empty["dpo/margin"]) == (0, None, None)
    assert not any(key.startswith("dpo/") for key in StepReport(lr=0.1).row())


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_a_single_one():
    assert effective_share({"rho": 6.0, "rho_squares": 12.0, "tokens": 3.0}, "rho") == pytest.approx(1.0)
    assert effective_share({"rho": 5.0, "rho_squares": 25.0, "tokens": 4.0}, "rho") == pytest.approx(0.25)
    nothing = {"weight": 0.0, "weight_squares": 0.0, "tokens": 3.0}
    assert effective_share(nothing, "weight") == 0.0, "of tokens that are all masked"


def test_staleness_is_that_of_the_oldest_trained_token():
    assert staleness(trajectory([0, 5, 4, 6], [0, 1, 1, 1]), 6) == 2
    assert staleness(trajectory([0, 3], [0, 0]), 6) is None


def row(step):
    keys = ("reward/mean", "loss", "grad_norm", "staleness/mean", "rho/mean", "ess")
    times = ("tokens", "time/step", "time/wait_batch", "samples/s")
    return {"step": step, **dict.fromkeys(keys + times, 1)}


def test_tensorboard_shows_a_rows_numbers_and_its_ages(tmp_path):
    journal = Journal(tmp_path, tensorboard=True, version=0)
    journal.write({**row(1), "staleness/histogram": [3, 0, 2]})
    journal.write({**row(2), "staleness/histogram": [0, 0, 0]})
    journal.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1.0), (2, 1.0)]
    (ages,) = board.Histograms("staleness/histogram")
    assert (ages.step, ages.histogram_value.num, ages.histogram_value.max) == (1, 5, 2)
    assert list(ages.histogram_value.bucket) == [3, 0, 2]
    assert list(ages.histogram_value.bucket_limit) == [0.5, 1.5, 2.5]


def test_a_resumed_journal_drops_what_will_be_made_again(tmp_path):
    journal = Journal(tmp_path, tensorboard=False, version=0)
    for step in (1, 2, 3):
        journal.write(row(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    journal.close()
    again = Journal(tmp_path, tensorboard=False, version=2)
    again.write(row(3))
    again.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_samples_say_what_was_trained(tmp_path):
    t = trajectory([0, 5, 4], [0, 1, 1])
    t.metadata["text"] = "four"
    journal = Journal(tmp_path, tensorboard=False, version=0)
    journal.write_samples(7, [Group("g", "l", "0/3", "train", (t,))])
    journal.close()
    sample = json.loads((tmp_path / "samples.jsonl").read_text())
    assert (sample["step"], sample["prompt_id"], sample["text"], sample["versions"]) == (
        7,
        "0/3",
        "four",
        [4, 5],
    )


def test_a_job_without_completions_leaves_no_file_for_them(tmp_path):
    Journal(tmp_path, tensorboard=False, version=0, samples=False).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_timings_are_taken_once():
    timings = Timings()
    with timings("publish"):
        pass
    with timings("publish"):
        pass
    assert list(timings.take()) == ["time/publish"]
    assert timings.take() == {}
