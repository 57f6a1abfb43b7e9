"""How a training job's process is stopped, and what ends one that does not."""

import os
import signal
import subprocess
import sys
import time

RANK = """
import time
from learner import stop
stop.ORPHAN_S = 1
stop.StopFlag().install()
print("up", flush=True)
while True:
    time.sleep(600)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_that_hangs_and_has_lost_its_torchrun_ends_by_itself():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as told:
        assert told.readline() == b"up\n"
        (rank,) = children(launcher.pid)
        launcher.kill()
        launcher.wait()
        os.kill(rank, signal.SIGTERM)  # as the system does to a rank when torchrun dies
        # The rank holds the other end of the pipe until it is gone.
        assert told.read() == b""


def test_a_rank_that_has_its_torchrun_takes_the_time_that_its_step_needs():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as told:
        assert told.readline() == b"up\n"
        (rank,) = children(launcher.pid)
        os.kill(rank, signal.SIGTERM)
        time.sleep(2.5)
        os.kill(rank, 0)
        assert launcher.poll() is None
        os.kill(rank, signal.SIGKILL)
        launcher.wait(20)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
