"""Where does training on old tokens end, once it has ended? Runs whose learning rate falls to zero.

    python benchmarks/staleness_plateau.py [--recorded]

The task, the learner's step and the exact staleness of `staleness_harness.py`. Stated before the first run:
240 versions, the rate warmed up over five to 1e-4 and then falling as a cosine to 0, staleness 0 and 8, three
seeds, as many samples for all. So every run comes to rest, and the last version's score is its final one:
the mean probability of the right answer of 400 unseen prompts, which no draw is in.

How long they take is not measured here: a version counts as many seconds as it took the real services of
`async_speedup.py`. Goes on from runs/staleness_plateau.jsonl. Writes
benchmarks/results/staleness_plateau.json and its picture in docs/pictures/.
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from record import RESULTS, write_result
from staleness_curves import METHODS, START, compact, save_small
from staleness_harness import Size, start_model, train

from learner import parallel
from learner.commandline import quiet_megatron
from learner.config import ParallelConfig

KEPT = Path("runs/staleness_plateau.jsonl")
PICTURE = Path("docs/pictures/staleness_plateau.png")
RATE = 1e-4
SIZE = Size(steps=240, evaluate_every=10, schedule="cosine")
SEEDS = (1, 2, 3)
RUNS = (("decoupled", 0), ("decoupled", 8), ("taper", 8), ("none", 8))
"""At 0 every ρ is 1, and the taper does nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recorded", action="store_true", help="seconds and picture anew, of recorded runs")
    if parser.parse_args().recorded:
        kept = json.loads((RESULTS / "staleness_plateau.json").read_text())["runs"]
        tell([run | {"chance": [float(p) for p in run["chance"].split()]} for run in kept], kept)
        return
    torch.set_num_threads(1)
    quiet_megatron()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    if not (START / "start.json").exists():
        (START / "start.json").write_text(json.dumps({"score": start_model(START)}))
    parallel.initialize(ParallelConfig(), seed=1)
    KEPT.parent.mkdir(exist_ok=True)
    runs = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    for seed in SEEDS:
        for method, staleness in RUNS:
            if any((r["method"], r["staleness"], r["seed"]) == (method, staleness, seed) for r in runs):
                continue
            made = {"method": method, "staleness": staleness, "seed": seed}
            made |= train(START, METHODS[method], RATE, staleness, seed, SIZE)
            print(made["method"], staleness, seed, made["chance"][-1], flush=True)
            runs.append(made)
            with KEPT.open("a") as file:
                file.write(json.dumps(made) + "\n")
    parallel.shutdown()
    runs.sort(key=lambda r: (RUNS.index((r["method"], r["staleness"])), r["seed"]))
    tell(runs, [compact({k: v for k, v in run.items() if k != "curve"}) for run in runs])


def tell(runs: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """Write the figures, with the runs as they are kept, and the picture."""
    figures = {
        "rate": RATE,
        "versions": SIZE.steps,
        "seconds_a_version": {str(s): seconds_a_version(s) for s in (0, 8)},
        "methods": {method: METHODS[method] for method, _ in RUNS},
        "table": [of_setting(method, staleness, runs) for method, staleness in RUNS],
        "runs": kept,
    }
    write_result("staleness_plateau", figures)
    draw(kept)


def of_setting(method: str, staleness: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Lowest, mean and highest of the seeds, and when their mean is level with what fresh tokens come to."""
    of = [r for r in runs if (r["method"], r["staleness"]) == (method, staleness)]
    finals = [r["chance"][-1] for r in of]
    fresh = [r["chance"] for r in runs if (r["method"], r["staleness"]) == RUNS[0]]
    told: dict[str, Any] = {"method": method, "staleness": staleness}
    told["final"] = [round(f, 3) for f in (min(finals), statistics.fmean(finals), max(finals))]
    for share in (0.9, 0.95, 0.98):
        goal = share * statistics.fmean(curve[-1] for curve in fresh)
        version = first_reaching(
            [statistics.fmean(p) for p in zip(*(r["chance"] for r in of), strict=True)], goal
        )
        told[f"to {share:g}"] = version and [version, round(version * seconds_a_version(staleness))]
    return told


def first_reaching(curve: list[float], goal: float) -> float | None:
    """The version at which a curve reaches a score, between evaluations as if it rose straight."""
    for at in range(1, len(curve)):
        if curve[at] >= goal:
            part = (goal - curve[at - 1]) / (curve[at] - curve[at - 1])
            return round(SIZE.evaluate_every * (at - 1 + part), 1)
    return None


def seconds_a_version(staleness: int) -> float:
    """Of the real services; above 1 the bound does not matter."""
    runs = json.loads((RESULTS / "async_speedup.json").read_text())["runs"]
    return max((r for r in runs if r["max_staleness"] <= staleness), key=lambda r: r["max_staleness"])[
        "step_seconds"
    ]


def draw(runs: list[dict[str, Any]]) -> None:
    """Score over versions, and over seconds: a line for each setting, the seeds' range around it."""
    from launch.plots import STYLE, plt

    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.4}):
        figure, panels = plt.subplots(1, 2, sharey=True, layout="constrained", figsize=(9, 3))
        for place, (method, staleness) in enumerate(RUNS):
            of = [r for r in runs if (r["method"], r["staleness"]) == (method, staleness)]
            curves = list(zip(*([float(p) for p in r["chance"].split()] for r in of), strict=True))
            versions = [SIZE.evaluate_every * i for i in range(len(curves))]
            for axes, unit in zip(panels, (1.0, seconds_a_version(staleness)), strict=True):
                color = f"C{place}"
                name = {"none": "no correction"}.get(method, method)
                at = [unit * v for v in versions]
                axes.plot(
                    at, [statistics.fmean(p) for p in curves], color=color, label=f"{staleness}, {name}"
                )
                low, high = ([of(p) for p in curves] for of in (min, max))
                axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        for axes, unit in zip(
            panels, ("versions", "seconds, if it were the services of async_speedup"), strict=True
        ):
            axes.set_xlabel(unit)
        panels[0].set_title("held-out score")
        panels[0].legend(title="staleness", loc="lower right", fontsize=7)
        save_small(figure, PICTURE)
        plt.close(figure)


if __name__ == "__main__":
    main()
