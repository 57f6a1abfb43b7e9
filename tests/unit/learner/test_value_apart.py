"""The value model at a distance, in one process: real Megatron models, a real socket between them."""

import math
import shutil
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_runs import Run, make_model
from ppo_runs import PPO
from scripted_learner import group

from buffer import requester
from buffer.records import Batch
from buffer.stacks import Stillness
from launch.placement import free_port
from learner import checkpoint as checkpoint_module
from learner import checkpoint_parts, parallel
from learner import critic as critic_module
from learner import optimizer as optimizer_module
from learner.apart import client as client_module
from learner.apart import job as job_module
from learner.apart import waiting as waiting_module
from learner.apart.desk import Desk
from learner.apart.job import answer, limits_of
from learner.apart.wire import VALUE, Answer, Failed, Served, Task
from learner.checkpoint import CheckpointNotWritten, Checkpoints
from learner.checkpoint_files import being_written, verify
from learner.config import ParallelConfig
from learner.line import Line
from learner.model import build_model
from learner.optimizer import make_trainable
from learner.service import checkpoint_setup, reference_of, value_model
from learner.step import Updater
from learner.value import service as service_module
from learner.value.client import ValueClient
from learner.value.ranks import CriticRanks
from learner.value.server import ValueServer
from learner.value.service import ValueJob
from learner.value.start import start_of_value

VALUE_SETTINGS = {
    "optimizer": {"lr": 1e-2, "clip_grad": 0.4, "schedule": "linear", "warmup_steps": 1},
    "targets": "vtrace",
}
SETTINGS = {**PPO, "value": VALUE_SETTINGS, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def world():
    parallel.initialize(ParallelConfig(), seed=3)
    yield
    parallel.shutdown()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.3)
    monkeypatch.setattr(client_module, "BUSY_S", 0.3)
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    for module in (job_module, waiting_module):
        monkeypatch.setattr(module, "TICK_S", 0.02)


@pytest.fixture(autouse=True)
def one_save_at_a_time(monkeypatch):
    """Megatron's writer hands its results over through one queue of the process; the learner and the job,
    which here are threads of one, would take each other's."""
    turn, save = threading.Lock(), checkpoint_parts.save_part

    def save_alone(*args):
        with turn:
            save(*args)

    for module in (checkpoint_module, service_module):
        monkeypatch.setattr(module, "save_part", save_alone)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def parsed(folder, model, value):
    run = Run(folder, model, **{**SETTINGS, "value": value})
    run.experiment["buffer"]["address"] = "tcp://127.0.0.1:1"
    return run.parsed


@pytest.fixture
def experiment(model, tmp_path):
    """Of a run with its value model apart."""
    ranks = {"address": f"tcp://127.0.0.1:{free_port('127.0.0.1')}", "timeout_s": 60}
    return parsed(tmp_path / "apart", model, {**SETTINGS["value"], "ranks": ranks})


def batch(index: int) -> Batch:
    draw = np.random.default_rng(index)
    return Batch(index, tuple(group(draw, f"{index}/{n}", max(0, index - n % 3)) for n in range(6)), {})


class Learner:
    """A policy with its updater and checkpoints."""

    def __init__(self, of, critic):
        learner = of.learner

        def build():
            return build_model(of.model.path, learner.parallel, torch.float32)

        self.policy = make_trainable(build(), learner.optimizer, learner.parallel)
        self.updater = Updater(of, self.policy, reference_of(self.policy, learner, build), critic)
        self.checkpoints = Checkpoints(Path(of.run_dir), 2, checkpoint_setup(of))

    def resume(self) -> int:
        step = self.checkpoints.resume(self.policy, self.updater.value_state)
        if step:
            self.updater.restore(self.checkpoints.position(step))
        return step

    def step(self, index, save=False):
        row = self.updater.update(batch(index)).row()
        if save:
            self.checkpoints.save(index + 1, self.policy, self.updater.position(), self.updater.value_state)
        return {key: value for key, value in row.items() if not key.startswith("time/")}


