"""The pictures of a report. Each takes a history and draws into a figure; nothing here reads files."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from launch.history import History, Record
from launch.overview import LEARNER_TIMES, seconds_of, waiting_share

BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#ea7317", "#16a34a", "#dc2626", "#64748b"
TIME_NAMES = {
    "time/wait_batch": ("waiting for a batch", "#cbd5e1"),
    "time/forward_backward": ("forward and backward", BLUE),
    "time/optimizer": ("optimizer", "#7c9cf5"),
    "time/wait_loaded": ("servers load the last version", "#fdba74"),
    "time/publish": ("publish", ORANGE),
    "time/checkpoint": ("checkpoint", GREEN),
    "time/value": ("value model", "#a78bfa"),
    "time/first_publish": ("waiting for the first server", "#94a3b8"),
    "other": ("other", "#e2e8f0"),
}
FEW = 5
"""Points."""
WINDOW = 5
AVERAGED = f"its mean over {WINDOW} steps"
"""Of the last ones: what is to come does not move what was drawn."""
CUT = 2.0
"""A first step so many times as long as any other leaves the picture, which would be one bar otherwise."""
STYLE: dict[Any, Any] = {
    "figure.figsize": (9.0, 4.6),
    "figure.dpi": 150,
    "font.size": 11,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "xtick.color": "#334155",
    "ytick.color": "#334155",
    "text.color": "#0f172a",
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


def draw_all(history: History, folder: Path, target: float | None, bound: int) -> list[Path]:
    """Write every picture there is data for.

    Args:
        history: The run.
        folder: Where the PNG files go.
        target: The evaluation's target, drawn as a line.
        bound: The largest staleness allowed, drawn as a line.

    Returns:
        The files written.
    """
    pictures: dict[str, Callable[[Axes], bool]] = {
        "reward.png": lambda axes: draw_reward(axes, history, target),
        "reward_parts.png": lambda axes: draw_reward_parts(axes, history),
        "staleness.png": lambda axes: draw_staleness(axes, history, bound),
        "throughput.png": lambda axes: draw_throughput(axes, history),
        "time.png": lambda axes: draw_time(axes, history),
    }
    written: list[Path] = []
    with plt.rc_context(STYLE):
        for name, draw in pictures.items():
            figure, axes = plt.subplots(layout="constrained")
            if draw(axes):
                figure.savefig(folder / name)
                written.append(folder / name)
            plt.close(figure)
    return written


def draw_stage(history: History, folder: Path) -> list[Path]:
    """Write the pictures of an offline stage: its loss, and its accuracy where it has one."""
    written: list[Path] = []
    with plt.rc_context(STYLE):
        for name, title in (("loss", "Loss"), ("accuracy", "Pairs in the right order")):
            figure, axes = plt.subplots(layout="constrained")
            if draw_trained(axes, history, name, title):
                figure.savefig(folder / f"{name}.png")
                written.append(folder / f"{name}.png")
            plt.close(figure)
    return written


def draw_trained(axes: Axes, history: History, name: str, title: str) -> bool:
    """A metric of the training batches, faint, under its running mean; on held-out examples as marks."""
    steps, values = history.series(name)
    held_out = history.series(f"eval/{name}")
    if not steps and not held_out[0]:
        return False
    _draw_with_mean(axes, steps, values, "training")
    if held_out[0]:
        axes.plot(*held_out, "o-", color=ORANGE, markersize=7, linewidth=1.5, label="held-out examples")
    axes.margins(y=0.15)
    _finish(axes, title, "step", name)
    axes.legend(loc="best")
    return True


def answered_by(steps: Sequence[int], ages: Mapping[int, float]) -> list[float]:
    """The version of each step's answers, by their first tokens, as evaluations are by version: step s trains
    version s − 1, on answers of that age. It never falls, whatever a single batch's age."""
    return list(accumulate((step - 1 - ages.get(step, 0.0) for step in steps), max))


