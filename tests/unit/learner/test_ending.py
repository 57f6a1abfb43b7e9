"""When a learner that is started again has nothing to do."""

import shutil
from dataclasses import replace

import pytest

from buffer.evaluations import EVALUATIONS
from learner import ending
from learner.config import LearnerExperiment

END = ending.End(step=4, evaluated=True, exported=True, epochs=None)
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
    ending.write(tmp_path, END)
    return tmp_path


def test_a_run_is_finished_once_the_buffer_said_so(experiment, over):
    assert ending.finished_step(experiment(**EVALUATED)) == 4
    assert ending.finished_step(experiment()) == 4
    assert ending.finished_step(experiment(steps=3)) == 4
    (over / ending.FINISHED).unlink()
    assert ending.finished_step(experiment()) == 0


def test_a_learner_killed_during_the_last_evaluation_finds_that_it_was_made(experiment, over):
    """Buffer and servers end after it, and whoever waits for them waits for ever."""
    ending.write(over, replace(END, evaluated=False, over=False))
    assert ending.finished_step(experiment()) == 0, "the buffer may not have been told"
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
    assert ending.unexported_step(experiment()) == 4
    assert ending.finished_step(experiment(export=False)) == 4
    shutil.rmtree(over / "checkpoints/step-000004")
    assert ending.finished_step(experiment(export=False)) == 0, "it goes on from step 2"


def test_an_evaluation_that_was_added_is_still_to_be_made(experiment, over):
    ending.write(over, replace(END, evaluated=False))
    assert ending.finished_step(experiment()) == 4
    assert ending.finished_step(experiment(**EVALUATED)) == 0
    assert ending.unexported_step(experiment(**EVALUATED)) == 0, "the buffer has to be there for that"


def test_a_model_of_an_earlier_end_is_not_that_of_the_last_step(experiment, over):
    """As where further steps were made with learner.checkpoint.export=false."""
    ending.write(over, replace(END, exported=False))
    assert ending.finished_step(experiment(export=False)) == 4
    assert ending.finished_step(experiment()) == 0
    assert ending.unexported_step(experiment()) == 4
    assert ending.unexported_step(experiment(export=False)) == 0
    assert ending.unexported_step(experiment(steps=5)) == 0, "it is made after the further steps"


def test_an_end_that_further_steps_were_made_behind_is_none(experiment, over):
    (over / "checkpoints/step-000006").mkdir()
    (over / "checkpoints/step-000006/meta.json").write_text("{}")
    assert ending.finished_step(experiment()) == 0
    assert ending.unexported_step(experiment()) == 0


@pytest.mark.parametrize(("epochs", "step"), [(1, 4), (2, 4), (3, 0), (None, 0)])
def test_a_run_whose_data_ended_is_over_until_there_is_more_of_it(experiment, over, epochs, step):
    ending.write(over, replace(END, epochs=2))
    assert ending.finished_step(experiment(steps=9, data={"epochs": epochs})) == step


def test_more_epochs_do_not_prolong_a_run_that_made_its_steps(experiment, over):
    assert ending.finished_step(experiment(data={"epochs": 3})) == 4
    assert ending.finished_step(experiment(steps=9, data={"epochs": 3})) == 0


def test_an_end_of_an_older_version_is_taken_for_one(experiment, over):
    (over / ending.FINISHED).write_text('{"step": 4, "evaluated": true}')
    assert ending.finished_step(experiment(**EVALUATED)) == 4


@pytest.mark.parametrize("text", ["", "[]", "{", '{"step": 4}', "[" * 100_000])
def test_what_is_no_end_is_none(experiment, over, text):
    (over / ending.FINISHED).write_text(text)
    assert ending.finished_step(experiment()) == 0
