"""What `slipstream tune` asks the simulation, and what it makes of the answers.

A run's own metrics say what generation, training and publishing cost; the grid is tried with those costs, and
the run's own setting first, to be held against what was measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from buffer.config import BufferConfig
from launch.history import History, Record
from launch.overview import seconds_of
from launch.simulation import Costs, Outcome, Setting, simulate

STEPS, WARM_UP = 80, 15
CLOSE = 0.05
"""A setting this little slower than the fastest is as good, if it needs fewer servers or less staleness."""
TOLD_APART = 2.0
"""Sum over the groups of the square of how far off the mean their numbers in hand lie, as a share of it, at
least: where the seconds of a token scatter by 15 %, these then tell how they rise with it to within 10 %."""
UNTOLD_CONTENTION = 1.0
"""Of a run that cannot tell: more groups in hand are then promised nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting and what it comes to."""

    servers: int
    max_staleness: int
    groups_per_batch: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a run, as an `Outcome` has it."""

    groups_per_second: float
    learner_idle: float
    staleness_mean: float
    staleness_max: float
    evicted: float


def calibrate(history: History, generates: bool = True) -> Costs:
    """What a run's generation, training and publishing cost.

    Args:
        generates: False where groups were recorded ones: then work is 0.

    Raises:
        ValueError: It has too few steps, or no server wrote what it did.
    """
    records = steady(history)
    send, load, pause = (
        _mean(records, f) for f in ("time/publish", "sync/load_seconds", "sync/pause_seconds")
    )
    outside = ("time/wait_batch", "time/wait_loaded", "time/publish")
    spent = sum(seconds_of(r) - sum(float(r.get(key) or 0) for key in outside) for r in records)
    groups = sum(float(r["groups"]) for r in records)
    if not generates:
        return Costs((0.0,), 1.0, spent / groups, send, load, pause)
    if not busy(history):
        raise ValueError(f"{history.run_dir}: no server wrote what it had in hand (metrics/rollout-….jsonl)")
    fitted = fit_contention(history)
    contention = UNTOLD_CONTENTION if fitted is None else fitted
    slower = 1 + contention * (in_hand(history) - 1)
    work = tuple(seconds / slower for seconds in group_seconds(history))
    return Costs(work, contention, spent / groups, send, load, pause)


@dataclass(frozen=True, slots=True)
class Alone:
    """Of both sides, each measured without the other (`slipstream measure`), in seconds."""

    generate: float
    """Of the servers for a batch, versions coming in meanwhile."""
    train: float
    """Of the learner for a batch, sending included."""
    costs: Costs


def alone(servers: History, few: History | None, learner: History) -> Alone:
    """What the runs of `launch/measuring.py` cost.

    Args:
        servers: With as many groups in hand as are allowed.
        few: With fewer; None where one is all.
        learner: On recorded groups.

    Raises:
        ValueError: One of them has too few steps.
    """
    generated, trained = steady(servers), steady(learner)
    of_servers, of_learner = calibrate(servers), calibrate(learner, generates=False)
    seconds, contention = group_seconds(servers), of_servers.contention
    if few is not None:
        contention = contention_between(
            (in_hand(servers), fmean(seconds)), (in_hand(few), fmean(group_seconds(few)))
        )
    slower = 1 + contention * (in_hand(servers) - 1)
    work = tuple(s / slower for s in seconds)
    costs = replace(
        of_servers, work=work, contention=contention, train=of_learner.train, send=of_learner.send
    )
    waits = ("time/wait_batch", "time/wait_loaded")
    training = [seconds_of(r) - sum(float(r.get(key) or 0) for key in waits) for r in trained]
    return Alone(fmean(seconds_of(r) for r in generated), fmean(training), costs)


def busy(history: History) -> list[Record]:
    """The lines of all servers in whose time they had any group in hand."""
    return [line for of in history.servers.values() for line in of if float(line.get("busy_s") or 0) > 0]


def in_hand(history: History) -> float:
    """Groups that a busy server has on average."""
    return mean_in_hand(busy(history)) or 1.0


