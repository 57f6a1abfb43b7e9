"""How a training job's process is stopped, and what ends one that does not."""

import os
import signal
import subprocess
import sys
import time

import pytest

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


@pytest.fixture
def launched():
    """A rank's launcher, the rank's process id, and the pipe that the rank holds open until it is gone."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as told:
        assert told.readline() == b"up\n"
        with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as file:
            yield launcher, int(file.read()), told


def test_a_rank_that_hangs_and_has_lost_its_torchrun_ends_by_itself(launched):
    launcher, rank, told = launched
    launcher.kill()
    launcher.wait()
    os.kill(rank, signal.SIGTERM)  # as the system does to a rank when torchrun dies
    assert told.read() == b""


def test_a_rank_that_has_its_torchrun_takes_the_time_that_its_step_needs(launched):
    launcher, rank, _ = launched
    os.kill(rank, signal.SIGTERM)
    time.sleep(2.5)
    assert launcher.poll() is None
    os.kill(rank, signal.SIGKILL)
    launcher.wait(20)
