"""The services of a run, started as the README says to start each on its own."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from buffer.inspection import inspect

HOME = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def commands() -> dict[str, list[str]]:
    """Service → the command that the README gives for it; only some runs have a scorer or ranks apart."""
    text = (HOME / "README.md").read_text()
    (block,) = re.findall(r"## The services, each on its own.*?```\n(.*?)```", text, re.DOTALL)
    lines = {role: ["slipstream", role, "experiment.yaml"] for role in ("scorer", "reference", "value")}
    lines["scorer"] += ["--name", "helpful"]
    for line in block.splitlines():
        words = shlex.split(line)
        lines[words[1]] = words
    return lines


PROGRAMS = {
    "buffer": "buffer",
    "rollout": "rollout",
    "rollout.scorer": "scorer",
    "learner": "learner rank",
    "learner.reference": "reference rank",
    "learner.value": "value rank",
}
"""Module → what its processes are called here."""


class Services:
    """Those started in one folder; each writes `NAME.log` there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.through: dict[str, list[str]] = {}
        """Name → the start of its command: a program that ends by becoming the service, such as `env`."""

    def start(self, service: str, name: str | None = None, *more: str) -> None:
        own = {"configs/demo.yaml": "experiment.yaml", "run_dir=runs/three": "run_dir=run"}
        words = [own.get(word, word) for word in commands()[service]]
        if name:
            words = [name if word == "server-0" else word for word in words]
        name = name or service
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.through.get(name, []), str(BIN / words[0]), *words[1:], *more],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, condition: Callable[[], bool], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            told = "\n".join(f"== {name}\n{self.log(name)[-1500:]}" for name in self.running)
            assert all(p.poll() in (None, 0) for p in self.running.values()), told
            assert time.monotonic() < deadline, told
            time.sleep(0.1)

    def says(self, name: str, text: str) -> None:
        self.until(lambda: text in self.log(name))

    def finish(self) -> None:
        self.until(lambda: all(p.poll() is not None for p in self.running.values()))

    def kill(self, name: str) -> None:
        """With -9, and forget it."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def rows(self) -> list[dict]:
        return rows_in(self.folder / "run/metrics.jsonl")


def rows_in(metrics: Path) -> list[dict]:
    """Those that are whole: a learner may be writing another."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Processes:
    """Those that work in a run's folder, by what they are."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def all(self) -> dict[int, str]:
        """Process id → what it is."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if os.readlink(entry / "cwd") != self._folder:
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found[int(entry.name)] = self._kind(words)
        return found

    def _kind(self, words: list[str]) -> str:
        if words[0].startswith("VLLM::"):
            return "engine core" if "Core" in words[0] else "engine worker"
        if "--nproc-per-node" in words:
            return "torchrun"
        program = words[words.index("-m") + 1] if "-m" in words else ""
        return PROGRAMS.get(program, "helper")


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    found = Services(folder)
    try:
        yield found
    finally:
        for process in found.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def loaded_versions(log: str) -> list[int]:
    """Those that a rollout server took, in the order in which it did."""
    return [int(version) for version in re.findall(r"sync: version (\d+): staged", log)]


def assert_trained_once(folder: Path, groups: int, prompts: int) -> list[int]:
    """Of a run that is over: that every group was trained once, every prompt once an epoch, and none is lost.

    Args:
        groups: Of all its batches.
        prompts: Of an epoch.

    Returns:
        The epochs that were over.
    """
    found = inspect(folder / "run")["prompts"]
    states = sum(map(Counter, found.values()), Counter[str]())
    assert states["batched"] + states["trained"] == groups, "every group trained once"
    assert "leased" not in states, "whose lease is over, waits or is trained"
    drawn = {epoch: sum(states.values()) for epoch, states in found.items()}
    assert sorted(drawn) == list(range(len(drawn)))
    assert set(list(drawn.values())[:-1]) <= {prompts}, f"the place in the data: {drawn}"
    over = sorted(found)[:-2]  # the last epochs are still under way
    for epoch in over:
        assert found[epoch] == {"trained": prompts}, f"epoch {epoch}: every prompt exactly once"
    return over
