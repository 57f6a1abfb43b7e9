"""A run over a wire that delays, repeats, reorders, drops and is cut: it goes on, and loses nothing.

The learner, the buffer and the server `near` are on one side of the wire, the server `far` is on the other.
The tests are what happens to the same run, one after the other; the last one sees what became of it.
"""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from faulty_wire import DEVICE, LEFT, RIGHT, Wire, open_wire
from recorded_run import LONGEST_STEP_S, Faults, make_recorded_run, recorded_groups, recorded_run

from buffer.keys import make_keys
from buffer.recording import append_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CUT_S = 8.0
"""Longer than every deadline of the run."""
HEAVY_BYTES = 300_000
"""Of a group that `far` delivers: a cut can come in the middle of it."""
ELSEWHERE = "10.77.0.3"


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
        self.faults.delivers_again("far")


@pytest.fixture(scope="module")
def run(make_experiment, free_address) -> Iterator[Run]:
    folder = make_recorded_run(
        make_experiment,
        free_address,
        "network",
        buffer={"address": f"tcp://{LEFT}:5701"},
        sync={"address": f"tcp://{LEFT}:5702", "shared_memory": False},
        # A learner that is killed makes no version again that anybody has.
        learner={"checkpoint": {"every": 1, "keep": 2, "export": False}},
        security={"keys": "keys"},
    )
    make_keys(folder / "keys")
    heavy = [
        replace(
            group, trajectories=tuple(replace(t, metadata={"text": "x" * 75_000}) for t in group.trajectories)
        )
        for group in recorded_groups(2)
    ]
    append_groups(folder / "heavy/made.groups", heavy)
    with open_wire(seed=1) as wire:
        if isinstance(wire, str):
            pytest.skip(wire)
        with recorded_run(folder) as faults:
            sides = {"buffer": "left", "learner": "left", "near": "left", "far": "right"}
            faults.start("near", through={name: wire.inside(side) for name, side in sides.items()})
            faults.start_server("far", "rollout.recorded=heavy")
            faults.takes_the_current_version("far")
            yield Run(faults, wire)


def stop_within_a_bucket(run: Run) -> None:
    """The wire is cut when a part of one has gone over it."""
    run.wire.become(cut_behind=(600_000, 1 << 60))
    run.faults.running.until(run.wire.is_cut)


def test_delayed_repeated_reordered_and_dropped_frames_change_nothing(run):
    run.wire.become(delay_s=0.01, repeated=0.2, late=0.2, dropped=0.02)
    before = len(run.faults.loaded("far"))
    run.faults.running.until(lambda: len(run.faults.loaded("far")) >= before + 8)
    done = run.wire.become()
    assert min(done["repeated"], done["late"], done["dropped"]) > 10, done
    run.faults.in_order("far")
    run.faults.delivers_again("far")
    assert run.faults.told("learner", "evicted far") == 0
    assert run.faults.told("buffer", "bad message") == 0


def test_a_long_cut_within_a_publish_costs_its_deadlines(run):
    stop_within_a_bucket(run)
    run.go_on_cut()
    assert run.faults.told("learner", "evicted far") == 1
    assert run.faults.told("learner", "publish interrupted") >= 1
    run.heal()


def test_a_server_that_is_killed_within_a_bucket_is_missed_and_comes_back(run):
    told = {text: run.faults.told("learner", text) for text in ("evicted far", "publish interrupted")}
    stop_within_a_bucket(run)
    run.faults.running.kill("far")
    run.wire.become()
    assert run.faults.steps(3) < LONGEST_STEP_S
    assert {text: run.faults.told("learner", text) - before for text, before in told.items()} == {
        "evicted far": 1,
        "publish interrupted": 1,
    }
    run.faults.start_server("far", "rollout.recorded=heavy")
    run.heal()


def test_a_learner_that_is_killed_within_a_bucket_publishes_that_version_again(run):
    stop_within_a_bucket(run)
    version = run.faults.version
    known = {name: max(run.faults.loaded(name)) for name in ("near", "far")}
    assert max(known.values()) <= version
    run.faults.kill_learner()
    run.wire.become()
    run.faults.running.start("learner")
    run.faults.steps(3, within_s=170)
    assert "resumed from run/checkpoints/" in run.faults.running.log("learner")
    for name in known:
        run.faults.takes_the_current_version(name)
    run.faults.delivers_again("far")


def test_a_long_cut_within_a_delivery_loses_and_doubles_no_group(run):
    ran_out = run.faults.told("buffer", "leases ran out")
    run.wire.become(cut_behind=(1 << 60, HEAVY_BYTES * 3 // 2))
    run.faults.running.until(run.wire.is_cut)
    run.go_on_cut()
    assert run.faults.told("buffer", "leases ran out") > ran_out, "others have its prompts"
    assert "waiting for buffer at" in run.faults.running.log("far")
    run.heal()


def test_a_host_that_vanishes_without_a_word_is_missed_and_comes_back_under_another_address(run):
    evicted = run.faults.told("learner", "evicted far")
    run.wire.become(cut=True)
    run.faults.running.kill("far")
    run.go_on_cut()
    assert run.faults.told("learner", "evicted far") == evicted + 1
    for change in (f"del {RIGHT}/24", f"add {ELSEWHERE}/24"):
        command = [*run.wire.inside("right"), "ip", "addr", *change.split(), "dev", DEVICE]
        subprocess.run(command, check=True)
    run.faults.start_server("far", "rollout.recorded=heavy")
    run.heal()


def test_after_all_that_every_version_was_made_once_and_every_group_trained_once(run):
    run.faults.finish()
