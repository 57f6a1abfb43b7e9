"""Services killed with -9, all at once, and started again in every order, each time under another setting.

At the end every version was made once and in order, of the batches that were made first and with the losses
that it had then, and no server was given an older one than it had; every prompt was trained exactly once an
epoch, and no batch has tokens older than the bound under which it was made.
"""

import os
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hand_started import BIN, Processes, Services, assert_trained_once, loaded_versions, services

from buffer.inspection import inspect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PROMPTS, EVERY = 40, 2
LAST = 10_000
"""Steps while there is more to come."""

ROUNDS: list[tuple[str, dict[str, object]]] = [
    ("buffer rollout learner", {}),
    (
        "learner rollout buffer",
        {"learner.processes": 2, "learner.parallel.tensor": 2, "buffer.max_staleness": 4},
    ),
    ("rollout buffer learner", {"learner.processes": 2, "rollout.servers": 2, "buffer.max_staleness": 0}),
    ("buffer learner rollout", {"learner.processes": 2, "learner.parallel.pipeline": 2}),
    ("learner buffer rollout", {"buffer.groups_per_batch": 6, "buffer.max_staleness": 1}),
    ("rollout learner buffer", {"buffer.groups_per_batch": 3, "learner.processes": 2}),
]
"""In which order, and what is other than in the experiment's file: tensor, pipeline and data-parallel ranks,
servers, staleness up and down, larger and smaller batches."""


REFUSED = [
    ("buffer", "seed=2", "order is 'shuffled with seed 1', this run's is 'shuffled with seed 2'"),
    ("learner", "model.dtype=bfloat16", "written with model.dtype=float32, this run has bfloat16"),
    ("run", "learner.parallel.distributed_optimizer=true", "distributed_optimizer=False, this run has True"),
]
"""By which command, and how it is told."""


def refusal(folder: Path, service: str, change: str) -> str:
    """The one line with which a command refuses to go on."""
    command = [BIN / "slipstream", service, "experiment.yaml", change]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended
    (line,) = ended.stderr.splitlines()
    return line


class Resumed:
    """A run's services in one folder, started again and again."""

    def __init__(self, folder: Path, running: Services) -> None:
        self.folder = folder
        self.running = running
        self.processes = Processes(folder)
        self.starts = 0

    def start(self, order: str, changes: dict[str, object]) -> None:
        """One after the other, each when the one before waits, so that it is this order."""
        for log in self.folder.glob("*.log"):
            log.rename(self.folder / f"{log.stem}.{self.starts}")
        self.starts += 1
        settings = [f"{key}={value}" for key, value in changes.items() if key != "rollout.servers"]
        started: set[str] = set()
        for service in order.split():
            names = [f"server-{i}" for i in range(int(str(changes.get("rollout.servers", 1))))]
            for name in names if service == "rollout" else [service]:
                self.running.start(service, name if service == "rollout" else None, *settings)
            started.add(service)
            for name in names if service == "rollout" else [service]:
                self._waits(name, service, started)

    def _waits(self, name: str, service: str, started: set[str]) -> None:
        if service == "buffer":
            self.running.says(name, "waiting for the learner and for rollout servers")
        elif "buffer" not in started:
            self.running.says(name, "waiting for buffer at")
        elif service == "rollout" and "learner" not in started:
            self.running.says(name, "waiting for learner at")

    def loaded(self) -> list[list[int]]:
        """The versions that servers took, of each start."""
        logs = [self.folder.glob(f"server-*.{start}") for start in [*range(1, self.starts), "log"]]
        return [[v for path in paths for v in loaded_versions(path.read_text())] for paths in logs]

    def frontier(self) -> int:
        """Batches that were ever made."""
        return max(batches(self.folder), default=-1) + 1 if self.starts else 0

    def more_steps(self, count: int) -> None:
        goal = len(self.running.rows()) + count
        self.running.until(lambda: len(self.running.rows()) >= goal)

    def kill(self) -> None:
        """Everything, at once."""
        for pid in self.processes.all():
            os.kill(pid, 9)
        for process in self.running.running.values():
            process.wait(30)
        self.running.running.clear()
        deadline = time.monotonic() + 30
        while left := self.processes.all():  # on its way out, or begun by another in its last moment
            assert time.monotonic() < deadline, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(0.05)


