"""The wall clock is set while a run is going: leases, deadlines and checkpoints go by a clock that is not."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from moved_clock import MovedClock, built
from recorded_run import LEASE_S, Faults, make_recorded_run, recorded_run

from buffer.client import BufferClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOUR_S = 3600
LOOK_S = 1.2
"""Longer than from one look of the buffer at its leases to the next."""
HIGHEST_RATE = 1e8
"""A second, of anything here, even bytes; a rate over no time at all is far above it."""


@pytest.fixture
def moved_clock(tmp_path) -> MovedClock:
    return MovedClock(built(tmp_path), tmp_path / "offsets")


@pytest.fixture
def faults(make_experiment, free_address, moved_clock) -> Iterator[Faults]:
    checkpoint = {"every": None, "every_s": HOUR_S / 2, "keep": 2, "export": False}
    folder = make_recorded_run(
        make_experiment, free_address, "wall-clock", learner={"checkpoint": checkpoint}
    )
    through = moved_clock.command
    with recorded_run(folder) as made:
        made.start("a", through=dict.fromkeys(("buffer", "learner", "a"), through))
        yield made


async def keeps_its_lease(folder: Path, move: Callable[[], None], silent_s: float) -> bool:
    """Whether a lease that was lent just before the clock is set is still its holder's so long after."""
    e = yaml.safe_load((folder / "experiment.yaml").read_text())
    async with BufferClient(e["buffer"]["address"], "rollout", e["name"], "holder") as client:
        (lease,) = await client.lease(1, 30)
        move()
        await asyncio.sleep(silent_s)
        lost = await client.renew([lease.lease_id])
        await client.give_up(lease.lease_id, "server_stopped", requeue=True)
    return not lost


@pytest.mark.long
def test_an_hour_forwards_and_two_back_change_no_lease_no_member_and_no_checkpoint(faults, moved_clock):
    for offset, silent_s in ((HOUR_S, LOOK_S), (-HOUR_S, LEASE_S + LOOK_S), (0, LOOK_S)):
        move = partial(moved_clock.move, offset)
        kept = asyncio.run(keeps_its_lease(faults.running.folder, move, silent_s))
        assert kept is (silent_s < LEASE_S), offset
        until = time.monotonic() + LEASE_S + 1
        while time.monotonic() < until:
            assert faults.steps(1) < LEASE_S
        assert faults.running.rows()[-1]["time"] == pytest.approx(time.time() + offset, abs=60)
    assert faults.told("buffer", "1 leases ran out") == faults.told("buffer", "ran out") == 1
    for service, trouble in (("learner", "evicted"), ("a", "joining again")):
        assert faults.told(service, trouble) == 0
    assert faults.told("learner", "checkpoint of step") == 0, "half an hour has not passed"
    rows = faults.running.rows()
    assert all(0 < row["time/step"] < 60 for row in rows)
    lines = (faults.running.folder / "run/metrics/buffer.jsonl").read_text().splitlines()
    rates = [rate for line in map(json.loads, lines) for rate in line.get("per_second", {}).values()]
    assert rates
    assert all(0 <= rate < HIGHEST_RATE for rate in rates)
    faults.finish()
