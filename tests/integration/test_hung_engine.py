"""A server whose engine hangs while the server itself lives, renews its leases and keeps its membership."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from recorded_run import LONGEST_STEP_S, make_recorded_run, recorded_run

from buffer.inspection import inspect
from rollout.process_tree import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUP_S = 3.0
"""Deadline of a group: nothing else ends a lease that is renewed."""
HUNG_S = 6 * GROUP_S
"""Longer than any prompt may fail in a row."""


def engine_of(server: int) -> list[int]:
    """The processes of vLLM below a rollout server."""
    return [pid for pid in descendants(server) if Path(f"/proc/{pid}/cmdline").read_bytes()[:6] == b"VLLM::"]


@pytest.mark.long
def test_a_hung_engine_costs_its_own_groups_and_takes_the_current_version_when_it_goes_on(
    make_experiment, free_address
):
    folder = make_recorded_run(
        make_experiment, free_address, "hung-engine", rollout={"group_timeout_s": GROUP_S}
    )
    with recorded_run(folder) as faults:
        faults.start("recorded")
        faults.start_server("engine", "rollout.recorded=null")
        faults.takes_the_current_version("engine", within_s=240)
        faults.running.until(lambda: delivered(folder) > 0, 60)
        hung = engine_of(faults.running.running["engine"].pid)
        assert hung
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + HUNG_S
        while time.monotonic() < until:
            assert faults.steps(1) < LONGEST_STEP_S + GROUP_S
        assert "gave up prompt" in faults.running.log("engine")
        assert f"not finished within {GROUP_S:g} s" in faults.running.log("engine")
        assert "waiting for the engine: no lease is taken until it answers" in faults.running.log("engine")
        assert faults.told("learner", "evicted engine") >= 1
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
        faults.takes_the_current_version("engine")
        faults.delivers_again("engine")
        faults.steps(3)
        faults.finish()
        assert inspect(folder / "run")["dropped"] == {}, "no prompt paid for it"


def delivered(folder: Path) -> int:
    """Groups of the server, as of the last line of its metrics."""
    lines = (folder / "run/metrics/rollout-engine.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["groups"] if lines else 0
