"""A terminal that goes away under a command."""

import os
import subprocess
import sys

SPEAK = """
import signal, sys, time
from launch.terminal import open_console
signal.signal(signal.SIGHUP, lambda *_: None)
console = open_console()
console.print("here" if console.is_terminal else "plain")
sys.stdin.read()
for _ in range(3):
    console.print("gone")
with open(sys.argv[1], "w") as file:
    file.write("done in order")
"""


def speak(out, **environment):
    """A process on a terminal, and the terminal's other end."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SPEAK, str(out)], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
        env=os.environ | environment,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def test_who_prints_on_a_terminal_that_is_gone_goes_on(tmp_path):
    process, ours = speak(tmp_path / "out", TERM="xterm")
    assert b"here" in os.read(ours, 100)
    os.close(ours)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == "done in order"


def test_a_dumb_terminal_gets_lines(tmp_path):
    process, ours = speak(tmp_path / "out", TERM="dumb")
    assert b"plain" in os.read(ours, 100)
    process.communicate(timeout=30)
    os.close(ours)


def test_what_is_no_terminal_fails_as_always(tmp_path):
    command = [sys.executable, "-c", SPEAK, str(tmp_path / "out")]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, input=b"", stdout=full, stderr=subprocess.PIPE, check=False)
    assert process.returncode != 0
    assert b"No space left" in process.stderr
