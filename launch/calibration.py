"""What generation, training and publishing cost, out of what a run's services wrote."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from launch.history import History, Record
from launch.overview import seconds_of
from launch.simulation import Costs

TOLD_APART = 2.0
"""Sum over the groups of the square of how far off the mean their numbers in hand lie, as a share of it, at
least: where the seconds of a token scatter by 15 %, these then tell how they rise with it to within 10 %."""
UNTOLD_CONTENTION = 1.0
"""Of a run that cannot tell: more groups in hand are then promised nothing."""


class Group(NamedTuple):
    """What a server told of one."""

    seconds: float
    """From lease to delivery."""
    tokens: float
    """Of its longest completion: the engine's steps that it took."""
    in_hand: float
    """Groups that its server had meanwhile, in the mean over the time."""
    variance: float
    """Of that."""

    def decoded(self, most: int) -> "Group":
        """Without the time in which it waited for an engine that decodes so many at once: by Little's law
        that share of its time which as large a share of the groups in hand was waiting."""
        if self.in_hand <= most:
            return self
        return self._replace(seconds=self.seconds * most / self.in_hand, in_hand=float(most), variance=0.0)

    def alone(self, contention: float) -> float:
        """Its seconds, had it been alone."""
        return self.seconds / (1 + contention * (self.in_hand - 1))


KEYS = ("group_seconds", "group_tokens", "group_in_hand", "group_in_hand_variance")


def calibrate(history: History, decoded: int, generates: bool = True) -> Costs:
    """What a run's generation, training and publishing cost.

    Args:
        decoded: Groups that its engine decodes at once.
        generates: False where groups were recorded ones: then work is 0.

    Raises:
        ValueError: It has too few steps, or no server wrote what it did.
    """
    records = steady(history)
    outside = ("time/wait_batch", "time/wait_loaded", "time/publish")
    spent = fmean(seconds_of(r) - _sum(r, outside) for r in records)
    step = min(spent, fmean(_sum(r, ("time/optimizer", "time/checkpoint")) for r in records))
    costs = Costs(
        work=(0.0,),
        contention=UNTOLD_CONTENTION,
        train=(spent - step) / fmean(float(r["groups"]) for r in records),
        send=_mean(records, "time/publish"),
        load=loads(records),
        pause=_mean(records, "sync/pause_seconds"),
        step=step,
    )
    if not generates:
        return costs
    if not busy(history):
        raise ValueError(f"{history.run_dir}: no server wrote what it had in hand (metrics/rollout-….jsonl)")
    fitted = fit_contention(history, decoded)
    contention = UNTOLD_CONTENTION if fitted is None else fitted
    work, pace = work_and_pace(history, contention, decoded)
    return replace(costs, work=work, pace=pace, contention=contention)


def loads(records: Sequence[Record]) -> tuple[float, ...]:
    """From sending until the servers stand still, of every version: a server that prepares one beside a busy
    learner may take many times as long as beside an idle one. A run of before `sync/arrival_seconds` tells
    what follows the staging alone."""
    by_version = {r.get("sync/version"): r for r in records}
    arrived = [
        float(r.get("sync/arrival_seconds") or r.get("sync/load_seconds") or 0.0)
        - float(r.get("sync/pause_seconds") or 0.0)
        for r in by_version.values()
    ]
    return tuple(max(0.0, seconds) for seconds in arrived)


@dataclass(frozen=True, slots=True)
class Alone:
    """Of both sides, each measured without the other (`slipstream measure`), in seconds."""

    generate: float
    """Of the servers for a batch, versions coming in meanwhile."""
    train: float
    """Of the learner for a batch, sending included."""
    costs: Costs


def alone(servers: History, few: History | None, learner: History, decoded: int) -> Alone:
    """What the runs of `launch/measuring.py` cost.

    Args:
        servers: With as many groups in hand as are allowed.
        few: With fewer; None where one is all.
        learner: On recorded groups.
        decoded: Groups that an engine decodes at once.

    Raises:
        ValueError: One of them has too few steps.
    """
    generated, trained = steady(servers), steady(learner)
    of_servers = calibrate(servers, decoded)
    of_learner = calibrate(learner, decoded, generates=False)
    contention = of_servers.contention
    if few is not None:
        many, less = (_at(history, decoded) for history in (servers, few))
        contention = contention_between(many, less)
    work, pace = work_and_pace(servers, contention, decoded)
    costs = replace(
        of_servers, work=work, pace=pace, contention=contention, train=of_learner.train,
        step=of_learner.step, send=of_learner.send,
    )  # fmt: skip
    waits = ("time/wait_batch", "time/wait_loaded")
    training = [seconds_of(r) - _sum(r, waits) for r in trained]
    return Alone(fmean(seconds_of(r) for r in generated), fmean(training), costs)


