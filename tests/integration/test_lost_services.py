"""One run whose servers hang, crawl, come, go and come back, and whose buffer goes: it waits and goes on.

The tests are what happens to the same run, one after the other; the last one sees what became of it.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from recorded_run import LONGEST_STEP_S, Faults, make_recorded_run, recorded_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HANGS_S = 26.0
"""Longer than every deadline, also than the 20 s after which the buffer's socket drops a silent peer."""
CRAWLS_S = 12.0


@pytest.fixture(scope="module")
def faults(make_experiment, free_address) -> Iterator[Faults]:
    with recorded_run(make_recorded_run(make_experiment, free_address, "lost-services")) as made:
        made.start("a", "b")
        made.running.until(lambda: bool(made.loaded("a")) and bool(made.loaded("b")))
        yield made


@contextmanager
def crawling(faults: Faults, name: str, share: float) -> Iterator[None]:
    """A process that gets so small a share of the time, whatever it does."""
    over = threading.Event()

    def hold_back() -> None:
        while not over.is_set():
            faults.signal(name, signal.SIGSTOP)
            over.wait(0.01 / share)
            faults.signal(name, signal.SIGCONT)
            over.wait(0.01)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_server_that_hangs_costs_its_deadlines_and_joins_again_when_it_wakes_up(faults):
    faults.signal("b", signal.SIGSTOP)
    began = time.monotonic()
    longest = 0.0
    while time.monotonic() - began < HANGS_S:
        longest = max(longest, faults.steps(1))
    assert longest < LONGEST_STEP_S
    assert faults.steps(5) < 2.0, "nobody waits for it any more"
    assert faults.told("learner", "evicted b:") == 1
    others = {name: p.pid for name, p in faults.running.running.items()}
    faults.signal("b", signal.SIGCONT)
    faults.takes_the_current_version("b")
    assert faults.steps(5) < LONGEST_STEP_S
    assert {name: p.pid for name, p in faults.running.running.items()} == others, "nothing was restarted"


def test_a_server_that_is_slower_by_a_hundred_times_keeps_nobody_longer_than_the_deadlines(faults):
    with crawling(faults, "b", 0.01):
        began, longest, steps = time.monotonic(), 0.0, 0
        # However slow this machine is just now: the other server's groups are trained meanwhile.
        while time.monotonic() - began < CRAWLS_S or steps < 4:
            longest = max(longest, faults.steps(1))
            steps += 1
    assert longest < LONGEST_STEP_S
    faults.takes_the_current_version("b")


def test_a_server_that_is_added_and_one_that_is_taken_away_change_nothing_for_the_others(faults):
    faults.start_server("c")
    faults.takes_the_current_version("c")
    assert faults.steps(3) < LONGEST_STEP_S
    faults.stop("c")
    assert "c left" in faults.running.log("learner")
    assert faults.steps(3) < 2.0, "one that says that it leaves costs no deadline"


def test_without_any_server_the_learner_waits_says_so_and_goes_on_with_the_next(faults):
    told = faults.told("learner", "no rollout server is left")
    for name in ("a", "b"):
        faults.running.kill(name)
    faults.says_again("learner", "no rollout server is left", told)
    version = faults.version
    faults.start_server("d")
    faults.takes_the_current_version("d")
    faults.steps(3)
    assert faults.version > version


def test_without_the_buffer_everybody_waits_says_for_whom_and_goes_on(faults):
    told = {name: faults.told(name, "waiting for buffer at") for name in ("learner", "d")}
    faults.running.kill("buffer")
    for name, before in told.items():
        faults.says_again(name, "waiting for buffer at", before)
    version = faults.version
    faults.running.start("buffer")
    faults.steps(3)
    assert faults.version > version


def test_after_all_that_every_version_was_made_once_and_every_group_trained_once(faults):
    faults.servers.reverse()  # the last one goes on alone
    faults.finish()
