"""A terminal, or a reader, that goes away under a command."""

import os
import signal
import subprocess
import sys

SPEAK = """
import signal, sys, time
from launch.terminal import open_console
heard = []
if "stops in order" in sys.argv:
    signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
console = open_console()
console.print("here" if console.is_terminal else "plain")
sys.stdin.read()
for _ in range(3):
    console.print("gone")
with open(sys.argv[1], "w") as file:
    file.write(f"done in order, heard {list(map(int, heard))}")
"""


def speak(out, **environment):
    """A process on a terminal, and the terminal's other end."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SPEAK, str(out), "stops in order"], stdin=subprocess.PIPE, stdout=theirs,
        stderr=theirs, env=os.environ | environment,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def test_who_prints_on_a_terminal_that_is_gone_goes_on(tmp_path):
    process, ours = speak(tmp_path / "out", TERM="xterm")
    assert b"here" in os.read(ours, 100)
    os.close(ours)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == "done in order, heard []", "the kernel tells of a hang-up"


def unread(out, *how):
    """A process whose output is piped to one that has ended; its exit code and what it said elsewhere."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-c", SPEAK, str(out), *how]
    process = subprocess.run(command, input=b"", stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    return process.returncode, process.stderr


def test_a_run_that_nobody_reads_any_more_is_told_to_stop_once_and_ends_in_order(tmp_path):
    code, told = unread(tmp_path / "out", "stops in order")
    assert (code, told) == (0, b"nobody reads what this command prints any more\n")
    assert (tmp_path / "out").read_text() == f"done in order, heard {[int(signal.SIGHUP)]}"


def test_a_command_that_has_nothing_to_stop_ends_when_nobody_reads_it(tmp_path):
    code, told = unread(tmp_path / "out")
    assert (code, told) == (1, b"")
    assert not (tmp_path / "out").exists()


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
