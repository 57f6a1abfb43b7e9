"""Does asynchrony pay what it can? Step time of synchronous and asynchronous runs against both sides alone.

    python benchmarks/async_speedup.py [--steps 18]

On two cores, one for the learner and one for the rollout server: first each side alone (`slipstream
measure`), for the seconds Tg and Tt that a batch takes; then whole runs at `max_staleness` 0, which is
synchronous, 1, 2 and 4. The ideal speed-up over one after the other is (Tg + Tt) / max(Tg, Tt). Two busy
cores share cache, memory and clock: what is lost by that alone shows when both sides run at once with
nothing between them. All of it is done twice, one round after the other, because the machine itself is
faster at one time than at another.

The same runs are what the simulation of `slipstream tune` is held against: what it foretells of every
setting out of what each side took alone, and out of the metrics of the run at `max_staleness` 1, as tune has
it. Completions end by themselves, so that groups are not equally long.

Goes on from the runs of as many steps that are whole in runs/pinned/; remove them to begin anew. Writes
benchmarks/results/async_speedup.json and its picture in docs/pictures/. Let nothing else run meanwhile.
"""

import argparse
import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

from pinned_runs import (
    FOLDER,
    WARM_UP,
    experiment,
    learner_times,
    make_model,
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

SETTINGS = ((1, 16, 8), (0, 16, 8), (2, 16, 8), (4, 16, 8), (2, 8, 8), (1, 16, 4))
"""max_staleness, groups a batch, groups in hand. The first is the one that the others are foretold from; the
first four are compared with each other, and the others are there for the simulation."""
ROUNDS = 2
TARGET = 0.9
SEEDS = 16
"""Of a simulation, whose mean is told."""
WORDS = 32
"""Tokens, of which one is the end mark: completions have about as many, and are cut at 96."""
PICTURE = Path("docs/pictures/async_speedup.png")
PARTS = {"trains": "#3b6fb6", "generates": "#4c9a6a", "publishes, pauses": "#d98c2b", "waits": "#d0d4da"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--plot-only", action="store_true", help="from what is recorded")
    options = parser.parse_args()
    if options.plot_only:
        draw(json.loads((RESULTS / "async_speedup.json").read_text()))
        return
    rounds = [one_round(number, options.steps) for number in range(ROUNDS)]
    found = {"target_of_ideal": TARGET, "steps": options.steps, **mean_of(rounds), "rounds": rounds}
    write_result("async_speedup", found)
    draw(found)
    print(table(found))


def one_round(number: int, steps: int) -> dict[str, Any]:
    of_alone = varied(f"alone-{number}", steps)
    alone = run_alone(of_alone, steps)
    together = run_together(of_alone, 2 * steps)
    print(
        f"Tg {alone.generate:.2f} s, Tt {alone.train:.2f} s; at once and unconnected {together}", flush=True
    )
    costs: Costs | None = None
    runs = []
    for setting in SETTINGS:
        made, own = one(number, *setting, steps, alone, costs)
        costs = costs or own
        runs.append(made)
        print(made, flush=True)
    return {
        "generate_seconds": alone.generate,
        "train_seconds": alone.train,
        "generate_seconds_at_once": together[0],
        "train_seconds_at_once": together[1],
        "costs": recorded(alone.costs),
        "runs": runs,
    }


def varied(name: str, steps: int, **changes: dict[str, Any]) -> WholeExperiment:
    """Groups of lengths of their own; each batch is trained twice, so that both sides take about as long."""
    model = {"path": str(make_model(FOLDER / "varied", vocabulary=WORDS))}
    data = {"train": {"kind": "function", "path": "async_speedup:rows"}}
    made = experiment(name, steps, model=model, data=data, **changes)
    learner = made.learner.model_copy(update={"updates_per_batch": 2})
    return made.model_copy(update={"learner": learner})


def rows() -> list[dict[str, Any]]:
    chance = random.Random(1)
    return [{"prompt": " ".join(f"t{chance.randrange(3, WORDS)}" for _ in range(4))} for _ in range(120)]


def mean_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What is compared, over all rounds; errors are those of the means."""
    seconds = {key: statistics.fmean(r[key] for r in rounds) for key in rounds[0] if key.endswith("_seconds")}
    at_once = [statistics.fmean(r[f"{key}_at_once"] for r in rounds) for key in seconds]
    both, slower = sum(seconds.values()), max(seconds.values())
    runs = [mean_of_runs(runs) for runs in zip(*(r["runs"] for r in rounds), strict=True)]
    (synchronous,) = (run["step_seconds"] for run in runs if not run["max_staleness"])
    for run in runs:
        if run["max_staleness"] and size_of(run) == size_of(runs[0]):
            run["speedup"] = round(synchronous / run["step_seconds"], 3)
            run["of_ideal"] = round(run["speedup"] * slower / both, 3)
    return {
        **{key: round(value, 3) for key, value in seconds.items()},
        "ideal_speedup": round(both / slower, 3),
        "unconnected_of_ideal": round(slower / max(at_once), 3),
        "runs": runs,
    }


def mean_of_runs(runs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The same setting in every round."""
    mean = {key: statistics.fmean(r[key] for r in runs) for key in ("step_seconds", "staleness_mean")}
    of = {key: runs[0][key] for key in ("max_staleness", "groups", "in_hand")}
    of |= {key: round(value, 3) for key, value in mean.items()}
    for side in ("learner", "server"):
        of[side] = {k: round(statistics.fmean(r[side][k] for r in runs), 3) for k in runs[0][side]}
    for source in ("from_alone", "from_run"):
        told = {key: statistics.fmean(r[source][key] for r in runs) for key in mean}
        of[source] = {key: round(value, 3) for key, value in told.items()}
        of[source]["rate_error"] = round(mean["step_seconds"] / told["step_seconds"] - 1, 3)
        age = mean["staleness_mean"]
        of[source]["staleness_error"] = round(told["staleness_mean"] / age - 1, 3) if age else 0.0
    return of


def size_of(run: dict[str, Any]) -> tuple[int, int]:
    return run["groups"], run["in_hand"]


def recorded(costs: Costs) -> dict[str, Any]:
    of = dataclasses.asdict(costs)
    return {key: quantiles(value) if isinstance(value, tuple) else value for key, value in of.items()}


def quantiles(values: tuple[float, ...], count: int = 32) -> list[float]:
    """The distribution in that many numbers."""
    ordered = sorted(values)
    return [round(ordered[int((i + 0.5) * len(ordered) / count)], 4) for i in range(count)]


def one(
    number: int, staleness: int, groups: int, in_hand: int, steps: int, alone: Alone, of_first: Costs | None
) -> tuple[dict[str, Any], Costs]:
    """What a run of a round came to and what was foretold, and what it cost by its own metrics, which stand
    for the first run's where this is it."""
    e = varied(
        f"staleness-{number}-{staleness}-{groups}-{in_hand}",
        steps,
        buffer={"max_staleness": staleness, "groups_per_batch": groups},
        rollout={"max_groups": in_hand},
    )
    found = run_or_kept(e)
    own = costs_of(e, alone.costs.contention)
    made = {
        "max_staleness": staleness,
        "groups": groups,
        "in_hand": in_hand,
        "step_seconds": round(step_seconds(found), 3),
        "staleness_mean": round(statistics.fmean(r["staleness/mean"] for r in found), 3),
        "arrival_seconds": [round(r["sync/arrival_seconds"], 3) for r in found],
        "learner": learner_times(found),
        "server": server_times(e, found),
        "from_alone": simulated(e, alone.costs),
        "from_run": simulated(e, of_first or own),
    }
    return made, own


def costs_of(e: WholeExperiment, contention: float) -> Costs:
    """By what the run wrote, but for contention, which one with all places taken cannot tell."""
    history = History(Path(e.run_dir))
    history.refresh()
    decoded = decoded_groups(e.rollout)
    work, pace = work_and_pace(history, contention, decoded)
    return dataclasses.replace(calibrate(history, decoded), work=work, pace=pace, contention=contention)


def simulated(e: WholeExperiment, costs: Costs) -> dict[str, float]:
    """As many steps as were made: seconds of one, and mean staleness."""
    setting = setting_of(e.buffer, e.rollout, 1, e.buffer.max_staleness, e.buffer.groups_per_batch)
    assert setting is not None
    steps = e.learner.steps - WARM_UP
    made = [simulate(costs, setting, steps, WARM_UP, seed) for seed in range(SEEDS)]
    rate = statistics.fmean(m.groups_per_second for m in made) / e.buffer.groups_per_batch
    age = statistics.fmean(m.staleness_mean for m in made)
    return {"step_seconds": round(1 / rate, 3), "staleness_mean": round(age, 3)}


def table(found: dict[str, Any]) -> str:
    """A line for each setting; errors are of what was foretold from both sides alone, and from one run."""
    lines = ["bound groups in_hand | s/step  speed-up  of ideal |   rate error  | staleness      error"]
    for made in found["runs"]:
        told = [made["from_alone"], made["from_run"]]
        gained = (f"{made[key]:.2f}" if key in made else "–" for key in ("speedup", "of_ideal"))
        errors = {k: " ".join(f"{t[k]:+6.1%}" for t in told) for k in ("rate_error", "staleness_error")}
        lines.append(
            f"{made['max_staleness']:5} {made['groups']:6} {made['in_hand']:7} | {made['step_seconds']:6.2f}"
            f"  {next(gained):>8}  {next(gained):>8} | {errors['rate_error']} | "
            f"{made['staleness_mean']:9.2f}  {errors['staleness_error']}"
        )
    return "\n".join(lines)


def draw(found: dict[str, Any]) -> None:
    """Where a step's seconds go: a bar for the learner and one for the server, by staleness."""
    from launch.plots import STYLE, plt

    runs = sorted(
        (r for r in found["runs"] if size_of(r) == size_of(found["runs"][0])),
        key=lambda r: r["max_staleness"],
    )
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
