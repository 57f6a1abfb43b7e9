"""kill -9 in the middle of a bucket that real services send: of a server, of its worker, of the learner."""

import signal

import pytest
from hand_started import Processes, Services, assert_trained_once, loaded_versions, services

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LOOP = '''
import os
import signal
from pathlib import Path

from learner.loop import train as main_loop
from sync.group import BroadcastGroup
from sync.sender import BucketSender

start, broadcast = BucketSender.start, BroadcastGroup.broadcast


def train(flow):
    """The main loop, with a kill where the second bucket begins: the servers have the first, and wait."""
    sent = 0

    def start_anew(sender, version):
        nonlocal sent
        sent = 0
        start(sender, version)

    def kill_and_broadcast(group, tensor):
        nonlocal sent
        sent += 1
        if sent == 2 and (victim := Path("victim")).exists():
            process = int(victim.read_text()) or os.getpid()
            victim.rename("killed")
            os.kill(process, signal.SIGKILL)
        broadcast(group, tensor)

    BucketSender.start, BroadcastGroup.broadcast = start_anew, kill_and_broadcast
    main_loop(flow)
'''
GROUPS, PROMPTS = 4, 40
ENDLESS, MORE = 1_000_000, 3


def kill_in_a_bucket(s: Services, process: int) -> None:
    """Returns once it is done; 0 is the learner's rank itself."""
    (s.folder / "next").write_text(str(process))
    (s.folder / "next").rename(s.folder / "victim")
    s.until((s.folder / "killed").exists)
    (s.folder / "killed").unlink()


def wait_for_steps(s: Services, count: int) -> None:
    goal = len(s.rows()) + count
    s.until(lambda: len(s.rows()) >= goal)


@pytest.mark.parametrize("shared", [True, False])
def test_who_is_killed_in_the_middle_of_a_bucket_costs_nobody_else(make_experiment, free_address, shared):
    sync = {"address": free_address(), "bucket_mib": 1, "shared_memory": shared}
    learner = {"steps": ENDLESS, "loop": "killing:train", "checkpoint": {"every": 3}}
    buffer = {"address": free_address(), "groups_per_batch": GROUPS}
    folder = make_experiment("publish-kill", sync=sync, learner=learner, buffer=buffer, eval=None)
    (folder / "killing.py").write_text(LOOP)
    with services(folder) as s:
        s.start("buffer")
        s.start("learner")
        s.start("rollout", "server-0")
        s.start("rollout", "server-1")
        s.until(lambda: all(len(loaded_versions(s.log(f"server-{i}"))) > 1 for i in (0, 1)))

        server = s.running.pop("server-1")
        kill_in_a_bucket(s, server.pid)
        assert server.wait(10) == -signal.SIGKILL
        wait_for_steps(s, 2)
        assert "rollout server server-1 lost" in s.log("learner")

        s.start("rollout", "server-1")
        there = len(loaded_versions(s.log("server-1")))
        s.until(lambda: len(loaded_versions(s.log("server-1"))) > there + 1)
        workers = [pid for pid, kind in Processes(folder).all().items() if kind == "engine worker"]
        both = {name: s.running.pop(name) for name in ("server-0", "server-1")}
        kill_in_a_bucket(s, workers[0])
        wait_for_steps(s, 2)
        s.until(lambda: any(process.poll() is not None for process in both.values()))
        s.running = both | s.running
        (ended,) = [name for name, process in both.items() if process.poll() is not None]
        there = len(loaded_versions(s.log(ended)))
        s.start("rollout", ended)
        s.until(lambda: len(loaded_versions(s.log(ended))) > there)

        learner_, buffer_ = s.running.pop("learner"), s.running.pop("buffer")
        kill_in_a_bucket(s, 0)
        assert learner_.wait(60) != 0
        buffer_.send_signal(signal.SIGINT)
        assert buffer_.wait(60) == 0
        steps = len(s.rows()) + MORE
        s.start("buffer", None, f"learner.steps={steps}")
        s.start("learner", None, f"learner.steps={steps}")
        s.finish()
        rows = s.rows()
        assert Processes(folder).all() == {}, "orphans"
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "every version once, in order"
    assert_trained_once(folder, steps * GROUPS, PROMPTS)