@contextmanager
def value_job(experiment):
    """Its threads; what it holds is lost at the end, as of one that is killed."""
    of = experiment.learner.value.ranks
    apart = ValueJob(experiment, of)
    served = Served(
        VALUE, experiment.name, start_of_value(experiment), limits_of(experiment, apart.vocabulary)
    )
    stop = SimpleNamespace(is_set=False)
    desk = Desk(experiment, "value", lambda: ValueServer(served, "its.address", of.address, None))
    ends: Future = Future()

    def work():
        try:
            answer(served, apart.compute, desk, stop, Stillness(600))
            ends.set_result(None)
        except ValueError as error:
            ends.set_result(error)

    with desk:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield SimpleNamespace(job=apart, server=desk._server, ended=lambda: ends.result(10))
        finally:
            stop.is_set = True
            thread.join(30)


@contextmanager
def critic_apart(experiment, session="one"):
    of = experiment.learner.value.ranks

    def connect():
        about = start_of_value(experiment)
        return ValueClient(VALUE, of.address, experiment.name, about, "test", of.timeout_s)

    with Line(connect) as line:
        yield CriticRanks(experiment.learner.value, line, lambda: False, session, experiment.learner.steps)


@pytest.fixture(scope="module")
def expected(world, model, tmp_path_factory):
    """Rows of four steps with the value model on the policy's ranks, its weights then, and the run."""
    here = parsed(tmp_path_factory.mktemp("here"), model, SETTINGS["value"])
    critic = value_model(here, ParallelConfig())
    learner = Learner(here, critic)
    rows = [learner.step(index, save=index == 1) for index in range(4)]
    assert all(row["value/grad_norm"] > 0 for row in rows)
    return rows, weights(critic), here


