"""Services that are stopped for hours, and a buffer that is gone for as long: everybody goes on afterwards.

The hours are of each service's own clocks, which a test sets while the service is stopped, or alone.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from moved_clock import MovedClock, built
from recorded_run import Faults, make_recorded_run, recorded_run

from rollout.process_tree import descendants

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

HOURS_S = 2 * 3600
"""Longer than every default deadline of the services, also than `learner.batch_timeout_s`."""
LOOK_S = 4.0
"""So that a request which was to end meanwhile does, by the moved clocks."""
SERVICES = ("buffer", "learner", "a", "b")


@pytest.fixture(scope="module")
def clocks(tmp_path_factory) -> dict[str, MovedClock]:
    folder = tmp_path_factory.mktemp("clocks")
    library = built(folder)
    return {name: MovedClock(library, folder / name) for name in SERVICES}


@pytest.fixture(scope="module")
def faults(make_experiment, free_address, clocks) -> Iterator[Faults]:
    with recorded_run(make_recorded_run(make_experiment, free_address, "long-silence")) as made:
        made.start("a", "b", through={name: clock.command for name, clock in clocks.items()})
        made.running.until(lambda: bool(made.loaded("a")) and bool(made.loaded("b")))
        yield made


def started(faults: Faults) -> dict[str, int]:
    return {name: process.pid for name, process in faults.running.running.items()}


def sleeps(faults: Faults, clock: MovedClock, name: str, hours: int) -> None:
    """Stop a service and everything below it, and have it wake up so much later."""
    pid = faults.running.running[name].pid
    stopped = [pid, *descendants(pid)]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    time.sleep(LOOK_S)
    clock.move(hours * HOURS_S, hours * HOURS_S)
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    time.sleep(LOOK_S)


def rests(faults: Faults) -> None:
    """Wait until no step is made any more."""
    known = -1
    while known < len(faults.running.rows()):
        known = len(faults.running.rows())
        time.sleep(LOOK_S)


def test_a_server_that_slept_for_hours_joins_again(faults, clocks):
    before = started(faults)
    sleeps(faults, clocks["b"], "b", 1)
    faults.takes_the_current_version("b")
    faults.delivers_again("b")
    assert started(faults) == before, "nothing was restarted"


def test_the_buffer_is_gone_for_hours_and_everybody_waits_and_goes_on(faults, clocks):
    told = {name: faults.told(name, "waiting for buffer at") for name in ("learner", "a", "b")}
    faults.running.kill("buffer")
    for name, before in told.items():
        faults.says_again(name, "waiting for buffer at", before)
    for name in told:
        clocks[name].move(2 * HOURS_S, 2 * HOURS_S)
    time.sleep(LOOK_S)
    faults.running.start("buffer")
    version = faults.version
    faults.steps(3)
    assert faults.version > version
    for name in ("a", "b"):
        faults.takes_the_current_version(name)
        faults.delivers_again(name)


def test_the_buffer_and_then_the_learner_sleep_for_hours_and_go_on(faults, clocks):
    before = started(faults)
    sleeps(faults, clocks["buffer"], "buffer", 1)
    faults.steps(3)
    for name in ("a", "b"):
        faults.signal(name, signal.SIGSTOP)
    rests(faults)
    sleeps(faults, clocks["learner"], "learner", 4)
    for name in ("a", "b"):
        faults.signal(name, signal.SIGCONT)
    faults.steps(3)
    assert started(faults) == before, "nothing was restarted"


def test_after_all_that_every_version_was_made_once_and_every_group_trained_once(faults):
    faults.finish()
