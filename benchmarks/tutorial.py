"""The tutorial's figures: run its pipeline and take them from the run folders.

    python benchmarks/tutorial.py [RUN_DIR]      again, it goes on where it was stopped

Writes `benchmarks/results/tutorial.json`, which docs/tutorial.md quotes. `seconds` is the whole command's
time, start of services included, and null where it was interrupted.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from record import write_result

from rollout.rewards import exact_number

HOME = Path(__file__).parents[1]


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorial")
    resumed = (HOME / run_dir).exists()
    started = time.monotonic()
    pipeline = [sys.executable, "-m", "launch", "pipeline", "configs/tutorial.yaml", f"run_dir={run_dir}"]
    subprocess.run(pipeline, cwd=HOME, check=True)
    seconds = None if resumed else round(time.monotonic() - started)
    folder = HOME / run_dir
    figures = {
        "sft": stage(folder / "sft", "eval/loss"),
        "reward": stage(folder / "reward", "eval/accuracy"),
        "rl": rl(folder / "rl"),
        "scores": json.loads((folder / "scores" / "evaluation" / "results.json").read_text()),
    }
    write_result("tutorial", {"seconds": seconds, **figures})


def stage(run_dir: Path, metric: str) -> dict[str, Any]:
    """A held-out figure of an offline stage, before its first step and after its last."""
    summary = json.loads((run_dir / "report" / "summary.json").read_text())
    before, after = summary["values"][metric]
    facts = {key: summary[key] for key in ("steps", "examples", "training_seconds")}
    return {"held_out": metric, "before": before, "after": after, **facts}


def rl(run_dir: Path) -> dict[str, Any]:
    """The held-out completions of the first and of the last version: each reward, and how they answer."""
    summary = json.loads((run_dir / "report" / "summary.json").read_text())
    versions: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with (run_dir / "eval.jsonl").open() as file:
        for row in map(json.loads, file):
            if row["kind"] == "completion":
                # Where the rule is no reward, what it would have said.
                row["reward_parts"].setdefault("answer", exact_number(row["completion"], row))
                versions[row["version"]].append(row)
    first, last = min(versions), max(versions)
    return {
        "steps": summary["steps"],
        "training_seconds": summary["training_seconds"],
        "staleness_mean": summary["staleness_mean"],
        "before": {"version": first, **measured(versions[first])},
        "after": {"version": last, **measured(versions[last])},
    }


def measured(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over prompts of the means of their completions, and standard errors over prompts."""
    figures: dict[str, Any] = {"completions": len(rows)}
    values = {
        "reward_model": [row["reward_parts"]["helpful"] for row in rows],
        "right": [row["reward_parts"]["answer"] for row in rows],
        "equation": [float("=" in row["completion"]) for row in rows],
    }
    for name, found in values.items():
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for row, value in zip(rows, found, strict=True):
            by_prompt[row["prompt"]].append(value)
        means = [statistics.mean(v) for v in by_prompt.values()]
        figures[name] = statistics.mean(means)
        figures[f"{name}_stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    return figures | {"answers": kinds(rows)}


def kinds(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many answers were equations or not, and right or not, and what the reward model said of them."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        form = "equation" if "=" in row["completion"] else "other"
        right = "right" if row["reward_parts"]["answer"] else "wrong"
        found[f"{form}, {right}"].append(row["reward_parts"]["helpful"])
    return {kind: {"count": len(v), "mean_score": statistics.mean(v)} for kind, v in sorted(found.items())}


if __name__ == "__main__":
    main()
