"""A server is killed with -9; what it started goes with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVER = """
import subprocess, sys, time
from rollout.orphans import start_guard
guard = start_guard()
named = "import setproctitle, time; setproctitle.setproctitle('VLLM'); print(flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", named], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, guard.pid, flush=True)
time.sleep(300)
"""


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_the_guard_ends_the_children_of_a_killed_server_and_then_itself():
    """A child that names itself as vLLM's processes do, which may write over its environment."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        assert server.stdout is not None
        child, guard = map(int, server.stdout.readline().split())
        assert alive(child)
        assert alive(guard)
        os.kill(server.pid, signal.SIGKILL)
        server.communicate()
        assert ends_within([child, guard], 5)
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


SHARING = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
from rollout.orphans import children_without_ctrl_c, start_guard
guard = start_guard()
with children_without_ctrl_c():
    shared = SharedMemory(create=True, size=1 << 20)
    print(shared.name, flush=True)
    time.sleep(300)
"""


def test_shared_memory_of_a_killed_server_is_taken_away_without_a_word():
    server = subprocess.Popen(
        [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    shared = Path("/dev/shm", server.stdout.readline().strip())
    assert shared.exists()
    server.kill()
    _, told = server.communicate(timeout=30)  # until the last of them has closed what it would say it in
    assert not shared.exists()
    assert told == ""


CTRL_C = """
import multiprocessing.resource_tracker, os, signal, subprocess, sys, time
from rollout.orphans import children_without_ctrl_c
signal.signal(signal.SIGINT, signal.SIG_DFL)
handling = "import signal, time; signal.signal(signal.SIGINT, lambda *_: exit(3)); print(flush=True); "
with children_without_ctrl_c():
    multiprocessing.resource_tracker.ensure_running()  # as the first process of multiprocessing does
    child = subprocess.Popen([sys.executable, "-c", handling + "time.sleep(300)"], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    if sys.argv[1] == "inside":
        time.sleep(300)
time.sleep(300)
"""


@pytest.mark.parametrize("place", ["inside", "after"])
def test_ctrl_c_ends_the_server_and_is_not_heard_by_what_it_started(place):
    command = [sys.executable, "-c", CTRL_C, place]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    child = int(server.stdout.readline())
    try:
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(5) == -signal.SIGINT
        assert not ends_within([child], 0.5)
    finally:
        os.kill(child, signal.SIGKILL)
        server.stdout.close()
