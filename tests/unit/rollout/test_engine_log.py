"""What an engine's processes say is kept from a terminal and in a file, and elsewhere stays where it was."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from pathlib import Path
from rollout.engine import EngineFailed
from rollout.engine_log import spared_terminal
print("before", file=sys.stderr)
try:
    with spared_terminal(Path(sys.argv[1])):
        says = "echo page; read line; echo later; echo worse >&2"
        engine = subprocess.Popen(["sh", "-c", says], stdin=subprocess.PIPE)
        if len(sys.argv) > 2:
            raise EngineFailed("it does not start")
except EngineFailed as failure:
    print(failure, file=sys.stderr)
print("after", file=sys.stderr)
engine.communicate(b"go on")
"""


def said(log: Path, *more: str) -> str:
    """At a terminal."""
    terminal, end = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(log), *more], stdout=end, stderr=end)
    os.close(end)
    found = b""
    try:
        while piece := os.read(terminal, 4096):
            found += piece
    except OSError:
        pass  # Linux's end of a terminal
    assert process.wait(30) == 0
    return found.decode().replace("\r", "")


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "logs/server-0.vllm.log"


def test_a_terminal_has_our_own_lines_and_the_file_the_engines_from_first_to_last(log):
    assert said(log) == "before\nafter\n"
    assert log.read_text() == "page\nlater\nworse\n"


def test_a_start_that_fails_names_the_file(log):
    assert said(log, "fails") == f"before\nit does not start; its log: {log}\nafter\n"


def test_without_a_terminal_all_stays_where_it_was(log):
    command = [sys.executable, "-c", PROGRAM, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("page\nlater\n", "before\nafter\nworse\n")
    assert not log.exists()


FAILS = """
import subprocess, sys
from rollout.engine_log import said_since, standard_error
print("ValueError: of another start", file=sys.stderr, flush=True)
before = standard_error()
subprocess.run(["sh", "-c", "echo '(EngineCore pid=7) ERROR [core.py:1] ValueError: no room' >&2"])
print("RuntimeError: Engine core failed. See root cause above.", file=sys.stderr, flush=True)
print(said_since(before), said_since(standard_error()), sep=", ")
"""


@pytest.mark.parametrize("into_a_file", [True, False])
def test_what_an_engines_process_failed_of_is_found_where_standard_error_is_a_file(tmp_path, into_a_file):
    with (tmp_path / "server-0.log").open("wb") as log:
        command = [sys.executable, "-c", FAILS]
        where = log if into_a_file else subprocess.PIPE
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=where, timeout=60, check=True)
    found = "ValueError: no room" if into_a_file else "None"
    assert done.stdout.decode() == f"{found}, None\n", "and nothing that was said before"