def _at(history: History, decoded: int) -> tuple[float, float]:
    """Groups decoded at once and seconds of one, both in the mean."""
    of = Group(fmean(group_seconds(history)), 0.0, in_hand(history), 0.0).decoded(decoded)
    return of.in_hand, of.seconds


def work_and_pace(
    history: History, contention: float, decoded: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What made each group take its seconds: its own length, and how slow its server was just then.

    All completions of an engine get a token in each of its steps, so a group's own part is the tokens of its
    longest one, and whatever makes a step long is common to all in hand. What tokens do not tell is a
    server's pace over as many groups as it decodes at once. A run without tokens tells one from the other
    not at all: then all is the groups' own.
    """
    told, first = _warm(history)
    servers = [
        [g.decoded(decoded) for g in of if min(g.seconds, g.tokens) > 0]
        for of in (told if any(told) else first)
    ]
    if not any(servers):
        held = in_hand(history)
        seconds = [Group(s, 0.0, held, 0.0).decoded(decoded) for s in group_seconds(history)]
        return tuple(g.alone(contention) for g in seconds), (1.0,)
    groups = [group for of in servers for group in of]
    per_token = sum(g.alone(contention) for g in groups) / sum(g.tokens for g in groups)
    abreast = max(1, round(fmean(g.in_hand for g in groups)))
    blocks = [of[at : at + abreast] for of in servers for at in range(0, len(of) - abreast + 1, abreast)]
    slow = [sum(g.alone(contention) for g in b) / sum(g.tokens for g in b) for b in blocks] or [per_token]
    return tuple(per_token * g.tokens for g in groups), tuple(s / fmean(slow) for s in slow)


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
    told, first = _warm(history, KEYS[:1])
    seconds = [group.seconds for of in (told if any(told) else first) for group in of]
    if seconds:
        return seconds
    held = rate = 0.0
    for lines in history.servers.values():
        working = [line for line in lines if float(line.get("busy_s") or 0) > 0]
        if len(working) > 1:
            held += mean_in_hand(working)
            seconds_of_all = float(working[-1]["time"]) - float(working[0]["time"])
            rate += (int(working[-1]["groups"]) - int(working[0]["groups"])) / max(seconds_of_all, 1e-9)
    if not rate:
        raise ValueError(f"{history.run_dir}: no server delivered a group")
    return [held / rate]


def _warm(history: History, keys: Sequence[str] = KEYS) -> tuple[list[list[Group]], list[list[Group]]]:
    """Of every server the training groups, in order of delivery, of which its lines have something under all
    of these keys: those behind its first, and these."""
    told: list[list[Group]] = []
    first: list[list[Group]] = []
    for lines in history.servers.values():
        rows = [row for line in lines for row in zip(*(line.get(key) or () for key in keys), strict=False)]
        of = [Group(*(*row, 1.0, 1.0, 0.0)[: len(KEYS)]) for row in rows]
        begun = math.ceil(max((float(line.get("groups_in_hand") or 0) for line in lines), default=0))
        first.append(of[:begun])
        told.append(of[begun:])
    return told, first


def fit_contention(history: History, decoded: int) -> float | None:
    """How much groups in hand slow each other down: of all values the one under which the seconds of a token
    differ least between groups, by least squares of their logarithms. None where a run cannot tell: always as
    many were in hand.

    With n decoded a token takes 1 + c · (n − 1) times as long as alone; over a group's life, in which n has
    mean m and variance v, to second order f − c² · v / f with f = 1 + c · (m − 1).
    """
    groups = [g.decoded(decoded) for of in _warm(history)[0] for g in of if min(g.seconds, g.tokens) > 0]
    if not groups:
        return None
    seconds, tokens, mean, variance = np.array(groups).T
    if ((mean / mean.mean() - 1) ** 2).sum() < TOLD_APART:
        return None
    observed = np.log(seconds / tokens)
    tried = np.linspace(0.0, 1.0, 101)
    slower = [1 + c * (mean - 1) for c in tried]
    told = [np.log(np.maximum(f - c**2 * variance / f, 1e-3)) for c, f in zip(tried, slower, strict=True)]
    return float(tried[np.argmin([(observed - each).var() for each in told])])


def _sum(record: Record, keys: Sequence[str]) -> float:
    return sum(float(record.get(key) or 0) for key in keys)


def _mean(records: Sequence[Record], key: str) -> float:
    values = [float(r[key]) for r in records if r.get(key) is not None]
    return fmean(values) if values else 0.0