def weights(critic):
    return {n: p.detach().clone() for n, p in critic.trainable.model.module.named_parameters()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_apart_it_finds_the_same_numbers_to_the_last_bit(expected, experiment):
    rows, trained, _ = expected
    with value_job(experiment) as value, critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        assert learner.resume() == 0
        assert [learner.step(index) for index in range(4)] == rows
        assert_same(weights(value.job._critic), trained)


def test_what_a_job_trained_since_the_checkpoint_is_made_again_by_the_next_one(expected, experiment, caplog):
    """Lost before the first checkpoint, between two steps behind it, and with a step's updates under way."""
    rows, trained, _ = expected
    with critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        with value_job(experiment):
            learner.resume()
            found = [learner.step(0)]
        with value_job(experiment):
            found.append(learner.step(1, save=True))
            found.append(learner.step(2))
        assert "went back to step 0: it makes 2 updates again" in caplog.text
        with value_job(experiment) as value:
            found.append(learner.step(3))
            assert_same(weights(value.job._critic), trained)
        assert "went back to step 2: it makes 2 updates again" in caplog.text
    assert found == rows


def test_an_update_that_a_job_is_lost_in_is_made_by_the_next_one(expected, experiment, monkeypatch):
    rows, trained, _ = expected
    update, struck = ValueJob._train, threading.Event()

    def strike(self, task):
        """As a job that is killed when it has made the update, and not told of it."""
        found = update(self, task)
        if task.numbers["number"] == 3 and not struck.is_set():
            struck.set()
            time.sleep(1.0)
        return found

    monkeypatch.setattr(ValueJob, "_train", strike)
    with critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        found: list = []
        over = threading.Event()

        def train():
            learner.resume()
            found.extend(learner.step(index, save=index == 0) for index in range(4))
            over.set()

        thread = threading.Thread(target=train)
        with value_job(experiment):
            thread.start()
            assert struck.wait(60)
        with value_job(experiment) as value:
            thread.join(60)
            assert over.is_set()
            assert_same(weights(value.job._critic), trained)
    assert found == rows


@pytest.mark.parametrize("lost", ["learner", "both"])
def test_a_learner_that_starts_again_finds_the_value_model_of_its_checkpoint(lost, expected, experiment):
    """The job has trained on, and the learner comes back from the checkpoint behind step 2."""
    rows, trained, _ = expected
    with value_job(experiment) as value:
        with critic_apart(experiment) as critic:
            learner = Learner(experiment, critic)
            learner.resume()
            for index in range(3):
                learner.step(index, save=index == 1)
        if lost == "learner":
            again(experiment, value, rows, trained)
    if lost == "both":
        with value_job(experiment) as value:
            again(experiment, value, rows, trained)


def again(experiment, value, rows, trained):
    with critic_apart(experiment, "two") as critic:
        learner = Learner(experiment, critic)
        assert learner.resume() == 2
        assert [learner.step(index) for index in (2, 3)] == rows[2:]
        assert_same(weights(value.job._critic), trained)


def test_a_job_that_is_behind_or_before_a_learner_of_the_start_begins_anew(expected, experiment):
    """A run whose learner died before its first checkpoint."""
    rows, _, _ = expected
    with value_job(experiment):
        for session in ("one", "two"):
            with critic_apart(experiment, session) as critic:
                learner = Learner(experiment, critic)
                assert learner.resume() == 0
                assert [learner.step(index) for index in (0, 1)] == rows[:2]


def test_checkpoints_go_from_shared_ranks_to_ranks_of_their_own_and_back(expected, experiment):
    rows, trained, here = expected
    other = Path(experiment.run_dir) / "checkpoints"
    shutil.copytree(Path(here.run_dir) / "checkpoints", other)
    with value_job(experiment) as value, critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        assert learner.resume() == 2
        assert [learner.step(2, save=True), learner.step(3)] == rows[2:]
        assert_same(weights(value.job._critic), trained)
    back = here.model_copy(update={"run_dir": experiment.run_dir})
    critic = value_model(back, ParallelConfig())
    learner = Learner(back, critic)
    assert learner.resume() == 3
    assert learner.step(3) == rows[3]
    assert_same(weights(critic), trained)


def test_a_checkpoint_that_is_written_twice_has_its_value_model_both_times(world, experiment):
    with value_job(experiment), critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        learner.resume()
        learner.step(0, save=True)
        learner.checkpoints.save(1, learner.policy, learner.updater.position(), learner.updater.value_state)
    (path,) = learner.checkpoints.found()
    verify(path)
    assert (path / "value/.metadata").exists()


def test_a_job_that_sees_another_run_folder_says_so(world, experiment):
    other = experiment.model_copy(update={"run_dir": f"{experiment.run_dir}-elsewhere"})
    with value_job(other), critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        learner.resume()
        with pytest.raises(CheckpointNotWritten, match="the value model's ranks see another run_dir"):
            learner.step(0, save=True)
        assert not learner.checkpoints.found(), "a checkpoint without its value model is none"


def test_updates_that_never_have_a_gradient_end_the_job_and_the_learner_hears_why(
    world, experiment, monkeypatch
):
    monkeypatch.setattr(optimizer_module, "MOST_SKIPPED", 2)
    objective = critic_module.value_objective

    def without_a_gradient(*args):
        loss, metrics = objective(*args)
        return loss * math.nan, metrics

    monkeypatch.setattr(critic_module, "value_objective", without_a_gradient)
    with value_job(experiment) as value, critic_apart(experiment) as critic:
        learner = Learner(experiment, critic)
        learner.resume()
        with pytest.raises(Failed, match="the last 2 updates were skipped"):
            learner.step(0)
        assert "the last 2 updates were skipped" in str(value.ended())


def test_a_save_is_answered_once_the_files_of_every_rank_are_on_disk(world, experiment, monkeypatch):
    """With the answer the learner renames the folder, from under a rank that has yet to open a file in it."""
    made = ValueJob(experiment, experiment.learner.value.ranks)
    being_written(Path(experiment.run_dir) / "checkpoints", 2).mkdir(parents=True)
    order, sync, barrier = [], service_module.sync, service_module.dist.barrier
    monkeypatch.setattr(service_module, "sync", lambda folder: (order.append("synced"), sync(folder)))
    monkeypatch.setattr(service_module.dist, "barrier", lambda *a: (order.append("met"), barrier(*a)))
    assert made.compute([Task("save", numbers={"number": 0, "step": 2})]) == [Answer()]
    assert order[order.index("synced") :] == ["synced", "met"]


def test_ranks_are_watched_while_they_compute_and_not_while_nobody_asks(world):
    events = []
    answered = [Answer()]
    turns = iter([[Task("save")], [], [], [Task("save")], []])
    watch = SimpleNamespace(see=lambda asked: events.append(asked), end=lambda: events.append("idle"))

    class Asked:
        over = False

        def take(self, most, wait_s):
            tasks = next(turns, None)
            self.over = tasks is None
            return tasks or []

        def answer(self, found):
            events.append("answered")
            assert found == answered

    answer(None, lambda tasks: answered, Asked(), SimpleNamespace(is_set=False), watch)
    assert events == [1, "answered", "idle", "idle", 2, "answered", "idle", "idle"]
