"""Ctrl-C while a process still imports."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[3]

STOPS_IN_AN_IMPORT = """
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Stop())
sys.argv = ["it", "nothing.yaml"]
runpy.run_module({entry!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("launch", "launch.cli"),
        ("launch", "typer"),
        ("buffer", "buffer.config"),
        ("rollout", "rollout.config"),
        ("rollout.scorer", "rollout.config"),
        ("learner", "learner.config"),
        ("learner.offline", "learner.offline.config"),
        ("learner.reference", "learner.config"),
        ("learner.value", "learner.config"),
        ("learner.torchrun", "torch"),
    ],
)
def test_it_is_one_line_and_130_for_every_service(entry, module):
    script = STOPS_IN_AN_IMPORT.format(entry=entry, module=module)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=HOME, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_the_second_signal_to_a_buffer_ends_it_without_a_traceback():
    script = """
import asyncio, os, signal, time, uvloop
from buffer.service import _stop_on_signals

async def go():
    stop = _stop_on_signals()
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

uvloop.run(go())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=HOME, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")
