"""What a person is told of an offline stage: while it runs, and when it is over."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from launch import offline
from launch.experiment import dump
from launch.history import History
from launch.local import tell_resuming
from launch.offline import ProgressLine, is_finished, read_stage
from launch.report import write_report
from learner import ending
from learner.offline.config import OfflineExperiment


@pytest.fixture
def run_dir(tmp_path):
    """A stage's folder after 3 of 3 steps, held-out rows before and after."""
    folder = tmp_path / "run"
    folder.mkdir()
    learner = {"steps": 3, "checkpoint": {"export": True}}
    config = {"name": "made", "stage": {"kind": "dpo"}, "learner": learner}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    made = {"loss": 0.4, "accuracy": 0.5, "examples": 7, "tokens": 90, "left_out/too_long": 1}
    rows = [{"step": s, "steps": 3, "time/step": 2.0, "tokens/s": 50.0, "time": s + 1} for s in range(4)]
    for row in rows[1:]:
        row |= made
    rows[0] |= {"eval/loss": 0.69, "eval/accuracy": 0.5}
    rows[3] |= {"eval/loss": 0.39, "eval/accuracy": 0.8, "eval/left_out": 7}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def history(folder):
    found = History(folder)
    found.refresh()
    return found


def test_the_report_has_before_and_after_and_the_pictures(run_dir):
    summary = write_report(run_dir)
    text = summary.text()
    assert re.search(r"model +not written yet", text)
    unasked = replace(summary, exports=False).text()
    assert re.search(r"model +not written: learner.checkpoint.export=false", unasked)
    for told in (
        "made (dpo)",
        "3 of 3 in 8 s",
        "0.5000 → 0.8000",
        "21, 270 trained tokens",
        "3 too_long; 7 of the held-out rows",
    ):
        assert told in text
    assert sorted(p.name for p in (run_dir / "report").iterdir()) == [
        "accuracy.png", "loss.png", "summary.json", "summary.md",
    ]  # fmt: skip
    assert json.loads((run_dir / "report" / "summary.json").read_text())["finished"] is True
    assert "![loss](loss.png)" in (run_dir / "report" / "summary.md").read_text()


def stage(run_dir, **changes):
    data = {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "epochs": changes.pop("epochs", None)}
    learner = {"steps": changes.pop("steps", None), "checkpoint": {"export": changes.pop("export", True)}}
    fields = {"name": "made", "run_dir": str(run_dir), "model": {"path": "model"}, "stage": {"kind": "sft"}}
    return OfflineExperiment.model_validate(fields | {"data": data, "learner": learner} | changes)


@pytest.fixture
def over(run_dir):
    """Its end, and the model."""
    ending.write(run_dir, END)
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    return run_dir


END = ending.End(step=3, evaluated=False, exported=True, epochs=None)


def test_a_stage_is_finished_when_its_steps_are_made_and_the_model_is_there(over):
    assert is_finished(stage(over, steps=3), history(over))
    assert is_finished(stage(over, steps=2), history(over))
    assert not is_finished(stage(over, steps=4), history(over))
    (over / "model" / "config.json").unlink()
    assert not is_finished(stage(over, steps=3), history(over))
    (over / ending.FINISHED).unlink()
    assert not is_finished(stage(over, steps=3, export=False), history(over))


@pytest.mark.parametrize(("epochs", "finished"), [(1, True), (2, True), (3, False)])
def test_more_epochs_go_on_with_a_stage_whose_data_ended(over, epochs, finished):
    ending.write(over, replace(END, epochs=2))
    assert is_finished(stage(over, epochs=epochs), history(over)) is finished
    assert is_finished(stage(over, epochs=epochs, steps=9), history(over)) is finished


def test_an_evaluation_or_an_export_that_was_added_is_still_to_be_made(over):
    rows = {"source": {"kind": "jsonl", "path": "rows.jsonl"}}
    assert not is_finished(stage(over, steps=3, eval=rows), history(over))
    ending.write(over, replace(END, exported=False, evaluated=True))
    assert is_finished(stage(over, steps=3, eval=rows, export=False), history(over))
    assert not is_finished(stage(over, steps=3), history(over)), "the model is of an earlier end"


def test_a_model_of_before_further_steps_is_not_the_last_ones(over):
    with (over / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "steps": 4}) + "\n")
    assert not is_finished(stage(over, steps=4), history(over))
    assert not is_finished(stage(over, steps=3), history(over))


def test_what_a_finished_stage_was_made_without_is_told(over, monkeypatch, capsys):
    monkeypatch.setattr(offline, "check_trained_from", lambda experiment: None)
    (over / "config.yaml").write_text(dump(stage(over, steps=3)))
    assert offline.run_stage(stage(over, steps=3), "slipstream sft made.yaml", Console()) == 0
    assert "not trained" not in capsys.readouterr().out
    assert offline.run_stage(stage(over, steps=3, seed=7), "slipstream sft made.yaml", Console()) == 0
    assert "changed since it was made, and not trained: seed 1 → 7; take another" in capsys.readouterr().out


