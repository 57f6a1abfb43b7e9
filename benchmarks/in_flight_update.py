"""What becomes of running completions when a version comes in: keep, recompute, abort, or drain first.

    python benchmarks/in_flight_update.py [--rounds 3] [--steps 25] [--plot-only]

The same run on two pinned cores under each value of `rollout.on_update`, and once with a server that ends
what it runs before it loads (`draining_server.py`); in turns, every round from the other end. Completions are
long enough that several versions land in one. Goes on from the rounds of the same settings and machine that
benchmarks/results/in_flight_update.json has, and draws docs/pictures/in_flight_update.png. Let nothing else
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
from record import RESULTS, machine, write_result

from launch.experiment import WholeExperiment
from launch.supervisor import Service

MODES = ("keep", "recompute", "abort", "drain")
Round = dict[str, dict[str, Any]]
LAST = 5
"""Steps that the final reward is the mean of."""
PICTURE = Path("docs/pictures/in_flight_update.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=144)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--plot-only", action="store_true", help="from what is recorded")
    options = parser.parse_args()
    recorded = json.loads((RESULTS / "in_flight_update.json").read_text())
    if options.plot_only:
        draw(recorded["rounds"])
        return
    settings = {name: vars(options)[name] for name in ("steps", "tokens", "rate")}
    same = recorded["settings"] == settings and recorded["machine"] == machine()
    rounds: list[Round] = recorded["rounds"] if same else []
    while len(rounds) < options.rounds:
        turns = MODES[::-1] if len(rounds) % 2 else MODES
        made = {mode: one(mode, options) for mode in turns}
        rounds.append({mode: made[mode] for mode in MODES})
        write_result("in_flight_update", {"settings": settings, "max_staleness": 2, "rounds": rounds})
    draw(rounds)


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


def draw(rounds: list[Round]) -> None:
    """The server's tokens a second and the final reward: a bar for each way, a dot for each run of it."""
    from launch.plots import BLUE, GREEN, STYLE, plt

    panels = (
        ("tokens/s", BLUE, [[r[m]["server"]["tokens_per_s"] for r in rounds] for m in MODES], "{:,.0f}"),
        (
            f"reward of the last {LAST} steps",
            GREEN,
            [[r[m]["reward_last"] for r in rounds] for m in MODES],
            "{:.3f}",
        ),
    )
    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10}):
        figure, columns = plt.subplots(1, 2, sharey=True, layout="constrained", figsize=(8, 1.8))
        for axes, (title, color, values, form) in zip(columns, panels, strict=True):
            means = [statistics.fmean(found) for found in values]
            bars = axes.barh(MODES, means, color=color, height=0.7)
            for mode, found in zip(MODES, values, strict=True):
                axes.plot(found, [mode] * len(found), ".", color="black", markersize=4)
            inside = [form.format(mean) for mean in means]
            axes.bar_label(bars, inside, padding=5, fontsize=8, label_type="center", color="white")
            axes.set_title(title)
            axes.set_xlim(0, 1.05 * max(max(found) for found in values))
            axes.grid(axis="y", visible=False)
        columns[0].invert_yaxis()
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
