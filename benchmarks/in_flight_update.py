"""What becomes of running completions when a version comes in: keep, recompute, abort, or drain first.

    python benchmarks/in_flight_update.py [--steps 25]

The same run on two pinned cores under each value of `rollout.on_update`, and once with a server that ends
what it runs before it loads (`draining_server.py`). Completions are long enough that several versions land
in one. Writes benchmarks/results/in_flight_update.json. Let nothing else run meanwhile.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pinned_runs
from pinned_runs import experiment, learner_times, run, server_times, step_seconds
from record import write_result

from launch.experiment import WholeExperiment
from launch.supervisor import Service

MODES = ("keep", "recompute", "abort", "drain")
LAST = 5
"""Steps that the final reward is the mean of."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=144)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    runs = {mode: one(mode, options) for mode in MODES}
    write_result("in_flight_update", {"settings": vars(options), "max_staleness": 2, "runs": runs})


def one(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    base = experiment("base", options.steps)
    sampling = base.rollout.sampling.model_copy(update={"max_tokens": options.tokens})
    e = experiment(
        f"update-{mode}",
        options.steps,
        model={"max_length": options.tokens + 16},
        buffer={"max_staleness": 2, "groups_per_batch": 4},
        rollout={"sampling": sampling, "on_update": "keep" if mode == "drain" else mode},
        learner={"optimizer": {"lr": options.rate}},
    )
    found = run(e, draining if mode == "drain" else pinned_runs.plan)
    rewards = [r["reward/mean"] for r in found]
    made = {
        "step_seconds": round(step_seconds(found), 3),
        "samples_per_s": round(found[0]["samples"] / step_seconds(found), 2),
        "reward_last": round(statistics.fmean(rewards[-LAST:]), 3),
        "rewards": [round(r, 3) for r in rewards],
        "staleness_mean": round(statistics.fmean(r["staleness/mean"] for r in found), 3),
        "kl_k3": round(statistics.fmean(r["kl/k3"] for r in found), 5),
        "learner": learner_times(found),
        "server": server_times(e, found),
    }
    print(mode, made, flush=True)
    return made


def draining(e: WholeExperiment, config: Path) -> list[Service]:
    server = str(Path(__file__).with_name("draining_server.py"))
    planned = pinned_runs.plan(e, config)
    return [replace(s, command=_script(s.command, server)) if s.role == "rollout" else s for s in planned]


def _script(command: list[str], script: str) -> list[str]:
    """`… python -m rollout CONFIG …` with the script in the module's place."""
    at = command.index(sys.executable)
    return [*command[: at + 1], script, *command[at + 3 :]]


if __name__ == "__main__":
    main()
