"""A run in which nothing moves any more says who waits for whom, and where."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import watchdog
from launch.experiment import read
from launch.history import History
from launch.watchdog import Watchdog, ask_for_stacks, diagnosis

NOW = 2_000_000_000.0
BUFFER = {
    "time": NOW - 1,
    "published": 4,
    "frontier": 5,
    "stored": 3,
    "leased": 12,
    "room": 2,
    "delivered": 40,
}
SERVER = {"time": NOW - 1, "tokens": 900, "running_groups": 2, "version": 4}


@pytest.fixture
def experiment(config_file):
    return read(config_file, ["logging.stalled_s=60"])


def made(buffer=None, server=None, steps=None) -> History:
    history = History(Path("nowhere"))
    history.buffer = [buffer] if buffer else []
    history.servers = {"server-0": [server]} if server else {}
    history.steps = steps or {}
    return history


def lines(experiment, **of) -> str:
    return "\n".join(diagnosis(experiment, made(**of), NOW))


def test_silence_is_told_once_in_a_while_and_only_while_nothing_moves(experiment, monkeypatch):
    asked, now = [], 0.0
    monkeypatch.setattr(watchdog, "ask_for_stacks", asked.append)
    history = made(BUFFER, SERVER)
    running = [SimpleNamespace(process=SimpleNamespace(pid=7))]
    supervisor = cast(Any, SimpleNamespace(running=running, logs=Path("run/logs")))
    dog = Watchdog(experiment, history, supervisor, lambda: now)

    told = {}
    for now in range(0, 400, 10):
        if now == 100:
            history.servers["server-0"].append(SERVER | {"tokens": 901})
        told[now] = dog.look()
    assert [at for at, found in told.items() if found] == [60, 160, 220, 340]
    assert told[60][0] == "nothing was generated, trained or evaluated for 1 min 00 s:"
    assert told[60][-1].endswith("stands at the end of the logs in run/logs")
    assert asked == [[7]] * 4


def test_a_learner_that_waits_for_a_batch_and_a_server_that_does_not_finish_one(experiment):
    text = lines(
        experiment, buffer=BUFFER | {"waiting_batches": 1}, server=SERVER, steps={4: {"time": NOW - 70}}
    )
    assert "3 groups stored of the 8 that batch 5 takes, 12 at servers, room for 2 more" in text
    assert "learner: waits for that batch" in text
    assert "server-0: has 2 groups in hand, with version 4, and finishes none" in text
    assert "learner: made step 4, 1 min 10 s ago" in text


def test_servers_that_get_nothing_are_told_with_the_reason(experiment):
    idle = SERVER | {"running_groups": 0}
    assert "of which none may be granted now" in lines(experiment, buffer=BUFFER | {"room": 0}, server=idle)
    assert "and gets none" in lines(experiment, buffer=BUFFER, server=idle)
    before = lines(experiment, buffer=BUFFER | {"published": None}, server=SERVER | {"version": None})
    assert "servers wait for the learner" in before
    assert "server-0: waits for a version from the learner" in before


def test_a_reference_on_ranks_of_its_own_is_told_of(experiment, config_file):
    placed = ["learner.algorithm.kl.coefficient=0.1", "learner.reference.processes=2"]
    assert "reference" not in lines(experiment, buffer=BUFFER)
    history = made(BUFFER)
    for line, told in (
        (None, "the reference has not come up"),
        ({"time": NOW - 1, "in_hand": 3}, "reference: has 3 requests of the learner's in hand"),
        ({"time": NOW - 1, "in_hand": 0}, "reference: waits for the learner"),
        ({"time": NOW - 90, "in_hand": 3}, "reference: has told nothing for 1 min 30 s; it hangs"),
    ):
        history.reference = [line] if line else []
        assert told in "\n".join(diagnosis(read(config_file, placed), history, NOW))


def test_a_value_model_on_ranks_of_its_own_is_told_of(config_file, reward_folder):
    placed = ["learner.algorithm.advantage=gae", f"learner.value.path={reward_folder}"]
    experiment = read(config_file, [*placed, "learner.value.ranks.processes=2"])
    history = made(BUFFER)
    for line, told in (
        (None, "the value model has not come up"),
        ({"time": NOW - 1, "in_hand": 3}, "value model: has 3 requests of the learner's in hand"),
        (
            {"time": NOW - 1, "in_hand": 0, "missing_copies": 2},
            "value model: waits for 2 of the learner's copies with an update",
        ),
        ({"time": NOW - 1, "in_hand": 0}, "value model: waits for the learner"),
        ({"time": NOW - 90}, "value model: has told nothing for 1 min 30 s; it hangs"),
    ):
        history.value = [line] if line else []
        assert told in "\n".join(diagnosis(experiment, history, NOW))


def test_a_service_that_hangs_or_never_came_is_named(experiment):
    hung = lines(experiment, buffer=BUFFER | {"time": NOW - 300}, server=SERVER | {"time": NOW - 90})
    assert "buffer: has told nothing for 5 min 00 s; it hangs" in hung
    assert "server-0: has told nothing for 1 min 30 s" in hung
    nobody = lines(experiment)
    assert "the buffer has not come up" in nobody
    assert "no rollout server has come up" in nobody
    assert "learner: made no step yet" in nobody


def test_stacks_come_from_whoever_has_them_to_give_and_nobody_dies(tmp_path):
    program = "from buffer.stacks import answer_with_stacks as a; a()\n" + (
        "def stuck():\n  import time; print('ready', flush=True); time.sleep(60)\nstuck()"
    )
    shell = f'sleep 60 & {sys.executable} -c "$PROGRAM" 2> {tmp_path / "stacks"} & wait'
    environment = os.environ | {"PROGRAM": program, "PYTHONPATH": str(Path(watchdog.__file__).parents[1])}
    parent = subprocess.Popen(
        ["bash", "-c", shell], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        ask_for_stacks([parent.pid])
        deadline = time.monotonic() + 10
        while "in stuck" not in (tmp_path / "stacks").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(watchdog.children()[parent.pid]) == 2, "neither it nor the sleeper ended"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
