"""benchmarks/load.py, small: memory stays flat, servers wait for a slow learner, nothing grows."""

import json
import subprocess
import sys

import pytest
from hand_started import HOME

from launch.placement import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLIENTS, READERS, GROUPS, GROUP_SIZE, MEMBERS = 24, 8, 32, 8, 12
WINDOW = 4 * GROUPS
"""Groups that may be leased or stored: max_staleness + 1 batches."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    options = {
        "total": 48_000, "seconds": 40, "slow-s": 8, "clients": CLIENTS, "processes": 1, "readers": READERS,
        "group-size": GROUP_SIZE, "groups-per-batch": GROUPS, "members": MEMBERS,
        "port": free_port("127.0.0.1"), "folder": folder, "out": folder / "load.json",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, HOME / "benchmarks" / "load.py", *words]
    made = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads((folder / "load.json").read_text())


def test_memory_is_flat_while_groups_go_through(found):
    flow = found["buffer"]["flow"]
    assert flow["trajectories_trained_so_far"] >= 8_000
    # As much as went through in that half: a leak of the groups would be tens of MiB.
    assert abs(flow["rss_late_mib"]) < 8, flow
    assert flow["rss_mib"]["max"] < 400
    assert flow["evicted"] == 0
    assert flow["in_flight_max"] <= WINDOW
    assert flow["threads_max"] < 20


def test_a_slow_learner_is_waited_for_and_nothing_piles_up(found):
    slow = found["buffer"]["slow"]
    assert slow["in_flight_max"] <= WINDOW
    assert slow["waiting_servers_min"] >= CLIENTS // 2, "servers wait for leases"
    assert abs(slow["rss_late_mib"]) < 8, slow
    assert slow["evicted"] == 0


def test_every_call_is_answered_in_time(found):
    latency = found["buffer"]["latency_ms"]
    assert {"lease", "deliver", "batch", "batch_rank_0"} <= set(latency)
    assert latency["deliver"]["p99"] < 5_000
    assert latency["batch"]["p99"] < 5_000


def test_every_member_gets_every_version(found):
    members = found["publisher"]["members"][str(MEMBERS)]
    assert members["next"]["loaded_s"] < 10
