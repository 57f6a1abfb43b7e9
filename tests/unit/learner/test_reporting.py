"""A step's row: the learner's side and the servers'."""

import json

from buffer.records import Batch
from learner.config import LearnerExperiment
from learner.metrics import Journal, StepReport
from learner.reporting import Reporter

ABOUT = {"samples": 1, "all_tokens": 1, "reward/mean": 0.0, "staleness/mean": 0.0, "time/wait_batch": 0.0}


def test_a_row_tells_what_the_servers_counted_since_the_row_before(tmp_path, monkeypatch):
    monkeypatch.setattr("learner.reporting.batch_row", lambda shard, limit: ABOUT)
    counted = iter(
        [
            {"wasted_tokens": 100, "waiting_s/leases": 8.0},  # when the learner starts
            {"wasted_tokens": 100, "waiting_s/leases": 9.25},
            {"wasted_tokens": 148, "waiting_s/leases": 9.25},
        ]
    )
    fields = {"name": "it", "run_dir": str(tmp_path), "model": {"path": "m"}}
    experiment = LearnerExperiment.model_validate(fields)
    given_up = iter([7, 0])
    reporter = Reporter(
        Journal(tmp_path, False, 0), experiment, lambda: next(counted), lambda: next(given_up)
    )
    for step in (1, 2):
        reporter.write(step, Batch(0, (), {}), StepReport(lr=0.1), None, {})
    reporter.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["servers/wasted_tokens"] for row in rows] == [0, 48]
    assert [row["buffer/wasted_tokens"] for row in rows] == [7, 0]
    assert [row["servers/waiting_s/leases"] for row in rows] == [1.25, 0]
