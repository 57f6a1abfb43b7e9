"""When a learner that is started again has nothing to do."""

import shutil

import pytest

from buffer.evaluations import EVALUATIONS
from learner import ending
from learner.config import LearnerExperiment

EVALUATED = {"eval": {"source": {"kind": "jsonl", "path": "rows.jsonl"}}}


@pytest.fixture
def experiment(tmp_path):
    def make(steps=4, export=True, **changes):
        fields = {
            "name": "ended",
            "run_dir": str(tmp_path),
            "model": {"path": "model"},
            "learner": {"steps": steps, "checkpoint": {"export": export}},
        }
        return LearnerExperiment.model_validate(fields | changes)

    return make


@pytest.fixture
def over(experiment, tmp_path):
    """What a run of four steps leaves."""
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-00000{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-00000{step}/meta.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    ending.write(experiment(**EVALUATED), 4)
    return tmp_path


def test_a_run_is_finished_once_the_buffer_said_so(experiment, over):
    assert ending.finished_step(experiment(**EVALUATED)) == 4
    assert ending.finished_step(experiment()) == 4
    assert ending.finished_step(experiment(steps=3)) == 4
    (over / ending.FINISHED).unlink()
    assert ending.finished_step(experiment()) == 0


def test_a_learner_killed_during_the_last_evaluation_finds_that_it_was_made(experiment, over):
    """Buffer and servers end after it, and whoever waits for them waits for ever."""
    (over / ending.FINISHED).unlink()
    scores = over / EVALUATIONS
    scores.write_text('{"kind": "score", "version": 2, "final": false}\n')
    assert ending.finished_step(experiment(**EVALUATED)) == 0
    with scores.open("a") as file:
        file.write('{"kind": "completion", "version": 4}\n')
    assert ending.finished_step(experiment(**EVALUATED)) == 0
    with scores.open("a") as file:
        file.write('{"kind": "score", "version": 4, "final": true}\n')
    assert ending.finished_step(experiment(**EVALUATED)) == 4
    assert ending.finished_step(experiment(steps=5, **EVALUATED)) == 0
    scores.write_text("")
    assert ending.finished_step(experiment(**EVALUATED)) == 0


def test_there_is_more_to_do_for_more_steps_and_where_anything_is_missing(experiment, over):
    assert ending.finished_step(experiment(steps=5)) == 0
    shutil.rmtree(over / "model")
    assert ending.finished_step(experiment()) == 0
    assert ending.finished_step(experiment(export=False)) == 4
    shutil.rmtree(over / "checkpoints/step-000004")
    assert ending.finished_step(experiment(export=False)) == 0, "it goes on from step 2"


def test_an_evaluation_that_was_added_is_still_to_be_made(experiment, over):
    ending.write(experiment(), 4)
    assert ending.finished_step(experiment()) == 4
    assert ending.finished_step(experiment(**EVALUATED)) == 0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"step": 4}', "[" * 100_000])
def test_what_is_no_end_is_none(experiment, over, text):
    (over / ending.FINISHED).write_text(text)
    assert ending.finished_step(experiment()) == 0
