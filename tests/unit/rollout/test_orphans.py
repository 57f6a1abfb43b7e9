"""A server is killed with -9; what it started goes with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SERVER = """
import subprocess, sys, time
from rollout.orphans import start_guard
guard = start_guard()
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
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
