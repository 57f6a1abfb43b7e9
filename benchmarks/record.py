"""How a benchmark keeps what it measured: one JSON file per claim, with the machine it ran on."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write and print `results/NAME.json`: the figures, and of when and what they are."""
    result = {
        "benchmark": name,
        **stamp(),
        **{k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()},
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return path


def stamp() -> dict[str, str]:
    """The day, the code, and the processor with its cores."""
    return {"date": datetime.date.today().isoformat(), "commit": _commit(), "machine": machine()}


def _commit() -> str:
    """`+` behind it: with changes of the working tree."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no git"


def machine() -> str:
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
