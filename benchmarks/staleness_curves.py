"""Does training on old tokens go wrong, and which correction keeps it right? Learning curves over staleness.

    python benchmarks/staleness_curves.py [--rates 2e-4 5e-5 1e-4] [--quick] [--plot-only]

Every correction of the learner at a staleness of exactly 0, 1, 2, 4, 8 and 16 versions, three seeds each
(`staleness_harness.py` has the task and how staleness is made exact). A run takes seconds on one core, and
what is done already is not done again, be it recorded or only kept in runs/staleness_curves.jsonl. Writes
benchmarks/results/staleness_curves.json, with every run that was made, and its picture in docs/pictures/.
"""

import argparse
import io
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from record import RESULTS, write_result
from staleness_harness import Size, start_model, train

from learner import parallel
from learner.commandline import quiet_megatron
from learner.config import ParallelConfig

KEPT = Path("runs/staleness_curves.jsonl")
RECORDED = RESULTS / "staleness_curves.json"
START = Path("runs/staleness_start")
PICTURE = Path("docs/pictures/staleness_curves.png")
STALENESS = (0, 1, 2, 4, 8, 16)
SEEDS = (1, 2, 3)
LAST = 4
"""Evaluations that the final score is the mean of."""

OPEN: dict[str, Any] = {"mask": "none", "veto": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"correction": {"weight": "none", **OPEN}},
    "ppo bypass": {"correction": {"kind": "bypass"}},
    "decoupled": {"correction": {"taper": False}},
    "decoupled, no mask": {"correction": OPEN},
    "interpolated": {"correction": {"proximal": "interpolated"}},
    "token cap 2": {"correction": {"cap": 2.0, **OPEN}},
    "token cap 2, normalized": {"correction": {"cap": 2.0, "normalize": True, **OPEN}},
    "sequence cap 5": {"correction": {"weight": "sequence", "cap": 5.0, **OPEN}},
    "geometric weight": {"correction": {"weight": "geometric", **OPEN}},
    "taper": {"correction": {"taper": True}},
    "taper, no mask": {"correction": {"taper": True, "mask": "none"}},
    "taper sequence, no mask": {"correction": {"weight": "sequence", "taper": True, "mask": "none"}},
    "mask sequence": {"correction": {"mask": "sequence"}},
    "mask geometric": {"correction": {"mask": "geometric", "mask_low": 0.8, "mask_high": 1.25}},
    "cispo bypass": {"loss": "cispo", "correction": {"kind": "bypass"}},
    "gspo": {"loss": "gspo"},
    "dppo": {"loss": "dppo", "correction": {"kind": "bypass"}},
    "m2po": {"loss": "m2po", "correction": {"kind": "bypass"}},
}
"""`none` is PPO that takes every token for the policy's own, which a run's configuration refuses where
tokens may be stale. A file without a word about it gets `decoupled`, and `taper` where they may be more than
2 versions old."""
MAIN = ("none", "ppo bypass", "decoupled", "taper")
"""At every staleness; at 0 a taper does nothing, and its curves are those of `decoupled`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 5e-5, 1e-4])
    parser.add_argument("--quick", action="store_true", help="one seed, few settings, nothing recorded")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then record what is done")
    parser.add_argument("--seed", type=int, help="this one's runs, recording nothing: a share for one core")
    parser.add_argument("--plot-only", action="store_true", help="from what is recorded")
    options = parser.parse_args()
    if options.plot_only:
        draw(json.loads(RECORDED.read_text()), PICTURE)
        return
    torch.set_num_threads(1)
    quiet_megatron()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    size = Size()
    if not (START / "start.json").exists():
        score = start_model(START)
        (START / "start.json").write_text(json.dumps({"score": score}))
    start = round(json.loads((START / "start.json").read_text())["score"], 4)
    parallel.initialize(ParallelConfig(), seed=1)
    KEPT.parent.mkdir(exist_ok=True)
    done = {key_of(r): r for r in recorded(start)}
    done |= {key_of(r): r for r in map(json.loads, KEPT.read_text().splitlines())} if KEPT.exists() else {}
    everything = grid(options.rates, options.quick)
    wanted = [run for run in everything if options.seed in (None, run["seed"])]
    deadline = time.monotonic() + 60 * options.minutes
    for number, run in enumerate(wanted):
        if key_of(run) in done or time.monotonic() > deadline:
            continue
        method, rate, staleness, seed = key_of(run)
        made = run | train(START, METHODS[method], rate, staleness, seed, size)
        del made["chance"]
        done[key_of(run)] = made
        with KEPT.open("a") as file:
            file.write(json.dumps(made) + "\n")
        tail = statistics.fmean(made["curve"][-LAST:])
        print(f"{number + 1}/{len(wanted)} {key_of(run)}: {tail:.3f} in {made['seconds']:.1f} s", flush=True)
    parallel.shutdown()
    if options.quick or options.seed is not None:
        return
    runs = sorted(done.values(), key=place)
    figures = {
        "task": "five digits backwards, reward 1 if all are right; a Llama of two layers taught before",
        "start_score": start,
        "batch": f"{size.groups} groups of {size.group_size}, {size.updates} updates, {size.steps} versions",
        "methods": METHODS,
        "table": table(runs),
        "runs": [compact(run) for run in runs],
    }
    write_result("staleness_curves", figures)
    draw(figures, PICTURE)


def grid(rates: list[float], quick: bool) -> list[dict[str, Any]]:
    """What tells most first: it may be cut off by the clock."""
    first, *calmer = rates
    others = [m for m in METHODS if m not in MAIN]
    if quick:
        return [{"method": m, "rate": first, "staleness": s, "seed": 1} for m in MAIN for s in (0, 8)]
    blocks = [([first], MAIN, STALENESS), (calmer, MAIN, (0, 8)), ([first], others, (8,))]
    blocks += [(calmer, MAIN, (1, 2, 4, 16)), ([first], others, (0, 16))]
    return [
        {"method": m, "rate": r, "staleness": s, "seed": n}
        for of, methods, ages in blocks
        for r in of
        for n in SEEDS
        for m in methods
        for s in ages
        if s or m != "taper"
    ]


def recorded(start: float) -> list[dict[str, Any]]:
    """The runs that are recorded, of corrections that are still what they were.

    Raises:
        SystemExit: They started from another model, so their scores do not compare.
    """
    if not RECORDED.exists():
        return []
    found = json.loads(RECORDED.read_text())
    if found["start_score"] != start:
        raise SystemExit(
            f"{RECORDED}: its runs started from a score of {found['start_score']}, and {START} has {start}; "
            "expected the same model; move the file away to make every run anew"
        )
    return [
        run | {"curve": [float(point) for point in run["curve"].split()]}
        for run in found["runs"]
        if found["methods"][run["method"]] == METHODS.get(run["method"])
    ]


def place(run: dict[str, Any]) -> tuple[float, int, int, int]:
    """In the order that they are recorded in: by rate, hottest first, correction, seed and staleness."""
    method, rate, staleness, seed = key_of(run)
    return -rate, list(METHODS).index(method), seed, staleness


def key_of(run: dict[str, Any]) -> tuple[str, float, int, int]:
    return run["method"], run["rate"], run["staleness"], run["seed"]


def final(run: dict[str, Any]) -> float:
    return statistics.fmean(run["curve"][-LAST:])


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method and rate, by staleness: lowest, mean and highest final score of the seeds, and by how
    many versions that mean is behind `decoupled` on fresh tokens."""
    rows = []
    for method, rate in dict.fromkeys((r["method"], r["rate"]) for r in runs):
        of = [r for r in runs if (r["method"], r["rate"]) == (method, rate)]
        told: dict[str, Any] = {"method": method, "rate": rate, "behind": {}}
        fresh = [
            r["curve"] for r in runs if (r["method"], r["rate"], r["staleness"]) == ("decoupled", rate, 0)
        ]
        for staleness in sorted({r["staleness"] for r in of}):
            finals = [final(r) for r in of if r["staleness"] == staleness]
            told[f"s{staleness}"] = [
                round(f, 3) for f in (min(finals), statistics.fmean(finals), max(finals))
            ]
            if staleness and fresh:
                told["behind"][f"s{staleness}"] = round(behind(statistics.fmean(finals), fresh))
        rows.append(told)
    return rows