def mean_in_hand(lines: Sequence[Record]) -> float:
    """Over the time in which there were any; 0 where there never were."""
    seconds = sum(float(line["busy_s"]) for line in lines)
    held = sum(float(line["busy_s"]) * float(line["groups_in_hand"]) for line in lines)
    return held / seconds if seconds else 0.0


def contention_between(many: tuple[float, float], few: tuple[float, float]) -> float:
    """Contention c, of the mean seconds of a group at two numbers of groups in hand: seconds are
    alone · (1 + c · (n − 1)) at either.

    Args:
        many: Groups in hand, and seconds.
        few: The same, of fewer.
    """
    ratio = many[1] / few[1]
    steeper = (many[0] - 1) - ratio * (few[0] - 1)
    return min(1.0, max(0.0, (ratio - 1) / steeper)) if steeper > 0 else 1.0


def steady(history: History) -> list[Record]:
    """Steps after the first, whose time is that of the start.

    Raises:
        ValueError: There are fewer than two of them.
    """
    records = [history.steps[s] for s in sorted(history.steps) if history.steps[s].get("groups")][1:]
    if len(records) < 2:
        raise ValueError(
            f"{history.run_dir}: {len(history.steps)} steps in metrics.jsonl; expected three or more, "
            "or what `slipstream measure` writes, or --generate-seconds and --train-seconds"
        )
    return records


def group_seconds(history: History) -> list[float]:
    """From lease to delivery, of every training group but each server's first, which pay for the engine's
    warming up; of a run whose servers did not tell, the mean by Little's law: groups in hand over groups a
    second."""
    told, first = _warm(history, ("group_seconds",))
    if told or first:
        return [seconds for (seconds,) in told or first]
    held = rate = 0.0
    for lines in history.servers.values():
        working = [line for line in lines if float(line.get("busy_s") or 0) > 0]
        if len(working) > 1:
            held += mean_in_hand(working)
            seconds = float(working[-1]["time"]) - float(working[0]["time"])
            rate += (int(working[-1]["groups"]) - int(working[0]["groups"])) / max(seconds, 1e-9)
    if not rate:
        raise ValueError(f"{history.run_dir}: no server delivered a group")
    return [held / rate]


