"""The offline stages as commands: what they say, when they count as finished, and how they go on."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from offline_runs import Run, make_data, read, train, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    make_data(folder)
    return folder


def command(run):
    return [str(Path(sys.executable).with_name("slipstream")), run.kind, run.job()["config"]]


def slipstream(run, **where):
    return subprocess.run(command(run), capture_output=True, text=True, timeout=120, **where)


@contextmanager
def started(run, told):
    """The stage's process, once it has made three steps; what it says goes to the file `told`."""
    with told.open("wb") as output, subprocess.Popen(command(run), stdout=output, stderr=output) as stage:
        try:
            rows = run.folder / "run/metrics.jsonl"
            while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
                assert stage.poll() is None, told.read_text()
                time.sleep(0.1)
            yield stage
        finally:
            stage.kill()


def rank(stage, number):
    """The process of one of the stage's ranks."""
    below = psutil.Process(stage.pid).children(recursive=True)
    of_stage = (p for p in below if "learner.offline" in p.cmdline())
    (process,) = (p for p in of_stage if p.environ().get("RANK") == str(number))
    return process


def test_the_command_tells_a_bad_row_by_its_place_and_once_mended_trains_to_a_report(data, tmp_path):
    run = Run(tmp_path / "command", data, "reward", steps=2)
    rows = tmp_path / "rows.jsonl"
    run.experiment["data"]["train"]["path"] = str(rows)
    good = {"prompt": "a", "response": ["b", "c"], "score": [1, 0]}
    write(rows, [good, good | {"score": ["x", 0]}])
    bad = slipstream(run)
    assert bad.returncode == 1, bad.stdout
    assert "rows.jsonl:2" in bad.stdout
    assert "Traceback" not in bad.stdout
    write(rows, [good] * 8)
    done = slipstream(run)
    assert done.returncode == 0, done.stdout
    assert "step 2 of 2: loss" in done.stdout
    assert (run.folder / "run/report/loss.png").exists()
    assert not (run.folder / "run/samples.jsonl").exists(), "it made no completions"
    assert slipstream(run).stdout.startswith("offline (reward)"), "finished: nothing is trained again"


def test_a_stage_whose_rows_teach_nothing_is_no_success(data, tmp_path):
    run = Run(tmp_path / "tied", data, "reward", steps=2)
    rows = tmp_path / "rows.jsonl"
    run.experiment["data"]["train"]["path"] = str(rows)
    write(rows, [{"prompt": "a", "response": ["b", "c"], "score": [1, 1]}] * 8)
    ended = slipstream(run)
    assert ended.returncode == 1, ended.stdout
    assert "not one of 2 steps changed the weights" in ended.stdout
    assert "Traceback" not in ended.stdout
    assert not (run.folder / "run/model").exists()


@pytest.mark.long
def test_a_finished_stage_goes_on_for_more_epochs_evaluates_and_exports_when_asked_to_later(data, tmp_path):
    run = Run(tmp_path / "more", data, "sft", steps=None, batch_size=4, checkpoint={"export": False})
    few = tmp_path / "few.jsonl"
    write(few, read(data / "taught.jsonl")[:10])
    run.experiment["data"] = {"train": {"kind": "jsonl", "path": str(few)}, "epochs": 1}
    run.experiment["eval"] = None
    run.experiment["learner"]["optimizer"] = {"lr": 0.01, "schedule": "linear"}
    assert slipstream(run).returncode == 0
    assert [(r["step"], r["examples"]) for r in run.rows] == [(1, 4), (2, 4), (3, 2)]
    assert not run.model.exists()
    run.experiment["data"]["epochs"] = 2
    done = slipstream(run)
    assert done.returncode == 0, done.stdout
    assert [(r["step"], r["examples"]) for r in run.rows[3:]] == [(4, 4), (5, 4), (6, 2)]
    rates = [r["lr"] for r in run.rows[3:]]
    assert rates == pytest.approx([0.005, 0.01 / 3, 0.005 / 3]), "by all six"
    run.experiment["learner"]["checkpoint"] = {"export": True}
    assert slipstream(run).returncode == 0
    exported = run.model / "model.safetensors"
    made = exported.stat().st_mtime_ns
    run.experiment["eval"] = {"source": {"kind": "jsonl", "path": str(few)}}
    done = slipstream(run)
    assert done.returncode == 0, done.stdout
    assert run.rows[-1]["step"] == 6
    assert run.rows[-1]["examples"] == 2, "what training wrote of it is still there"
    assert run.rows[-1]["eval/loss"] > 0
    again = exported.stat().st_mtime_ns
    assert again > made
    assert slipstream(run).returncode == 0
    assert exported.stat().st_mtime_ns == again, "nothing is left to do"


@pytest.mark.long
@pytest.mark.parametrize(("first", "fails"), [([1, 1], True), ([1, 0], False)])
def test_whether_anything_was_trained_counts_over_stops(data, tmp_path, first, fails):
    """The rows behind the stop teach nothing, those of the first step before it may have."""
    run = Run(tmp_path / "stopped", data, "reward", steps=3, batch_size=4, checkpoint={"every": 1})
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "response": ["b", "c"]}
    write(rows, [row | {"score": first}] * 4 + [row | {"score": [1, 1]}] * 8)
    run.experiment["data"] = {"train": {"kind": "jsonl", "path": str(rows)}, "shuffle": False}
    run.kill_at = 3
    train(1, [run], killed=True)
    ended = slipstream(run)
    assert ended.returncode == int(fails), ended.stdout
    assert ("not one of 3 steps changed the weights" in ended.stdout) == fails
    assert run.model.exists() != fails


def test_a_killed_rank_is_told_in_lines_and_not_by_the_others_traceback(data, tmp_path):
    run = Run(tmp_path / "lost", data, "sft", steps=100_000)
    run.experiment["learner"]["processes"] = 2
    with started(run, tmp_path / "told") as stage:
        rank(stage, 1).kill()
        assert stage.wait(60) == 1
    output = (tmp_path / "told").read_text()
    assert "rank 1 was ended by SIGKILL" in output
    assert "its other ranks are not heard any more" in output
    assert "Traceback" not in output


def test_ranks_that_find_other_rows_than_each_other_train_on_none(data, tmp_path):
    run = Run(tmp_path / "apart", data, "sft")
    run.experiment["learner"]["processes"] = 2
    run.experiment["data"]["train"] = {"kind": "function", "path": "own_functions:rows_of_each_rank"}
    ended = slipstream(run, cwd=Path(__file__).parent)
    assert ended.returncode == 1, ended.stdout
    assert "data.train: not every rank found the same rows" in ended.stdout
    assert "Traceback" not in ended.stdout


def test_a_rank_that_is_told_to_stop_alone_leaves_no_finished_stage(data, tmp_path):
    run = Run(tmp_path / "told", data, "sft", steps=100_000)
    with started(run, tmp_path / "output") as stage:
        rank(stage, 0).terminate()
        assert stage.wait(60) == 1
    assert "before the stage was finished" in (tmp_path / "output").read_text()
    assert not run.model.exists()
