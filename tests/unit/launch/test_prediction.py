"""What `slipstream evaluate` refuses before it starts an engine."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch import prediction
from rollout.config import PredictionExperiment


def test_an_experiment_without_prompts_to_evaluate_on_leaves_no_folder(tmp_path):
    experiment = PredictionExperiment(name="none", run_dir=str(tmp_path), model={"path": str(tmp_path)})
    with pytest.raises(ValueError, match="the experiment has no `eval` section"):
        prediction.evaluate(experiment, tmp_path / "evaluation", Console())
    assert not (tmp_path / "evaluation").exists()


def test_a_long_start_without_a_terminal_is_filled_until_a_row_comes(monkeypatch):
    monkeypatch.setattr(prediction, "STARTING_EVERY_S", 0.01)
    shown = io.StringIO()
    with prediction.ProgressLine("evaluating", shown) as told:
        told.starts()
        while "no row is done yet" not in shown.getvalue():
            time.sleep(0.01)
        told.written(0, 2, {"completions": []})
        time.sleep(0.05)
        before = shown.getvalue()
        time.sleep(0.05)
    assert shown.getvalue() == before
    assert "evaluating: no row is done yet, 0 s since the start" in before.splitlines()


def test_the_rate_is_of_the_engines_whole_work(monkeypatch):
    """Between rows of one wave are milliseconds, by which thousands a second would be told."""
    clock = [0.0]
    monkeypatch.setattr(prediction, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    shown = io.StringIO()
    with prediction.ProgressLine("evaluating", shown) as told:
        told.starts()
        clock[0] = 100.0
        told.up()
        for number, when in enumerate((110.0, 110.001, 120.0, 120.001)):
            clock[0] = when
            told.written(number, 4, {"completions": [{}] * 10})
    rows = [line for line in shown.getvalue().splitlines() if "row" in line]
    assert rows[0] == "evaluating: row 1 of 4, 1.0 completions/s"
    assert rows[-1] == "evaluating: row 4 of 4, 2.0 completions/s"
