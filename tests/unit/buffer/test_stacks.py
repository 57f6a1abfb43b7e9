"""What a process writes when nothing goes on in it."""

import subprocess
import sys

PROGRAM = """
import time
from buffer.stacks import Stillness
stillness = Stillness(0.4)
def stands_still(seconds):
    time.sleep(seconds)
{}
"""


def written(*lines: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format("\n".join(lines))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr


def test_whoever_achieves_nothing_tells_where_its_threads_are_and_again():
    found = written("stillness.see(1, 2)", "stands_still(1.0)")
    assert found.count("Timeout (0:00:00.400000)!") == 2
    assert found.count("in stands_still") == 2


def test_the_same_again_is_nothing_achieved():
    found = written("for _ in range(3):", "    stillness.see(1, 2)", "    stands_still(0.2)")
    assert found.count("Timeout") == 1


def test_whoever_achieves_something_or_has_ended_tells_nothing():
    assert not written("for made in range(5):", "    stillness.see(made)", "    stands_still(0.2)")
    assert not written("stillness.see(1)", "stillness.end()", "stands_still(1.0)")


def test_the_same_as_before_a_rest_begins_anew():
    assert written("stillness.see(1)", "stillness.end()", "stillness.see(1)", "stands_still(0.6)")