def draw_reward(axes: Axes, history: History, target: float | None) -> bool:
    """Training reward of each batch, faint, under its running mean; evaluation scores as marks.

    A score of version v is what step v left, so that marks stand rightly over steps too.
    """
    steps, rewards = history.series("reward/mean")
    ages = dict(zip(*history.series("staleness/mean"), strict=True))
    answered = answered_by(steps, ages)
    by_step = len(set(answered)) < 2  # all of them by one version: they would stand on a vertical line
    versions = sorted(history.scores)
    if not steps and not versions:
        return False
    if steps:
        _draw_with_mean(axes, steps if by_step else answered, rewards, "training reward")
    if versions:
        scores = [float(history.scores[v]["score"]) for v in versions]
        errors = [float(history.scores[v].get("stderr") or 0) for v in versions]
        axes.errorbar(
            versions, scores, errors, fmt="o-" if len(versions) > 2 else "o",  # two points are no trend
            color=ORANGE, markersize=7, linewidth=1.5, capsize=3,
            label="held-out evaluation ± standard error",
        )  # fmt: skip
        for place, side in ((0, "left"), (-1, "right")):  # beside the error bar, towards the middle
            score, offset = scores[place], 10 if side == "left" else -10
            axes.annotate(f"{score:.2f}", (versions[place], score), (offset, 5), textcoords="offset points",
                          ha=side, color=ORANGE, weight="bold")  # fmt: skip
    if target is not None:
        axes.axhline(target, color=GREY, linestyle="--", linewidth=1.2, label=f"target {target:g}")
    axes.margins(y=0.15)
    _finish(axes, "Reward", "step" if by_step else "policy version that answered", "mean reward")
    axes.legend(loc="best")
    return True


def draw_reward_parts(axes: Axes, history: History) -> bool:
    """Each part's mean before its weight, faint, under its running mean; a single one is the reward."""
    prefix = "reward_parts/"
    keys = dict.fromkeys(key for row in history.steps.values() for key in row if key.startswith(prefix))
    if len(keys) < 2:
        return False
    for key in keys:
        steps, values = history.series(key)
        (line,) = _plot(axes, steps, smooth(values), label=key.removeprefix(prefix))
        axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=1.2)
    axes.margins(y=0.15)
    _finish(axes, f"Reward by part, and {AVERAGED}", "step", "mean value, before its weight")
    axes.legend(loc="best")
    return True


def draw_staleness(axes: Axes, history: History, bound: int) -> bool:
    """How many versions behind the learner the trained tokens were: mean and oldest, under the bound."""
    steps, means = history.series("staleness/mean")
    at_most, highest = history.series("staleness/max")
    if not steps and not at_most:
        return False
    axes.fill_between(at_most, highest, step="mid", color=BLUE, alpha=0.12, linewidth=0)
    axes.step(
        at_most, highest, where="mid", color=BLUE, alpha=0.5, linewidth=1.2, label="oldest trained token"
    )
    _plot(axes, steps, means, color=BLUE, label="mean")
    axes.axhline(bound, color=RED, linestyle="--", linewidth=1.2, label=f"bound {bound}")
    axes.set_ylim(0, max([float(bound), *highest]) * 1.25 + 0.2)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "Staleness", "step", "versions behind")
    _legend_above(axes)
    return True


def draw_throughput(axes: Axes, history: History) -> bool:
    """Tokens per second generated by all servers and trained by the learner, over the run's time."""
    records = [history.steps[s] for s in sorted(history.steps)]
    servers = {name: lines for name, lines in history.servers.items() if _timed(lines, "tokens_per_s")}
    start = min((float(lines[0]["time"]) for lines in servers.values()), default=None)
    timed = _timed(records, "tokens")
    if start is None and not timed:
        return False
    start = min(filter(None, (start, float(timed[0]["time"]) if timed else None)))
    for index, (name, lines) in enumerate(servers.items()):
        known = _timed(lines, "tokens_per_s")
        minutes = [(float(r["time"]) - start) / 60 for r in known]
        rates = smooth([float(r["tokens_per_s"]) for r in known], 9)
        axes.plot(
            *_broken(minutes, rates),
            color=ORANGE,
            alpha=max(0.35, 1 - 0.25 * index),
            label=f"generated by {name}",
        )
    if timed:
        minutes = [(float(r["time"]) - start) / 60 for r in timed]
        spent = [seconds_of(r) for r in timed]
        rates = [float(r["tokens"]) / s if s else 0.0 for r, s in zip(timed, spent, strict=True)]
        _plot(axes, minutes, smooth(rates), color=BLUE, label=f"trained, mean of {WINDOW} steps")
    axes.set_ylim(bottom=0)
    _finish(axes, "Throughput", "minutes since the start", "tokens per second", integer=False)
    _legend_above(axes)
    return True


