"""Does asynchrony pay what it can? Step time of synchronous and asynchronous runs against both sides alone.

    python benchmarks/async_speedup.py [--steps 30]

On two cores, one for the learner and one for the rollout server: first each side alone (`slipstream
measure`), for the seconds Tg and Tt that a batch takes; then whole runs at `max_staleness` 0, which is
synchronous, 1, 2 and 4. The ideal speed-up over one after the other is (Tg + Tt) / max(Tg, Tt). Two busy
cores share cache, memory and clock: what is lost by that alone shows when both sides run at once with
with nothing between them. The same runs are what the simulation of `slipstream tune` is held against: as
foretold from what each side takes alone, and as replayed with what each run's own metrics say that it cost.

Goes on from the runs of as many steps that are whole in runs/pinned/; remove them to begin anew. Writes
benchmarks/results/async_speedup.json and its picture in docs/pictures/. Let nothing else run meanwhile.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from pinned_runs import (
    WARM_UP,
    experiment,
    learner_times,
    run_alone,
    run_or_kept,
    run_together,
    server_times,
    step_seconds,
)
from record import RESULTS, write_result

from launch.calibration import Alone, calibrate, work_and_pace
from launch.experiment import WholeExperiment
from launch.history import History
from launch.simulation import Costs, simulate
from launch.tuning import decoded_groups, setting_of

SETTINGS = ((0, 16, 8), (1, 16, 8), (2, 16, 8), (4, 16, 8), (2, 8, 8), (1, 16, 4))
"""max_staleness, groups a batch, groups in hand. The first ones are compared with each other, and the others
are there for the simulation."""
TARGET = 0.9
SEEDS = 16
"""Of a simulation, whose mean is told."""
PICTURE = Path("docs/pictures/async_speedup.png")
PARTS = {"trains": "#3b6fb6", "generates": "#4c9a6a", "publishes, pauses": "#d98c2b", "waits": "#d0d4da"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot-only", action="store_true", help="from what is recorded")
    options = parser.parse_args()
    if options.plot_only:
        draw(json.loads((RESULTS / "async_speedup.json").read_text()))
        return
    alone = run_alone(experiment("alone", options.steps), options.steps)
    ideal = (alone.generate + alone.train) / max(alone.generate, alone.train)
    print(f"Tg {alone.generate:.2f} s, Tt {alone.train:.2f} s, ideal {ideal:.2f}", flush=True)
    print(recorded(alone.costs), flush=True)
    together = run_together(experiment("alone", options.steps), 2 * options.steps)
    print("at once and unconnected:", together, flush=True)
    runs = [one(*setting, options.steps, alone) for setting in SETTINGS]
    for made in runs:
        same = [r for r in runs if (r["groups"], r["in_hand"]) == (made["groups"], made["in_hand"])]
        synchronous = next((r["step_seconds"] for r in same if not r["max_staleness"]), None)
        if synchronous is not None and made["max_staleness"]:
            made["speedup"] = round(synchronous / made["step_seconds"], 3)
            made["of_ideal"] = round((alone.generate + alone.train) / made["step_seconds"] / ideal, 3)
    found = {
        "generate_seconds": alone.generate,
        "train_seconds": alone.train,
        "ideal_speedup": ideal,
        "at_once_unconnected": dict(zip(("generate_seconds", "train_seconds"), together, strict=True)),
        "unconnected_of_ideal": round(max(alone.generate, alone.train) / max(together), 3),
        "target_of_ideal": TARGET,
        "costs": recorded(alone.costs),
        "steps": options.steps,
        "runs": runs,
    }
    write_result("async_speedup", found)
    draw(found)
    print(table(found))


def recorded(costs: Costs) -> dict[str, Any]:
    of = dataclasses.asdict(costs)
    return {key: quantiles(value) if isinstance(value, tuple) else value for key, value in of.items()}


def quantiles(values: tuple[float, ...], count: int = 32) -> list[float]:
    """The distribution in that many numbers."""
    ordered = sorted(values)
    return [round(ordered[int((i + 0.5) * len(ordered) / count)], 4) for i in range(count)]


def one(staleness: int, groups: int, in_hand: int, steps: int, alone: Alone) -> dict[str, Any]:
    e = experiment(
        f"staleness-{staleness}-{groups}-{in_hand}",
        steps,
        buffer={"max_staleness": staleness, "groups_per_batch": groups},
        rollout={"max_groups": in_hand},
    )
    found = run_or_kept(e)
    ages = [r["staleness/mean"] for r in found]
    own = costs_of(e, alone.costs.contention)
    seconds, age = step_seconds(found), statistics.fmean(ages)
    made = {
        "max_staleness": staleness,
        "groups": groups,
        "in_hand": in_hand,
        "step_seconds": round(seconds, 3),
        "samples_per_s": round(found[0]["samples"] / seconds, 2),
        "staleness_mean": round(age, 3),
        "staleness_of_steps": [round(a, 3) for a in ages],
        "arrival_seconds": [round(r["sync/arrival_seconds"], 3) for r in found],
        "learner": learner_times(found),
        "server": server_times(e, found),
        "predicted": simulated(e, alone.costs, seconds, age),
        "replayed": simulated(e, own, seconds, age),
    }
    print(made, flush=True)
    return made


def costs_of(e: WholeExperiment, contention: float) -> Costs:
    """By what the run wrote, but for contention, which one with all places taken cannot tell."""
    history = History(Path(e.run_dir))
    history.refresh()
    decoded = decoded_groups(e.rollout)
    work, pace = work_and_pace(history, contention, decoded)
    return dataclasses.replace(calibrate(history, decoded), work=work, pace=pace, contention=contention)


def simulated(e: WholeExperiment, costs: Costs, seconds: float, age: float) -> dict[str, float]:
    """As many steps as were made, and how far off what was measured: seconds of a step and mean staleness."""
    setting = setting_of(e.buffer, e.rollout, 1, e.buffer.max_staleness, e.buffer.groups_per_batch)
    assert setting is not None
    steps = e.learner.steps - WARM_UP
    made = [simulate(costs, setting, steps, WARM_UP, seed) for seed in range(SEEDS)]
    rate = statistics.fmean(m.groups_per_second for m in made) / e.buffer.groups_per_batch
    told = statistics.fmean(m.staleness_mean for m in made)
    return {
        "step_seconds": round(1 / rate, 3),
        "rate_error": round(rate * seconds - 1, 3),
        "staleness_mean": round(told, 3),
        "staleness_error": round((told - age) / max(age, 1e-9), 3),
    }


def table(found: dict[str, Any]) -> str:
    """A line for each setting; errors are of what was foretold from both sides alone, and of the replay."""
    lines = ["bound groups in_hand | s/step  speed-up  of ideal |   rate error  | staleness      error"]
    for made in found["runs"]:
        told, again = made["predicted"], made["replayed"]
        gained = (f"{made[key]:.2f}" if key in made else "–" for key in ("speedup", "of_ideal"))
        errors = {key: f"{told[key]:+6.1%} {again[key]:+6.1%}" for key in ("rate_error", "staleness_error")}
        lines.append(
            f"{made['max_staleness']:5} {made['groups']:6} {made['in_hand']:7} | {made['step_seconds']:6.2f}"
            f"  {next(gained):>8}  {next(gained):>8} | {errors['rate_error']} | "
            f"{made['staleness_mean']:9.2f}  {errors['staleness_error']}"
        )
    return "\n".join(lines)


def draw(found: dict[str, Any]) -> None:
    """Where a step's seconds go: a bar for the learner and one for the server, by staleness."""
    from launch.plots import STYLE, plt

    size = found["runs"][0]["groups"], found["runs"][0]["in_hand"]
    runs = [r for r in found["runs"] if (r["groups"], r["in_hand"]) == size]
    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10}):
        figure, axes = plt.subplots(layout="constrained", figsize=(8, 0.75 * len(runs) + 0.9))
        ticks = {}
        for place, made in enumerate(reversed(runs)):
            step, learner, server = made["step_seconds"], made["learner"], made["server"]
            empty = server["without_group"] * step
            learns = learner["forward_backward"] + learner["optimizer"]
            publishes = learner["publish"] + learner["wait_loaded"]
            generates = step - empty - server["pause"]
            bars = {
                f"learner, {made['max_staleness']}": (learns, 0.0, publishes, learner["wait_batch"]),
                f"server, {made['max_staleness']}": (0.0, generates, server["pause"], empty),
            }
            for row, (name, parts) in enumerate(bars.items()):
                at = 2.4 * place + 1 - row
                ticks[at] = name
                start = 0.0
                for seconds, (label, color) in zip(parts, PARTS.items(), strict=True):
                    told = label if not place and not row else None
                    axes.barh(at, seconds, left=start, color=color, label=told, height=0.9)
                    start += seconds
        axes.axvline(max(found["generate_seconds"], found["train_seconds"]), color="black", linestyle=":")
        axes.set_yticks(list(ticks), ticks.values())
        axes.set_xlabel("seconds of a step; dotted: the slower side alone")
        axes.set_title("by max_staleness")
        axes.grid(axis="y", visible=False)
        figure.legend(fontsize=8, loc="outside right center")
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
