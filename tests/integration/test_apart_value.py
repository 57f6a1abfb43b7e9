"""PPO's value model on ranks of its own: the same numbers, and what becomes of a run that loses a side."""

import random
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from apart_jobs import Job, jobs
from learner_runs import Learning, Run, begin, continued, learn, learning, make_model, trained_elsewhere
from ppo_runs import PPO, assert_same_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLED_VALUE = Path(__file__).with_name("killed_value.py")
NOBODY = "tcp://127.0.0.1:1"
LAYOUTS = {"one": (1, {}), "tensor": (2, {"tensor": 2}), "pipeline": (2, {"pipeline": 2}), "data": (2, {})}
ADAPTED = {"value": {**PPO["value"], "lora": {"rank": 4, "alpha": 8}}}
VTRACE = {"value": {**PPO["value"], "targets": "vtrace", "rho_bar": 1.4, "c_bar": 0.8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def address(free_address):
    return free_address()


def placed(folder, model, address, of="tensor", name="scripted", timeout_s=240, **learner) -> Run:
    """A run whose value model has ranks of its own, in a layout of its own."""
    return at_nobody(Run(folder, model, **placed_settings(address, of, timeout_s, **learner)), name)


def placed_settings(address, of, timeout_s=240, **learner):
    processes, layout = LAYOUTS[of]
    ranks = {"processes": processes, "parallel": layout, "threads": 1}
    ranks |= {"address": address, "timeout_s": timeout_s}
    settings = {**PPO, **learner}
    return {**settings, "value": {**settings["value"], "ranks": ranks}}


def at_nobody(run: Run, name="scripted") -> Run:
    """These runs have no buffer: at the default address another run's may listen, which would end the job."""
    run.experiment["name"] = name
    run.experiment["buffer"]["address"] = NOBODY
    return run


def job_of(run: Run) -> Job:
    return Job(run.folder / "value", run.experiment, "value")


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    """By one process, with the value model in it."""
    root = tmp_path_factory.mktemp("here")
    runs = {
        "gae": Run(root / "gae", model, **PPO),
        "vtrace": Run(root / "vtrace", model, **{**PPO, **VTRACE}),
        "adapted": Run(root / "adapted", model, **{**PPO, **ADAPTED}),
    }
    learn(1, list(runs.values()))
    return runs


def learned(run: Run, ranks: int) -> Run:
    job = job_of(run)
    with jobs(job):
        learn(ranks, [run])
        assert job.end() == 0, job.log
    assert "the value ends: " in job.log
    return run


@pytest.mark.parametrize(
    ("own", "of", "targets"),
    [
        ("tensor", "pipeline", "gae"),
        ("data", "one", "vtrace"),
        pytest.param("one", "tensor", "gae", marks=pytest.mark.long),
        pytest.param("one", "data", "vtrace", marks=pytest.mark.long),
        pytest.param("pipeline", "data", "gae", marks=pytest.mark.long),
        pytest.param("data", "tensor", "gae", marks=pytest.mark.long),
        pytest.param("one", "pipeline", "adapted", marks=pytest.mark.long),
    ],
)
def test_every_pair_of_layouts_gives_the_numbers_of_shared_ranks(
    own, of, targets, here, model, tmp_path, address
):
    ranks, layout = LAYOUTS[own]
    more = {"vtrace": VTRACE, "adapted": ADAPTED}.get(targets, {})
    run = learned(placed(tmp_path, model, address, of, layout=layout, **more), ranks)
    assert_same_ppo(run, here[targets], rel=1e-3)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory, free_address):
    """A learner of one rank, and a value model on two, of which nothing is lost."""
    return learned(placed(tmp_path_factory.mktemp("undisturbed"), model, free_address()), 1)


@pytest.mark.long
def test_a_value_model_that_is_late_wrong_killed_or_hung_costs_time_only(
    undisturbed, model, tmp_path, address
):
    run = placed(tmp_path / "run", model, address)
    run.options = {"gates": [1, 2, 3]}
    other_weights = placed(tmp_path / "a", trained_elsewhere(model, tmp_path / "model"), address)
    other_settings = placed(tmp_path / "b", model, address)
    other_settings.experiment["learner"]["value"]["gae_lambda"] = 0.5
    other_run = placed(tmp_path / "c", model, address, name="another")
    wrong = {
        "weights: this value model has ": (other_weights, other_settings),
        "run_id: this value model serves run": (other_run,),
    }
    right = job_of(run)
    with learning(run) as learner:
        learner.says(f"waiting for value model at {address} (load")
        for why, others in wrong.items():
            for job in map(job_of, others):
                with jobs(job):
                    told = f"waiting for this run's value model at {address}, where another answers: {why}"
                    learner.says(told, learner.told(told) + 1)
                    assert job.end() == 0, job.log
        with jobs(right):
            learner.made(1)
            right.kill()
            learner.open(1)
            waited = learner.told("waiting for value model at")
            learner.says("waiting for value model at", waited + 1)
            right.start()
            learner.made(2)
            right.signal(signal.SIGSTOP)
            learner.open(2)
            waited = learner.told("waiting for value model at")
            learner.says("waiting for value model at", waited + 1)
            right.signal(signal.SIGCONT)
            learner.made(3)
            right.kill()
            right.start()
            learner.open(3)
            learner.process.wait(120)
    assert "went back to step 0: it makes 2 updates again" in run.log
    assert "went back to step 2: it makes 2 updates again" in run.log
    assert_same_ppo(run, undisturbed, rel=0)


DIES_AT = ["values 2 1", "train 3 0", "save 4 0", "values 6 2", "load 4 0", "train 7 0", "export 8 0"]
"""With two updates a batch, and a checkpoint every two batches: within its answers for a batch, in updates
that nobody heard of yet, in its part of a checkpoint, in loading that, in writing the model."""


@pytest.mark.long
def test_a_value_model_that_is_killed_in_the_middle_of_answering_costs_time_only(
    undisturbed, model, tmp_path, address
):
    run = placed(tmp_path, model, address)
    job = job_of(run)
    whole, job.program = job.program, [str(KILLED_VALUE)]
    job.environment = {"DIES_AT": DIES_AT[0]}
    with jobs(job):
        with learning(run):
            for moment, then in pairwise([*DIES_AT, None]):
                assert job.process.wait(240) == 1
                assert f"dies at {moment}" in job.log, job.log[-3000:]
                if then is None:
                    job.program = whole
                else:
                    job.environment = {"DIES_AT": then}
                job.start()
        assert job.end() == 0, job.log
    assert_same_ppo(run, undisturbed, rel=0)


@pytest.mark.long
def test_a_value_model_that_is_killed_under_two_copies_gets_the_lost_updates_of_both(
    model, tmp_path, free_address
):
    """Each update lacks what only the other copy has."""
    whole = learned(placed(tmp_path / "whole", model, free_address(), layout={}), 2)
    run = placed(tmp_path / "run", model, free_address(), layout={})
    run.options = {"gates": [1, 2, 3]}
    job = job_of(run)
    with jobs(job), learning(run, 2) as learner:
        for made in (1, 2, 3):
            learner.made(made)
            job.kill()
            job.start()
            learner.open(made)
        learner.process.wait(120)
    # Whichever copy notices first leads it back, and tells of it.
    told = "".join(path.read_text() for path in (run.folder / "out").glob("log-*.txt"))
    assert told.count("the value model went back to") >= 2
    assert_same_ppo(run, whole, rel=0)


def test_a_learner_that_is_killed_comes_back_to_the_value_model_of_its_checkpoint(
    undisturbed, model, tmp_path, address
):
    """The value model lives on, a step ahead of the checkpoint, and later both are killed at once."""
    run = placed(tmp_path, model, address)
    job = job_of(run)
    with jobs(job):
        for lost in ("learner", "both"):
            run.options = {"kill_at": 3}
            learn(1, [run], killed=True)
            if lost == "both":
                job.kill()
                job.start()
        run.options = {}
        learn(1, [run])
    assert run.log.count("resumed from") == 2
    assert_same_ppo(run, undisturbed, rel=0)


LONG = {"steps": 12, "checkpoint": {"every": 2, "export": True}}


@pytest.mark.long
def test_killed_at_any_moment_each_side_and_both_go_on_to_the_same_losses(model, tmp_path, free_address):
    """With -9, at moments that nobody chose: within steps, checkpoints, loads, and starts."""
    whole = learned(placed(tmp_path / "whole", model, free_address(), **LONG), 1)
    run = placed(tmp_path / "run", model, free_address(), **LONG)
    job, draw, steps = job_of(run), random.Random(1), 0
    with jobs(job):
        for kills in (("learner",), ("value",), ("learner", "value")):
            started = begin(1, [run])
            try:
                steps = min(len(run.rows), 8)
                wait_for_rows(run, steps + 1, started)
                time.sleep(draw.uniform(0, 0.3))
                if "value" in kills:
                    job.kill()
                if kills == ("value",):
                    job.start()
                    wait_for_rows(run, min(steps + 4, 12), started)
            finally:
                started.kill()
                started.wait(30)
            if job.process is not None and job.process.poll() is not None:
                job.start()
        learn(1, [run])
    assert_same_ppo(run, whole, rel=0)


def wait_for_rows(run: Run, rows: int, started: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while len(run.rows) < rows:
        assert started.poll() is None or started.returncode == 0
        assert time.monotonic() < deadline, (rows, run.log[-3000:])
        time.sleep(0.02)


@pytest.mark.long
def test_a_learner_that_is_stopped_without_its_value_model_says_that_there_is_no_checkpoint(
    model, tmp_path, address
):
    run = placed(tmp_path, model, address, checkpoint={"every": 4, "export": True})
    run.options = {"gates": [2]}
    job = job_of(run)
    with jobs(job):
        learner = Learning(run)
        try:
            learner.made(2)
            job.kill()
            learner.open(2)
            learner.says("waiting for value model at")
            learner.process.send_signal(signal.SIGTERM)
            told, _ = learner.process.communicate(timeout=120)
        finally:
            learner.process.kill()
    assert learner.process.returncode == 1
    assert "stopped while it waited for the value model" in run.log
    assert "told to stop, and the value model does not answer" in told
    assert not list((run.folder / "run/checkpoints").glob("step-*"))


def test_a_learner_whose_value_model_never_comes_ends_and_says_why(model, tmp_path, address):
    learner = begin(1, [placed(tmp_path, model, address, timeout_s=4)])
    told, _ = learner.communicate(timeout=120)
    assert learner.returncode == 1
    assert f"value model at {address}: no answer to load within 4 s" in told


@pytest.mark.long
def test_a_checkpoint_goes_from_shared_ranks_to_own_ones_in_another_layout_and_back(
    here, model, tmp_path, free_address
):
    """Each learner is killed at batch 3, behind the checkpoint of step 2, and the other way goes on."""
    killed = Run(tmp_path / "killed", model, options={"kill_at": 3}, **PPO)
    learn(1, [killed], killed=True)
    apart = at_nobody(continued(killed, model, "apart", **placed_settings(free_address(), "pipeline")))
    assert_same_ppo(learned(apart, 1), here["gae"], rel=1e-3)
    assert "resumed from" in apart.log
    killed = placed(tmp_path / "killed-apart", model, free_address(), "tensor")
    killed.options = {"kill_at": 3}
    job = job_of(killed)
    with jobs(job):
        learn(1, [killed], killed=True)
    back = continued(killed, model, "back", layout={"tensor": 2}, **PPO)
    learn(2, [back])
    assert "resumed from" in back.log
    assert_same_ppo(back, here["gae"], rel=1e-3)
