"""What `slipstream tune` asks the simulation, and what it makes of the answers.

The grid is tried with the costs that `launch/calibration.py` finds, and the run's own setting first, to be
held against what was measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from buffer.config import BufferConfig
from launch.calibration import steady
from launch.history import History
from launch.overview import seconds_of
from launch.simulation import Costs, Outcome, Setting, simulate
from rollout.config import RolloutConfig

STEPS, WARM_UP = 80, 15
CLOSE = 0.05
"""A setting this little slower than the fastest is as good, if it needs fewer servers, leaves the batch as it
is or has less staleness."""


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


def measured(history: History) -> Measured:
    """What a run came to, over the same steps as it is calibrated from."""
    records = steady(history)
    seconds = sum(map(seconds_of, records))
    buffer = history.buffer[-1] if history.buffer else {}
    ages = [float(r["staleness/mean"]) for r in records if r.get("staleness/mean") is not None]
    return Measured(
        groups_per_second=sum(float(r["groups"]) for r in records) / seconds,
        learner_idle=sum(float(r.get("time/wait_batch") or 0) for r in records) / seconds,
        staleness_mean=fmean(ages) if ages else 0.0,
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
    rollout: RolloutConfig,
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
        if (setting := setting_of(own, rollout, n, s, b)) is not None
    ]


def setting_of(
    own: BufferConfig, rollout: RolloutConfig, servers: int, staleness: int, size: int
) -> Setting | None:
    """None where the buffer refuses it; its capacity is raised as far as needed."""
    changed = {"max_staleness": staleness, "groups_per_batch": size, "capacity": 1 << 30}
    try:
        config = BufferConfig(**{**own.model_dump(), **changed})
    except ValueError:
        return None
    rules = config.rules
    capacity = max(own.capacity, rules.window + rules.kept)
    return Setting(servers, rollout.max_groups, decoded_groups(rollout), rules, capacity)


def decoded_groups(rollout: RolloutConfig) -> int:
    """Whose completions an engine decodes at once; whatever else a server has in hand waits for a place."""
    return max(1, rollout.engine.max_num_seqs // rollout.group_size)


def recommend(trials: Sequence[Trial], size: int) -> tuple[Trial, str]:
    """Of the trials the one with the fewest servers, then the batch nearest to `size`, then the least
    staleness, that is as fast as any; and why."""
    fastest = max(trials, key=lambda t: t.outcome.groups_per_second)
    floor = (1 - CLOSE) * fastest.outcome.groups_per_second
    close = [t for t in trials if t.outcome.groups_per_second >= floor]
    best = min(close, key=lambda t: (t.servers, abs(math.log(t.groups_per_batch / size)), t.max_staleness))
    idle = best.outcome.learner_idle
    bound = "the learner is the limit" if idle < 0.1 else "generation is the limit"
    why = f"the fewest servers within {CLOSE:.0%} of the fastest, with those the batch nearest to the file's"
    return best, f"{why}, then the lowest max_staleness; the learner waits {idle:.0%} of its time: {bound}"


def row(trial: Trial, group_size: int) -> dict[str, Any]:
    """For JSON and the table."""
    made = trial.outcome
    return {
        "servers": trial.servers,
        "max_staleness": trial.max_staleness,
        "groups_per_batch": trial.groups_per_batch,
        "samples_per_second": made.groups_per_second * group_size,
        "versions_per_second": made.groups_per_second / trial.groups_per_batch,
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