def behind(score: float, fresh: list[list[float]]) -> float:
    """How many versions before the last ones the mean of the fresh runs' curves was at that score: along the
    nearest curve to it that never falls. A delay of s versions alone would be about s."""
    levels: list[tuple[float, int]] = []
    for points in zip(*fresh, strict=True):
        level, count = statistics.fmean(points), 1
        while levels and levels[-1][0] > level:
            before, many = levels.pop()
            level, count = (before * many + level * count) / (many + count), many + count
        levels.append((level, count))
    curve = [level for level, count in levels for _ in range(count)]
    every = Size().evaluate_every
    last = every * (len(curve) - 1 - (LAST - 1) / 2)
    for at in range(1, len(curve)):
        if curve[at] >= score:
            part = max(0.0, score - curve[at - 1]) / max(curve[at] - curve[at - 1], 1e-9)
            return last - every * (at - 1 + min(part, 1.0))
    return 0.0


def compact(run: dict[str, Any]) -> dict[str, Any]:
    """Three digits, and each curve as one text."""
    rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in run.items()}
    return {k: " ".join(f"{x:g}" for x in v) if isinstance(v, list) else v for k, v in rounded.items()}


def draw(figures: dict[str, Any], path: Path) -> None:
    """Held-out score over versions: a row for each rate, a column for each main method."""
    from launch.plots import STYLE, plt

    runs = figures["runs"]
    rates = list(dict.fromkeys(r["rate"] for r in runs))
    names = {"none": "no correction", "ppo bypass": "ppo, bypass"}
    every = Size().evaluate_every
    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.4}):
        figure, panels = plt.subplots(
            len(rates), len(MAIN), sharex=True, sharey=True, squeeze=False, layout="constrained",
            figsize=(11, 2.8 * len(rates)),
        )  # fmt: skip
        for row, rate in zip(panels, rates, strict=True):
            for axes, method in zip(row, MAIN, strict=True):
                for place, staleness in enumerate(STALENESS):
                    curves = [
                        [float(point) for point in r["curve"].split()]
                        for r in runs
                        if (r["method"], r["rate"], r["staleness"]) == (method, rate, staleness)
                    ]
                    if not curves:
                        continue
                    steps = [every * i for i in range(len(curves[0]))]
                    color = plt.get_cmap("viridis")(0.92 * place / (len(STALENESS) - 1))
                    middle = [statistics.fmean(points) for points in zip(*curves, strict=True)]
                    axes.plot(steps, middle, color=color, label=str(staleness))
                    low, high = ([of(p) for p in zip(*curves, strict=True)] for of in (min, max))
                    axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
                axes.set_title(f"{names.get(method, method)}, rate {rate:g}")
                axes.set_ylim(0, 1)
        for axes in panels[-1]:
            axes.set_xlabel("versions")
        for row in panels:
            row[0].set_ylabel("held-out score")
        panels[0][2].legend(title="staleness", loc="lower right", fontsize=7, ncols=3)
        save_small(figure, path)
        plt.close(figure)


def save_small(figure: Any, path: Path) -> None:
    """As a PNG of few colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(path, optimize=True)


if __name__ == "__main__":
    main()
