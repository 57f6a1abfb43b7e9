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
from rich.text import Text

from launch import calibration, measuring, tuning
from launch.experiment import WholeExperiment, read
from launch.history import History
from launch.simulation import Costs, simulate
from launch.tuning import Trial

DRAWS = 400
"""Of the assumed distribution of a group's seconds."""
CHANGES_LEARNING = (
    "A larger batch makes fewer versions of the same samples, which changes how the policy learns; nothing "
    "here says how well. What is recommended is throughput at that age, and no more."
)


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
        return Costs(work, self.contention, self.train / size, self.publish, (0.0,), self.pause)


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
    costs, comparison = _costs(experiment, run_dir, assumed, console)
    around = tuning.grid(own, rollout.servers)
    tried = [
        list(given) or default for given, default in zip((servers, staleness, sizes), around, strict=True)
    ]
    trials = tuning.try_all(costs, own, rollout, *tried)
    if not trials:
        raise ValueError(f"policy={own.policy}, max_uses={own.max_uses}: no setting of the grid is accepted")
    best, why = tuning.recommend(trials, own.groups_per_batch)
    kept = [t for t in trials if t.groups_per_batch == own.groups_per_batch]
    of_own = tuning.recommend(kept, own.groups_per_batch)[0] if kept else None
    console.print(_table(trials, rollout.group_size, best))
    console.print(_recommended(best, why, of_own, rollout.group_size), soft_wrap=True)
    if len({t.groups_per_batch for t in trials}) > 1:
        console.print(CHANGES_LEARNING, soft_wrap=True)
    folder = run_dir / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "costs": {
            key: _quantiles(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(costs).items()
        },
        "own_setting": [
            dict(zip(("name", "measured", "predicted"), entry, strict=True)) for entry in comparison
        ],
        "trials": [tuning.row(trial, rollout.group_size) for trial in trials],
        "recommended": tuning.row(best, rollout.group_size) | {"why": why},
        "recommended_at_own_batch": of_own and tuning.row(of_own, rollout.group_size),
    }
    (folder / "tuning.json").write_text(json.dumps(told, indent=2) + "\n")
    draw(trials, rollout.group_size, best, folder / "tuning.png")
    console.print(f"written: {folder}/tuning.json, {folder}/tuning.png", soft_wrap=True)
    return folder


def _costs(
    experiment: WholeExperiment, run_dir: Path, assumed: Assumed | None, console: Console
) -> tuple[Costs, list[tuple[str, float, float]]]:
    """Found or assumed, and what they make of the run's own setting beside what it came to."""
    history = History(run_dir)
    history.refresh()
    ran = assumed is None and (bool(history.steps) or not measuring.is_measured(run_dir))
    written = run_dir / "config.yaml"
    if ran and written.is_file():
        experiment = read(written, [], [])  # what ran, which need not be what the file says by now
    own, rollout = experiment.buffer, experiment.rollout
    decoded = tuning.decoded_groups(rollout)
    if assumed is not None:
        costs = assumed.costs(own.groups_per_batch)
    elif ran:
        costs = calibration.calibrate(history, decoded)
    else:
        costs = measuring.read_alone(experiment, run_dir).costs
    untold = ran and calibration.fit_contention(history, decoded) is None
    console.print(_told(costs, untold), soft_wrap=True)
    mine = tuning.setting_of(own, rollout, rollout.servers, own.max_staleness, own.groups_per_batch)
    if not ran or mine is None:
        return costs, []
    made = simulate(costs, mine, tuning.STEPS, tuning.WARM_UP)
    comparison = tuning.beside(tuning.measured(history), made, rollout.group_size)
    console.print(_beside(comparison))
    return costs, comparison


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
        f"training {costs.train:.2f} s a group and {costs.step:.2f} a batch; "
        f"a version {costs.send:.2f} s to send, {math.fsum(costs.load) / len(costs.load):.2f} until servers "
        f"load it, {costs.pause:.2f} of pause"
    )


