"""Does old experience teach as much as fresh experience, and in less time? Real services, by the clock.

    python benchmarks/stale_clock.py [--staleness 0 8] [--seeds 1 2 3]

The made model of `pinned_runs.py` learns to write even words, the learner on one core and the rollout server
on the other. An answer is right or wrong as a whole, and the correction is what a file without a word about
it gets: `taper` above a bound of 2. The server may hold eight batches' worth of groups, so that a bound of 8
is used. Each batch is trained twice, so that both sides take about as long. The same number of versions for
all; what counts is the score of the last version on the same prompts, and the seconds until the training
reward is there.

Writes benchmarks/results/stale_clock.json and its picture in docs/pictures/. Let nothing else run meanwhile.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from pinned_runs import experiment, learner_times, run
from record import write_result

from launch.history import History

RIGHT = {"right": {"function": "pinned_runs:has_many_more_even_words"}}
GOAL = 0.8
"""Training reward, as a mean of three steps, whose time is told."""
PICTURE = Path("docs/pictures/stale_clock.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=5e-4)
    options = parser.parse_args()
    runs = [one(s, seed, options) for seed in options.seeds for s in options.staleness]
    found = [of_staleness(s, runs) for s in options.staleness]
    settings = {"goal": GOAL, "steps": options.steps, "rate": options.rate, "seeds": options.seeds}
    write_result("stale_clock", {"settings": settings, "by_staleness": found, "runs": runs})
    draw(runs)


def one(staleness: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    engine = {"kv_cache_gib": 0.5, "max_num_seqs": 256, "cores": "1"}
    e = experiment(
        f"clock-{staleness}-{seed}",
        options.steps,
        buffer={"max_staleness": staleness, "groups_per_batch": 4},
        rollout={"max_groups": 32, "engine": engine, "rewards": RIGHT},
        learner={"optimizer": {"lr": options.rate}, "updates_per_batch": 2},
    )
    source = e.data.train
    evaluation = {"source": source, "samples": 4}
    e = type(e).model_validate(e.model_dump() | {"seed": seed, "eval": evaluation})
    rows = run(e, warm_up=0)
    waited = rows[0]["time/first_publish"] + rows[0]["time/wait_batch"]
    began = rows[0]["time"] - rows[0]["time/step"] + waited
    curve = [(round(r["time"] - began, 2), round(r["reward/mean"], 4)) for r in rows]
    history = History(Path(e.run_dir))
    history.refresh()
    scores = [score["score"] for _, score in sorted(history.scores.items())]
    late = rows[len(rows) // 2 :]
    made = {
        "max_staleness": staleness,
        "seed": seed,
        "score_before": round(scores[0], 4),
        "score": round(scores[-1], 4),
        "seconds": curve[-1][0],
        "seconds_to_goal": seconds_to_goal(curve),
        "staleness_mean": round(statistics.fmean(r["staleness/mean"] for r in late), 2),
        "ess_mean": round(statistics.fmean(r["rho/ess"] or 1.0 for r in late), 3),
        "mask_fraction": round(statistics.fmean(r["mask_fraction"] for r in late), 4),
        "learner": learner_times(late),
        "curve": curve,
    }
    print({k: v for k, v in made.items() if k != "curve"}, flush=True)
    return made


def seconds_to_goal(curve: list[tuple[float, float]]) -> float | None:
    for at in range(2, len(curve)):
        if statistics.fmean(reward for _, reward in curve[at - 2 : at + 1]) >= GOAL:
            return curve[at][0]
    return None


def of_staleness(staleness: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Lowest, mean and highest of the seeds."""
    of = [r for r in runs if r["max_staleness"] == staleness]
    told: dict[str, Any] = {"max_staleness": staleness}
    for key in ("score", "seconds_to_goal", "seconds", "staleness_mean"):
        values = [r[key] for r in of if r[key] is not None]
        spread = (min(values), statistics.fmean(values), max(values)) if len(values) == len(of) else None
        told[key] = spread and [round(v, 3) for v in spread]
    return told


def draw(runs: list[dict[str, Any]]) -> None:
    """Training reward over seconds, a line for each run."""
    from launch.plots import STYLE, plt

    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.2}):
        figure, axes = plt.subplots(layout="constrained", figsize=(7, 3))
        settings = sorted({r["max_staleness"] for r in runs})
        for place, staleness in enumerate(settings):
            color = plt.get_cmap("viridis")(0.92 * place / max(1, len(settings) - 1))
            for number, made in enumerate(r for r in runs if r["max_staleness"] == staleness):
                label = None if number else str(staleness)
                axes.plot(*zip(*made["curve"], strict=True), color=color, label=label)
        axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
        axes.set_title("training reward over seconds, one line a seed")
        axes.set_xlabel("seconds since the first batch")
        figure.legend(title="max_staleness", fontsize=7, loc="outside right center")
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