def _warm(history: History, keys: Sequence[str]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Of every training group what its server's lines have under these keys: of those behind each server's
    first, and of these."""
    told: list[tuple[float, ...]] = []
    first: list[tuple[float, ...]] = []
    for lines in history.servers.values():
        of = [row for line in lines for row in zip(*(line.get(key) or () for key in keys), strict=False)]
        begun = math.ceil(max((float(line.get("groups_in_hand") or 0) for line in lines), default=0))
        first += of[:begun]
        told += of[begun:]
    return told, first


def fit_contention(history: History) -> float | None:
    """How much groups in hand slow each other down: of all values the one under which the seconds of a token
    differ least between groups, by least squares of their logarithms. None where a run cannot tell: always as
    many were in hand.

    With n in hand a token takes 1 + c · (n − 1) times as long as alone; over a group's life, in which n has
    mean m and variance v, to second order f − c² · v / f with f = 1 + c · (m − 1).
    """
    keys = ("group_seconds", "group_tokens", "group_in_hand", "group_in_hand_variance")
    found = np.array([row for row in _warm(history, keys)[0] if min(row[:2]) > 0]).reshape(-1, len(keys))
    seconds, tokens, mean, variance = found.T
    if not len(found) or ((mean / mean.mean() - 1) ** 2).sum() < TOLD_APART:
        return None
    observed = np.log(seconds / tokens)
    tried = np.linspace(0.0, 1.0, 101)
    slower = [1 + c * (mean - 1) for c in tried]
    told = [np.log(np.maximum(f - c**2 * variance / f, 1e-3)) for c, f in zip(tried, slower, strict=True)]
    return float(tried[np.argmin([(observed - each).var() for each in told])])


def measured(history: History) -> Measured:
    """What a run came to, over the same steps as `calibrate`."""
    records = steady(history)
    seconds = sum(map(seconds_of, records))
    buffer = history.buffer[-1] if history.buffer else {}
    return Measured(
        groups_per_second=sum(float(r["groups"]) for r in records) / seconds,
        learner_idle=sum(float(r.get("time/wait_batch") or 0) for r in records) / seconds,
        staleness_mean=_mean(records, "staleness/mean"),
        staleness_max=max(float(r.get("staleness/max") or 0) for r in records),
        evicted=float(buffer.get("evicted", 0)) / max(1.0, float(buffer.get("delivered", 0))),
    )


def grid(own: BufferConfig, servers: int) -> tuple[list[int], list[int], list[int]]:
    """Servers, max_staleness and groups_per_batch around a run's own."""
    size = own.groups_per_batch
    return (
        sorted({max(1, servers // 2), servers, 2 * servers, 4 * servers}),
        sorted({0, 1, 2, 4, own.max_staleness}),
        sorted({max(1, size // 2), size, 2 * size}),
    )


def try_all(
    costs: Costs,
    own: BufferConfig,
    max_groups: int,
    servers: Iterable[int],
    staleness: Iterable[int],
    sizes: Iterable[int],
) -> list[Trial]:
    """Every combination that a buffer accepts."""
    return [
        Trial(n, s, b, simulate(costs, setting, STEPS, WARM_UP))
        for b in sizes
        for n in servers
        for s in staleness
        if (setting := setting_of(own, n, max_groups, s, b)) is not None
    ]


def setting_of(own: BufferConfig, servers: int, max_groups: int, staleness: int, size: int) -> Setting | None:
    """None where the buffer refuses it; its capacity is raised as far as needed."""
    changed = {"max_staleness": staleness, "groups_per_batch": size, "capacity": 1 << 30}
    try:
        config = BufferConfig(**{**own.model_dump(), **changed})
    except ValueError:
        return None
    rules = config.rules
    return Setting(servers, max_groups, rules, max(own.capacity, rules.window + rules.kept))


def recommend(trials: Sequence[Trial], size: int) -> tuple[Trial, str]:
    """Of the trials with that many groups a batch, which learning depends on: the fewest servers, and then
    the least staleness, that are as fast as any; and why."""
    of = [t for t in trials if t.groups_per_batch == size]
    fastest = max(of, key=lambda t: t.outcome.groups_per_second)
    floor = (1 - CLOSE) * fastest.outcome.groups_per_second
    close = [t for t in of if t.outcome.groups_per_second >= floor]
    best = min(close, key=lambda t: (t.servers, t.max_staleness))
    why = f"the fewest servers, and the lowest max_staleness with those, within {CLOSE:.0%} of the fastest"
    idle = best.outcome.learner_idle
    bound = "the learner is the limit" if idle < 0.1 else "generation is the limit"
    return best, f"{why}; the learner waits {idle:.0%} of its time: {bound}"


def row(trial: Trial, group_size: int) -> dict[str, Any]:
    """For JSON and the table."""
    made = trial.outcome
    return {
        "servers": trial.servers,
        "max_staleness": trial.max_staleness,
        "groups_per_batch": trial.groups_per_batch,
        "samples_per_second": made.groups_per_second * group_size,
        "learner_idle": made.learner_idle,
        "server_idle": made.server_idle,
        "staleness_mean": made.staleness_mean,
        "staleness_max": made.staleness_max,
        "evicted": made.evicted,
    }


def beside(found: Measured, told: Outcome, group_size: int) -> list[tuple[str, float, float]]:
    """Name, measured and predicted, of a run's own setting."""
    return [
        ("samples/s", found.groups_per_second * group_size, told.groups_per_second * group_size),
        ("learner idle", found.learner_idle, told.learner_idle),
        ("staleness mean", found.staleness_mean, told.staleness_mean),
        ("staleness max", found.staleness_max, float(told.staleness_max)),
        ("evicted", found.evicted, told.evicted),
    ]


def _mean(records: Sequence[Record], key: str) -> float:
    values = [float(r[key]) for r in records if r.get(key) is not None]
    return fmean(values) if values else 0.0