def _beside(comparison: Sequence[tuple[str, float, float]]) -> Table:
    table = Table(title="the run's own setting", title_justify="left")
    for name in ("", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for name, found, told in comparison:
        error = f"{(told - found) / found:+.0%}" if found else "–"
        table.add_row(name, f"{found:.3g}", f"{told:.3g}", error)
    return table


def _table(trials: Sequence[Trial], group_size: int, best: Trial) -> Table:
    """A line for each batch size and number of servers, a column for each bound."""
    table = Table(title="predicted samples/s, and mean staleness, by max_staleness", title_justify="left")
    bounds = sorted({trial.max_staleness for trial in trials})
    for name in ("batch", "servers", *(f"bound {bound}" for bound in bounds)):
        table.add_column(name, justify="right")
    found = {(t.groups_per_batch, t.servers, t.max_staleness): t for t in trials}
    for size, servers in sorted({(t.groups_per_batch, t.servers) for t in trials}):
        of = [found.get((size, servers, bound)) for bound in bounds]
        cells = [
            "–" if t is None else Text(_rate_and_age(t, group_size), style="bold green" if t == best else "")
            for t in of
        ]
        table.add_row(str(size), str(servers), *cells)
    return table


def _rate_and_age(trial: Trial, group_size: int) -> str:
    rate = trial.outcome.groups_per_second * group_size
    digits = max(0, 2 - int(math.log10(max(rate, 1.0))))
    return f"{rate:.{digits}f} ({trial.outcome.staleness_mean:.1f})"


def _recommended(best: Trial, why: str, of_own: Trial | None, group_size: int) -> str:
    told = f"recommended: {_name(best)}\n  {_comes_to(best, group_size)}\n  {why}"
    if of_own is None or of_own == best:
        return told
    slower = 1 - of_own.outcome.groups_per_second / best.outcome.groups_per_second
    return (
        f"{told}\nwith the file's own batch: {_name(of_own)}\n"
        f"  {_comes_to(of_own, group_size)}; {slower:.0%} slower"
    )


def _comes_to(trial: Trial, group_size: int) -> str:
    made = trial.outcome
    return (
        f"{made.groups_per_second * group_size:.2f} samples/s, "
        f"{made.groups_per_second / trial.groups_per_batch:.3g} versions/s, "
        f"staleness {made.staleness_mean:.1f} in the mean and {made.staleness_max} at most; "
        f"places idle {made.server_idle:.0%}, evicted {made.evicted:.1%}"
    )


def draw(trials: Sequence[Trial], group_size: int, best: Trial, path: Path) -> None:
    """Samples a second and mean staleness over max_staleness: a line for each number of servers, a column of
    panels for each batch size."""
    from launch.plots import RED, STYLE, plt

    sizes = sorted({trial.groups_per_batch for trial in trials})
    rows = [(trial, tuning.row(trial, group_size)) for trial in trials]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            *(2, len(sizes)), sharey="row", squeeze=False, layout="constrained", figsize=(4.2 * len(sizes), 7)
        )
        for line, key in zip(panels, ("samples_per_second", "staleness_mean"), strict=True):
            for axes, size in zip(line, sizes, strict=True):
                of = [(t, r[key]) for t, r in rows if t.groups_per_batch == size]
                for servers in sorted({t.servers for t, _ in of}):
                    points = sorted((t.max_staleness, y) for t, y in of if t.servers == servers)
                    axes.plot(*zip(*points, strict=True), "o-", label=f"{servers} servers")
                for y in (y for t, y in of if t == best):
                    axes.plot(best.max_staleness, y, "o", color=RED, markersize=14, fillstyle="none")
        for axes, size in zip(panels[0], sizes, strict=True):
            axes.set_title(f"{size} groups a batch")
        for axes in panels[1]:
            axes.set_xlabel("max_staleness")
        for line, name in zip(panels, ("samples per second", "mean staleness"), strict=True):
            line[0].set_ylabel(name)
            line[0].set_ylim(bottom=0)
        panels[0][-1].legend(loc="lower right")
        figure.savefig(path)
        plt.close(figure)
