"""A run whose rollout servers give out recorded groups: every service is the real one, without an engine.

So it starts in seconds, and whatever happens on its wires happens to real leases, deliveries and versions.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hand_started import Processes, Services, assert_trained_once, loaded_versions, services

from buffer.recording import append_groups
from buffer.records import Group, Trajectory

PROMPTS, GROUPS, GROUP_SIZE = 40, 2, 4
"""Rows of the data; groups in a batch; completions in a group."""
ENDLESS, MORE = 1_000_000, 3
"""Steps while faults are made; steps to be made in peace afterwards."""
STALENESS = 2
LEASE_S, HEARTBEAT_S, TRANSFER_S = 3.0, 2.0, 4.0
"""The deadlines that the run is configured with."""
LONGEST_STEP_S = LEASE_S + TRANSFER_S + 5.0
"""Between two steps while a server is lost: its leases run out, a phase of a publish does, the rest is slack
for two busy cores."""


def recorded_groups(count: int = 16) -> list[Group]:
    """As a nearly uniform policy over the made model's 64 tokens would sample them, seeded."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(count):
        trajectories = []
        for index in range(GROUP_SIZE):
            ids = rng.integers(3, 64, 12).astype(np.int32)
            mask = np.array([0] * 4 + [1] * 8, np.uint8)
            logprobs = (np.float32(-np.log(64)) * mask).astype(np.float32)
            reward = float(rng.random())
            trajectories.append(
                Trajectory(index, ids, mask, logprobs, mask.astype(np.int32), reward, {}, "length")
            )
        made.append(Group(f"recorded-{number}", "lease", f"0/{number}", "train", tuple(trajectories)))
    return made


def make_recorded_run(
    make_experiment: Callable[..., Path], address: Callable[[], str], name: str, **changes: Any
) -> Path:
    """A folder with `experiment.yaml`; keywords override its sections."""
    sections: dict[str, Any] = {
        "rollout": {"recorded": "recorded", "group_size": GROUP_SIZE, "max_groups": 4},
        "buffer": {
            "groups_per_batch": GROUPS,
            "max_staleness": STALENESS,
            "lease_timeout_s": LEASE_S,
            "address": address(),
        },
        "sync": {
            "heartbeat_timeout_s": HEARTBEAT_S,
            "transfer_timeout_s": TRANSFER_S,
            "bucket_mib": 1,
            "address": address(),
        },
        "learner": {
            "steps": ENDLESS,
            "threads": 1,
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every": 10, "keep": 2, "export": False},
        },
        "logging": {"tensorboard": False},
        "eval": None,
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    folder = make_experiment(name, **sections)
    append_groups(folder / "recorded/made.groups", recorded_groups())
    return folder


class Faults:
    """A recorded run while something is done to it."""

    def __init__(self, running: Services) -> None:
        self.running = running
        self.servers: list[str] = []

    def start(self, *servers: str, through: dict[str, list[str]] | None = None) -> None:
        """All services, and wait for the first step."""
        self.running.through |= through or {}
        for service in ("buffer", "learner"):
            self.running.start(service)
        for name in servers:
            self.start_server(name)
        self.steps(1, within_s=170)

    def start_server(self, name: str, *more: str) -> None:
        if name not in self.servers:
            self.servers.append(name)
        self.running.start("rollout", name, *more)

    @property
    def version(self) -> int:
        """The newest that the learner has made."""
        return self.running.rows()[-1]["step"]

    def steps(self, count: int, within_s: float = 60) -> float:
        """Wait for so many more; the longest time that one of them took to come, in seconds."""
        known, longest = len(self.running.rows()), 0.0
        goal, since = known + count, time.monotonic()

        def made() -> bool:
            nonlocal known, longest, since
            found = len(self.running.rows())
            longest = max(longest, time.monotonic() - since)
            if found > known:
                known, since = found, time.monotonic()
            return found >= goal

        self.running.until(made, within_s)
        return longest

    def says_again(self, name: str, text: str, before: int, within_s: float = 60) -> None:
        """Wait until a log has the text once more than `before` times."""
        self.running.until(lambda: self.told(name, text) > before, within_s)

    def told(self, name: str, text: str) -> int:
        """How often the log of a service has the text."""
        return self.running.log(name).count(text)

    def loaded(self, server: str) -> list[int]:
        """The versions that a server took, in the order in which it did, of all its lives."""
        return loaded_versions(self.running.log(server))

    def takes_the_current_version(self, server: str, within_s: float = 60) -> None:
        """Wait until a server has one that is no older than the newest now, and got there in order."""
        oldest = self.version
        self.running.until(lambda: max(self.loaded(server), default=-1) >= oldest, within_s)
        self.in_order(server)

    def delivered(self, server: str) -> int:
        """Groups that a server has given to the buffer in this life, as of two seconds ago at most."""
        lines = (self.running.folder / f"run/metrics/rollout-{server}.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["groups"]

    def delivers_again(self, server: str, within_s: float = 60) -> None:
        before = self.delivered(server)
        self.running.until(lambda: self.delivered(server) > before + 1, within_s)

    def in_order(self, server: str) -> None:
        """See that it took no version twice while it was a member, and never an older one than before.

        One that was turned out and joins again has the current version sent in full, whatever it holds.
        """
        stays = self.running.log(server).split("sync: joined the learner")
        found = [loaded_versions(stay) for stay in stays]
        assert all(stay == sorted(set(stay)) for stay in found), found
        versions = [version for stay in found for version in stay]
        assert versions == sorted(versions), versions

    def signal(self, name: str, number: signal.Signals) -> None:
        self.running.running[name].send_signal(number)

    def kill_learner(self) -> None:
        """Its ranks, with -9: torchrun ends of that."""
        torchrun = self.running.running.pop("learner")
        for pid, kind in Processes(self.running.folder).all().items():
            if kind == "learner rank":
                os.kill(pid, signal.SIGKILL)
        assert torchrun.wait(60) != 0

    def stop(self, name: str) -> None:
        """As Ctrl-C does; it must end well, which for torchrun is to tell of the signal."""
        process = self.running.running.pop(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 128 + signal.SIGINT), self.running.log(name)[-2000:]

    def finish(self) -> None:
        """Stop everything, make some steps more in peace, and see that nothing was lost or done twice."""
        for name in ("learner", *self.servers, "buffer"):
            if name in self.running.running:
                self.stop(name)
        for name in self.servers:
            self.in_order(name)
        steps = len(self.running.rows()) + MORE
        for service in ("buffer", "learner"):
            self.running.start(service, None, f"learner.steps={steps}")
        for name in self.servers[:1]:
            self.running.start("rollout", name, f"learner.steps={steps}")
        self.running.until(lambda: all(p.poll() is not None for p in self.running.running.values()), 90)
        rows = self.running.rows()
        assert [row["step"] for row in rows] == list(range(1, steps + 1)), "every version once, in order"
        assert max(row["staleness/max"] for row in rows) <= STALENESS
        assert_trained_once(self.running.folder, steps * GROUPS, PROMPTS)


@contextmanager
def recorded_run(folder: Path) -> Iterator[Faults]:
    with services(folder) as running:
        yield Faults(running)
