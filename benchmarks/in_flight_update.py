"""What becomes of running completions when a version comes in: keep, recompute, abort, or drain first.

    python benchmarks/in_flight_update.py [--steps 25] [--plot-only]

The same run on two pinned cores under each value of `rollout.on_update`, and once with a server that ends
what it runs before it loads (`draining_server.py`). Completions are long enough that several versions land
in one. Writes benchmarks/results/in_flight_update.json and its picture in docs/pictures/. Let nothing else
run meanwhile.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pinned_runs
from pinned_runs import experiment, learner_times, run, server_times, step_seconds
from record import RESULTS, write_result

from launch.experiment import WholeExperiment
from launch.supervisor import Service

MODES = ("keep", "recompute", "abort", "drain")
LAST = 5
"""Steps that the final reward is the mean of."""
PICTURE = Path("docs/pictures/in_flight_update.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=144)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--plot-only", action="store_true", help="from what is recorded")
    options = parser.parse_args()
    if options.plot_only:
        draw(json.loads((RESULTS / "in_flight_update.json").read_text())["runs"])
        return
    runs = {mode: one(mode, options) for mode in MODES}
    settings = {name: vars(options)[name] for name in ("steps", "tokens", "rate")}
    write_result("in_flight_update", {"settings": settings, "max_staleness": 2, "runs": runs})
    draw(runs)


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


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """The server's tokens a second and the final reward, a bar for each way."""
    from launch.plots import BLUE, GREEN, STYLE, plt

    speeds = [made["server"]["tokens_per_s"] for made in runs.values()]
    rewards = [made["reward_last"] for made in runs.values()]
    panels = (
        ("tokens/s", BLUE, speeds, "{:,.0f}"),
        (f"reward of the last {LAST} steps", GREEN, rewards, "{:.3f}"),
    )
    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10}):
        figure, columns = plt.subplots(1, 2, sharey=True, layout="constrained", figsize=(8, 1.8))
        for axes, (title, color, values, form) in zip(columns, panels, strict=True):
            bars = axes.barh(list(runs), values, color=color, height=0.7)
            axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
            axes.set_title(title)
            axes.set_xlim(0, 1.15 * max(values))
            axes.grid(axis="y", visible=False)
        columns[0].invert_yaxis()
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
