"""Does a language model learn the demo's task from old tokens, and in less time? Real services, by the clock.

    python benchmarks/stale_demo.py [--staleness 0 8] [--seeds 1]

`configs/demo.yaml` at each `max_staleness`, the learner on one core and the rollout server on the other, the
same number of versions. Writes benchmarks/results/stale_demo.json. Let nothing else run meanwhile.
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pinned_runs
from record import write_result

from launch import local
from launch.experiment import read
from launch.history import History

GOAL = 0.6
"""Training reward, as a mean of three steps, whose time is told."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    runs = [one(s, seed, options.steps) for seed in options.seeds for s in options.staleness]
    write_result("stale_demo", {"goal": GOAL, "steps": options.steps, "runs": runs})


def one(staleness: int, seed: int, steps: int) -> dict[str, Any]:
    folder = Path(f"runs/stale_demo/{staleness}-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    changes = [
        f"run_dir={folder}", f"seed={seed}", f"learner.steps={steps}", f"buffer.max_staleness={staleness}",
        "learner.checkpoint.every=1000", "learner.checkpoint.export=false", "learner.threads=1",
        f"rollout.engine.cores={pinned_runs.ROLLOUT_CORE}", "buffer.address=tcp://127.0.0.1:0",
        "sync.address=tcp://127.0.0.1:0",
    ]  # fmt: skip
    e = read("configs/demo.yaml", changes)
    with pinned_runs.console_of(e) as console:
        if local.run(e, "benchmark", console, pinned_runs.plan):
            sys.exit(f"{folder}: the run failed; see {folder}/logs")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    began = rows[0]["time"] - rows[0]["time/step"]
    curve = [(round(r["time"] - began, 1), round(r["reward/mean"], 3)) for r in rows]
    smooth = [statistics.fmean(r for _, r in curve[max(0, i - 2) : i + 1]) for i in range(len(curve))]
    history = History(folder)
    history.refresh()
    made: dict[str, Any] = {
        "max_staleness": staleness,
        "seed": seed,
        "seconds": curve[-1][0],
        "seconds_to_goal": next((t for (t, _), s in zip(curve, smooth, strict=True) if s >= GOAL), None),
        "held_out": {str(v): round(score["score"], 3) for v, score in sorted(history.scores.items())},
        "staleness_mean": round(statistics.fmean(r["staleness/mean"] for r in rows), 2),
        "ess_mean": round(statistics.fmean(r["ess"] or 1.0 for r in rows), 3),
        "mask_fraction": round(statistics.fmean(r["mask_fraction"] for r in rows), 4),
        "curve": curve,
    }
    print(made, flush=True)
    return made


if __name__ == "__main__":
    main()