def test_a_learner_that_ends_before_the_stage_is_finished_is_no_success(tmp_path, monkeypatch, capsys):
    """As after a SIGTERM that was for it alone, or where an adapter calls exit."""
    monkeypatch.setattr(offline, "torchrun", lambda ranks: [sys.executable, "-c", "print('last words')"])
    assert offline.run_stage(stage(tmp_path / "new", steps=3), "slipstream sft made.yaml", Console()) == 1
    told = capsys.readouterr().out
    assert "learner ended behind step 0, before the stage was finished" in told
    assert "last words" in told
    assert "slipstream sft made.yaml" in told


def test_without_a_terminal_every_step_is_a_line(run_dir, capsys):
    with ProgressLine(History(run_dir), Console()) as line:
        line.refresh()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    told = "loss 0.4000  accuracy 0.5000  eval/loss 0.3900  eval/accuracy 0.8000  50 tokens/s"
    assert lines[3] == f"step 3 of 3: {told}"


def test_a_long_silence_without_a_terminal_is_filled(run_dir, capsys, monkeypatch):
    history = History(run_dir)
    with ProgressLine(history, Console()) as line:
        line.refresh()
        capsys.readouterr()
        line.refresh()
        assert not capsys.readouterr().out
        monkeypatch.setattr("launch.offline.LONGEST_SILENCE_S", 0.0)
        line.refresh()
        history.opened = 0.0
        line.refresh()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "still starting · 0 s since the start",
        "still at work behind step 3 · 0 s since the start",
    ]


def test_on_a_terminal_the_step_is_told_once_there_is_one(run_dir):
    shown = io.StringIO()
    console = Console(width=120, file=shown, force_terminal=True, color_system=None)
    rows = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text("")
    with ProgressLine(History(run_dir), console) as line:
        line.refresh()
        assert shown.getvalue().splitlines()[-1].split()[0].endswith("starting")
        (run_dir / "metrics.jsonl").write_text(rows)
        line.refresh()
    assert "step 3 of 3" in shown.getvalue().splitlines()[-2]
    assert "None" not in shown.getvalue()


def resumed(run_dir, kept: int | None) -> str:
    if kept is not None:
        checkpoint = run_dir / f"checkpoints/step-{kept:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "meta.json").write_text("{}")
    shown = io.StringIO()
    tell_resuming(history(run_dir), run_dir, Console(width=120, file=shown))
    return shown.getvalue().strip()


def test_a_start_that_goes_on_says_from_where(run_dir):
    assert resumed(run_dir, None) == "resuming  from the first step; 3 steps were made"
    assert resumed(run_dir, 2) == "resuming  from step-000002; 3 steps were made"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:2]))
    assert resumed(run_dir, None) == "resuming  from step-000002; 1 step was made"
    (run_dir / "metrics.jsonl").write_text(lines[0])
    assert resumed(run_dir, None) == "", "only evaluated"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train.path=/nowhere.jsonl"], "data.train.path=/nowhere.jsonl: no such file"),
        (
            ["data.train.adapter=nobody:reads"],
            "data.train.adapter=nobody:reads: no module nobody; expected one in",
        ),
        (["model.path=/nowhere"], "model.path=/nowhere: no config.json in it"),
        (["model.max_length=9999"], "model.max_length=9999: the model in"),
        (["learner.steps=null"], "neither learner.steps nor data.epochs says when it ends"),
        (["stage.kind=sft"], "stage.kind is sft; run it with `slipstream sft`"),
        (["learner.processes=3", "learner.parallel.tensor=2"], "processes 3 is not a multiple"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(tmp_path, model_folder, overrides, told):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    config = {
        "name": "made",
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model_folder)},
        "data": {"train": {"kind": "jsonl", "path": str(rows)}},
        "stage": {"kind": "reward"},
        "learner": {"steps": 3},
    }
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(config))
    assert read_stage(path, [], "reward").learner.steps == 3
    with pytest.raises(ValueError, match=r"stage\.yaml|override") as error:
        read_stage(path, overrides, "reward")
    assert told in str(error.value)


def test_a_stage_that_would_replace_what_it_starts_from_is_refused(tmp_path, model_folder):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    config = {
        "name": "made",
        "run_dir": str(tmp_path),
        "model": {"path": str(model_folder)},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}},
        "stage": {"kind": "sft"},
        "learner": {"steps": 3},
    }
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(
        ValueError, match=r"model\.path=.*: where run_dir=.* has its own trained model written"
    ):
        read_stage(path, [], "sft")