def draw_time(axes: Axes, history: History) -> bool:
    """Where each step's seconds go, stacked; in the title's line how long servers waited for leases."""
    steps = [s for s, r in sorted(history.steps.items()) if any(k in r for k in LEARNER_TIMES)]
    if not steps:
        return False
    bottom = [0.0] * len(steps)
    whole = sum(seconds_of(history.steps[s]) for s in steps)
    for key, (name, color) in TIME_NAMES.items():
        heights = [_spent(history.steps[s], key) for s in steps]
        if sum(heights) < 0.002 * whole:
            continue
        share = sum(heights) / whole
        label = f"{name} {share:.0%}" if share >= 0.01 else f"{name} <1%"
        axes.bar(steps, heights, bottom=bottom, width=0.85, color=color, label=label, linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    _finish(axes, "Where the learner's time goes", "step", "seconds")
    shares = [s for lines in history.servers.values() if (s := waiting_share(lines)) is not None]
    if shares:
        text = f"servers waited for leases {sum(shares) / len(shares):.0%} of the time"
        axes.set_title(text, loc="right", fontsize=10, fontweight="normal", color=GREY)
    highest = max(bottom[1:] or bottom)
    is_cut = bottom[0] > CUT * highest  # the first step waits for the engines to start
    if is_cut:
        text = f"↑ step {steps[0]}: {bottom[0]:.0f} s"
        axes.annotate(text, (steps[0] + 0.6, highest * 1.03), color=GREY, fontsize=9.5, va="bottom")
    axes.set_ylim(top=(highest if is_cut else max(bottom)) * 1.15)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=4,
        fontsize=9.5,
        columnspacing=1.2,
        handlelength=1.2,
    )
    return True


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and those before it, `window` in all; of fewer at the beginning."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _draw_with_mean(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Faint, under its running mean; as it is where it is shorter than what is averaged."""
    if len(y) <= WINDOW:
        _plot(axes, x, y, color=BLUE, label=label)
        return
    axes.plot(x, y, color=BLUE, alpha=0.25, linewidth=1.2, label=label)
    _plot(axes, x, smooth(y), color=BLUE, label=AVERAGED)


def _plot(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> list[Line2D]:
    """A line, with its points where they are too few for one to be seen."""
    return axes.plot(x, y, marker="o" if len(x) <= FEW else None, markersize=4, **style)


def _spent(record: Record, key: str) -> float:
    """Seconds of one part of a step; of `other` what the parts leave of the whole."""
    if key in LEARNER_TIMES:
        return float(record.get(key, 0))
    return max(0.0, seconds_of(record) - sum(float(record.get(k, 0)) for k in LEARNER_TIMES))


def _broken(minutes: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """With a hole where a server told nothing for half a minute, and otherwise every two seconds."""
    x, y = list(minutes[:1]), list(values[:1])
    for (before, now), value in zip(pairwise(minutes), values[1:], strict=True):
        if now - before > 0.5:
            x.append(before)
            y.append(math.nan)
        x.append(now)
        y.append(value)
    return x, y


def _timed(lines: Sequence[Record], key: str) -> list[Record]:
    return [line for line in lines if line.get(key) is not None and line.get("time") is not None]


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=10, handlelength=1.6)


def _finish(axes: Axes, title: str, x: str, y: str, integer: bool = True) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="x", visible=False)
    if integer:
        low, high = axes.get_xlim()
        if high - low < 1:
            middle = round((low + high) / 2)
            axes.set_xlim(middle - 1, middle + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
