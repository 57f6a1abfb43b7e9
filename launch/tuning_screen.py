"""What `slipstream tune` prints and writes: a table, a picture, JSON."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch import measuring, tuning
from launch.experiment import WholeExperiment
from launch.history import History
from launch.simulation import Costs, simulate
from launch.tuning import Trial

DRAWS = 400
"""Of the assumed distribution of a group's seconds."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Costs in place of a run's, in seconds."""

    generate: float
    """Of a group in the mean, alone on its server."""
    train: float
    """Of a batch of buffer.groups_per_batch."""
    publish: float
    pause: float
    spread: float
    """Standard deviation of the logarithm of a group's seconds."""
    contention: float

    def costs(self, size: int) -> Costs:
        chance = random.Random(1)
        draws = [chance.lognormvariate(-(self.spread**2) / 2, self.spread) for _ in range(DRAWS)]
        mean = math.fsum(draws) / DRAWS
        work = tuple(self.generate * draw / mean for draw in draws) if self.spread else (self.generate,)
        return Costs(work, self.contention, self.train / size, self.publish, self.pause, self.pause)


def tune(
    experiment: WholeExperiment,
    run_dir: Path,
    assumed: Assumed | None,
    servers: Sequence[int],
    staleness: Sequence[int],
    sizes: Sequence[int],
    console: Console,
) -> Path:
    """Try the grid, print it, and write `tuning.json` and `tuning.png`; their folder.

    Args:
        experiment: Whose settings the grid is laid around.
        run_dir: Of the run that is calibrated from, and under which `tuning/` is written.
        assumed: Costs, where no run is to tell them.
        servers: To try; empty for some around the experiment's own. So the next two.
        staleness: Of max_staleness.
        sizes: Of groups_per_batch.
        console: To print on.

    Raises:
        ValueError: No run, too short a run, or nothing in the grid that a buffer accepts.
    """
    own, rollout = experiment.buffer, experiment.rollout
    history = History(run_dir)
    history.refresh()
    ran = assumed is None and (bool(history.steps) or not measuring.is_measured(run_dir))
    if assumed is not None:
        costs = assumed.costs(own.groups_per_batch)
    else:
        costs = tuning.calibrate(history) if ran else measuring.read_alone(run_dir).costs
    console.print(_told(costs, untold=ran and tuning.fit_contention(history) is None))
    comparison: list[tuple[str, float, float]] = []
    mine = tuning.setting_of(
        own, rollout.servers, rollout.max_groups, own.max_staleness, own.groups_per_batch
    )
    if ran and mine is not None:
        made = simulate(costs, mine, tuning.STEPS, tuning.WARM_UP)
        comparison = tuning.beside(tuning.measured(history), made, rollout.group_size)
        console.print(_beside(comparison))
    around = tuning.grid(own, rollout.servers)
    tried = [
        list(given) or default for given, default in zip((servers, staleness, sizes), around, strict=True)
    ]
    trials = tuning.try_all(costs, own, rollout.max_groups, *tried)
    if not trials:
        raise ValueError(f"policy={own.policy}, max_uses={own.max_uses}: no setting of the grid is accepted")
    size = own.groups_per_batch if own.groups_per_batch in tried[2] else tried[2][0]
    best, why = tuning.recommend(trials, size)
    rows = [tuning.row(trial, rollout.group_size) for trial in trials]
    console.print(_table(trials, rows, best))
    console.print(f"recommended: {_name(best)}\n  {why}")
    folder = run_dir / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "costs": dataclasses.asdict(costs) | {"work": _quantiles(costs.work)},
        "own_setting": [
            dict(zip(("name", "measured", "predicted"), entry, strict=True)) for entry in comparison
        ],
        "trials": rows,
        "recommended": tuning.row(best, rollout.group_size) | {"why": why},
    }
    (folder / "tuning.json").write_text(json.dumps(told, indent=2) + "\n")
    draw(trials, rows, best, folder / "tuning.png")
    console.print(f"written: {folder}/tuning.json, {folder}/tuning.png")
    return folder


def _name(trial: Trial) -> str:
    return (
        f"rollout.servers={trial.servers} buffer.max_staleness={trial.max_staleness} "
        f"buffer.groups_per_batch={trial.groups_per_batch}"
    )


def _quantiles(work: Sequence[float]) -> dict[str, float]:
    ordered = sorted(work)
    places = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    told = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in places.items()}
    return {"mean": math.fsum(work) / len(work), **told}


def _told(costs: Costs, untold: bool) -> str:
    """Untold: the contention, by the run."""
    of = _quantiles(costs.work)
    assumed = (
        " (assumed: servers always had about as many groups in hand, which cannot tell it; "
        "`slipstream measure` does)"
        if untold
        else ""
    )
    return (
        f"a group alone takes {of['mean']:.2f} s (median {of['p50']:.2f}, 90 % below {of['p90']:.2f}, "
        f"at most {of['max']:.2f}), contention {costs.contention:.2f}{assumed}; "
        f"training {costs.train:.2f} s a group; "
        f"a version {costs.send:.2f} s to send, {costs.load:.2f} to load, {costs.pause:.2f} of pause"
    )


def _beside(comparison: Sequence[tuple[str, float, float]]) -> Table:
    table = Table(title="the run's own setting", title_justify="left")
    for name in ("", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for name, found, told in comparison:
        error = f"{(told - found) / found:+.0%}" if found else "–"
        table.add_row(name, f"{found:.3g}", f"{told:.3g}", error)
    return table


def _table(trials: Sequence[Trial], rows: Sequence[dict[str, float]], best: Trial) -> Table:
    table = Table(title="predicted", title_justify="left")
    given = ("batch", "servers", "bound")
    # As wide as these are, 80 columns are just enough.
    for name in (*given, "samples/s", "learner\nidle", "places\nidle", "staleness", "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(
            *(str(trial.groups_per_batch), str(trial.servers), str(trial.max_staleness)),
            *(f"{row['samples_per_second']:.2f}", f"{row['learner_idle']:.0%}", f"{row['server_idle']:.0%}"),
            f"{row['staleness_mean']:.1f} / {row['staleness_max']}",
            f"{row['evicted']:.1%}",
            style="bold green" if trial == best else None,
        )
    return table


def draw(trials: Sequence[Trial], rows: Sequence[dict[str, float]], best: Trial, path: Path) -> None:
    """Samples a second over max_staleness, a line for each number of servers, a panel for each batch size."""
    from launch.plots import RED, STYLE, plt

    sizes = sorted({trial.groups_per_batch for trial in trials})
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(sizes), sharey=True, squeeze=False, layout="constrained", figsize=(4.2 * len(sizes), 4.6)
        )
        for axes, size in zip(panels[0], sizes, strict=True):
            of = [(t, r) for t, r in zip(trials, rows, strict=True) if t.groups_per_batch == size]
            for servers in sorted({t.servers for t, _ in of}):
                line = [(t.max_staleness, r["samples_per_second"]) for t, r in of if t.servers == servers]
                axes.plot(*zip(*sorted(line), strict=True), "o-", label=f"{servers} servers")
            if best.groups_per_batch == size:
                rate = next(r["samples_per_second"] for t, r in of if t == best)
                axes.plot(best.max_staleness, rate, "o", color=RED, markersize=14, fillstyle="none")
            axes.set_title(f"{size} groups a batch")
            axes.set_xlabel("max_staleness")
        panels[0][0].set_ylabel("samples per second")
        panels[0][0].set_ylim(bottom=0)
        panels[0][-1].legend(loc="lower right")
        figure.savefig(path)
        plt.close(figure)
