"""A run over a wire that delays, repeats, reorders, drops and is cut: it goes on, and loses nothing.

The learner, the buffer and the server `near` are on one side of the wire, the server `far` is on the other.
The tests are what happens to the same run, one after the other; the last one sees what became of it.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from faulty_wire import LEFT, Wire, open_wire
from recorded_run import LONGEST_STEP_S, Faults, make_recorded_run, recorded_run

from buffer.keys import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CUT_S = 8.0
"""Longer than every deadline of the run."""


class Run(NamedTuple):
    faults: Faults
    wire: Wire

    def go_on_cut(self) -> None:
        """Let the other side go on without the far one, for longer than every deadline."""
        until = time.monotonic() + CUT_S
        while time.monotonic() < until:
            assert self.faults.steps(1) < LONGEST_STEP_S

    def heal(self) -> None:
        self.wire.become()
        self.faults.takes_the_current_version("far")
        self.faults.steps(3)


@pytest.fixture(scope="module")
def run(make_experiment, free_address) -> Iterator[Run]:
    folder = make_recorded_run(
        make_experiment,
        free_address,
        "network",
        buffer={"address": f"tcp://{LEFT}:5701"},
        sync={"address": f"tcp://{LEFT}:5702"},
        security={"keys": "keys"},
    )
    make_keys(folder / "keys")
    with open_wire(seed=1) as wire:
        if isinstance(wire, str):
            pytest.skip(wire)
        with recorded_run(folder) as faults:
            sides = {"buffer": "left", "learner": "left", "near": "left", "far": "right"}
            faults.start("near", through={name: wire.inside(side) for name, side in sides.items()})
            faults.start_server("far")
            faults.takes_the_current_version("far")
            yield Run(faults, wire)


def test_delayed_repeated_reordered_and_dropped_frames_change_nothing(run):
    run.wire.become(delay_s=0.01, repeated=0.2, late=0.2, dropped=0.02)
    before = len(run.faults.loaded("far"))
    run.faults.running.until(lambda: len(run.faults.loaded("far")) >= before + 8)
    done = run.wire.become()
    assert min(done["repeated"], done["late"], done["dropped"]) > 10, done
    run.faults.in_order("far")
    assert run.faults.told("learner", "evicted far") == 0
    assert run.faults.told("buffer", "bad message") == 0


def test_a_long_cut_within_a_publish_costs_its_deadlines(run):
    run.wire.become(cut_behind=(600_000, 1 << 60))
    run.faults.running.until(run.wire.is_cut)
    run.go_on_cut()
    assert run.faults.told("learner", "evicted far") == 1
    assert run.faults.told("learner", "publish interrupted") >= 1
    run.heal()


def test_after_all_that_every_version_was_made_once_and_every_group_trained_once(run):
    run.faults.finish()