def batches(folder: Path) -> dict[int, list[str]]:
    """What each batch was made of, of those that the store still has."""
    store = sqlite3.connect(folder / "run/buffer.sqlite")
    found: dict[int, list[str]] = {}
    for index, prompt in store.execute(
        "SELECT batch, prompt_id FROM members JOIN groups USING (sequence) ORDER BY batch, place"
    ):
        found.setdefault(index, []).append(prompt)
    store.close()
    return found


def assert_holds(made: dict[int, list[str]], earlier: dict[int, list[str]]) -> None:
    """That batches are made of what they were made of."""
    assert {index: made.get(index) for index in earlier} == earlier


def assert_the_same_losses(rows: list[dict], first: dict[int, dict]) -> None:
    """That steps which a kill took back, in other layouts too, came out as they had before it."""
    again = [row for row in rows if row["step"] in first and row["time"] != first[row["step"]]["time"]]
    assert len(again) >= len(ROUNDS) // 2  # of the others the kill came right behind a checkpoint
    for key in ("loss", "grad_norm", "rho/mean"):
        far = [abs(row[key] - first[row["step"]][key]) for row in again]
        assert max(far) <= 1e-3, (key, far)


@pytest.mark.long
def test_services_killed_and_started_again_in_every_order(make_experiment, free_address):
    folder = make_experiment(
        "orders",
        buffer={"groups_per_batch": 4, "address": free_address(), "lease_timeout_s": 20},
        sync={"address": free_address()},
        learner={
            "steps": LAST, "optimizer": {"lr": 1e-4}, "checkpoint": {"every": EVERY, "keep": 2}, "threads": 1,
            "algorithm": {"correction": {"taper": False}},  # the same under every bound of ROUNDS
        },
        eval=None,
    )  # fmt: skip
    bounds: list[tuple[int, int]] = []
    first_made: dict[int, list[str]] = {}
    first_rows: dict[int, dict] = {}
    with services(folder) as running:
        run = Resumed(folder, running)
        for order, changes in ROUNDS:
            bounds.append((run.frontier(), int(str(changes.get("buffer.max_staleness", 2)))))
            run.start(order, changes)
            run.more_steps(EVERY + 3)  # at least one checkpoint, and steps behind it that are lost
            first_made = batches(folder) | first_made
            run.kill()
            first_rows = {row["step"]: row for row in running.rows()} | first_rows
            assert_holds(batches(folder), first_made)
        for service, change, why in REFUSED:
            told = refusal(folder, service, change)
            assert why in told, told
        steps = len(running.rows()) + 3
        bounds.append((run.frontier(), 2))
        run.start("buffer rollout learner", {"learner.steps": steps})
        running.finish()
        rows = running.rows()
        left = run.processes.all()
    assert left == {}
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "every version once, in order"
    for before, after in pairwise(run.loaded()):
        assert max(before) <= min(after), "the versions of servers that are started again"
    assert_the_same_losses(rows, first_rows)
    made = batches(folder)
    assert_holds(made, first_made)
    assert sorted(made) == list(range(steps))
    trained = Counter(prompt for groups in made.values() for prompt in groups)
    assert max(trained.values()) == 1, "a prompt was trained twice in an epoch"
    store = inspect(folder / "run")
    assert (store["frontier"], store["finished"]) == (steps, steps)
    assert_trained_once(folder, sum(map(len, made.values())), PROMPTS)
    for row in rows:
        (bound,) = [b for (first, b) in bounds if first <= row["step"] - 1][-1:]
        assert row["staleness/max"] <= bound, row["step"]
    sizes = {len(groups) for groups in made.values()}
    assert sizes == {int(str(changes.get("buffer.groups_per_batch", 4))) for _, changes in ROUNDS} | {4}
