"""The numbers a person asks for about a run. Pure: what the services wrote in, plain values out."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from launch.history import History, Record

LEARNER_TIMES = (
    "time/wait_batch",
    "time/forward_backward",
    "time/optimizer",
    "time/wait_loaded",
    "time/publish",
    "time/checkpoint",
    "time/value",
    "time/first_publish",
)
"""Where a learner's step goes, in the order of the plots."""

RECENT = 8
"""Steps or metric lines that "now" is averaged over."""


def seconds_of(record: Record) -> float:
    """How long a step took, from the end of the one before."""
    return float(record.get("time/step") or sum(float(record.get(key, 0)) for key in LEARNER_TIMES))


def step_seconds(history: History) -> list[float]:
    return [seconds_of(history.steps[step]) for step in sorted(history.steps)]


def seconds_left(history: History, total: int) -> float | None:
    """At the pace of the last steps, without the first, which waits for the servers' first groups."""
    durations = step_seconds(history)[1:][-RECENT:]
    if not any(durations):
        return None
    return median(durations) * max(0, total - max(history.steps))


def learner_rate(records: Sequence[Record]) -> float | None:
    """Trained tokens per second of wall-clock time over some steps."""
    seconds = sum(map(seconds_of, records))
    tokens = sum(float(r.get("tokens", 0)) for r in records)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def waste_rate(records: Sequence[Record]) -> float | None:
    """Tokens that were sampled for nothing, by the servers' count and the buffer's, per second of wall-clock
    time over some steps."""
    seconds = sum(map(seconds_of, records))
    keys = ("servers/wasted_tokens", "buffer/wasted_tokens")
    wasted = sum(float(r.get(key, 0)) for r in records for key in keys)
    return wasted / seconds if seconds > 0 and wasted > 0 else None


def learner_waits(records: Sequence[Record]) -> float | None:
    """Share of the learner's time spent waiting for a batch."""
    seconds = sum(map(seconds_of, records))
    return sum(float(r.get("time/wait_batch", 0)) for r in records) / seconds if seconds > 0 else None


def server_rate(history: History) -> float | None:
    """Tokens per second of all servers together, over their last lines."""
    recent = [history.since_opened(lines[-RECENT:]) for lines in history.servers.values()]
    rates = [mean_of(lines, "tokens_per_s") for lines in recent]
    known = [r for r in rates if r is not None]
    return sum(known) if known else None


def servers_wait(history: History) -> float | None:
    """Share of the servers' time spent without a lease to work on, over their last lines."""
    shares = [waiting_share(history.since_opened(lines[-RECENT:])) for lines in history.servers.values()]
    known = [s for s in shares if s is not None]
    return sum(known) / len(known) if known else None


def waiting_share(lines: Sequence[Record]) -> float | None:
    """`waiting_s/leases` counts from a server's start: its rises, over the time that the lines span.

    Where it falls the server was started again; that pair of lines says nothing.
    """
    known = [line for line in lines if "waiting_s/leases" in line]
    elapsed = waited = 0.0
    for before, after in pairwise(known):
        rise = float(after["waiting_s/leases"]) - float(before["waiting_s/leases"])
        if rise >= 0:
            waited += rise
            elapsed += float(after["time"]) - float(before["time"])
    return min(1.0, waited / elapsed) if elapsed > 0 else None


def mean_of(lines: Sequence[Record], key: str) -> float | None:
    values = [float(line[key]) for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def taught_nothing(record: Record) -> bool:
    """Whether no token of a step had a gradient because all completions of each prompt earned the same."""
    return record.get("gradient_fraction") == 0 and record.get("reward/equal_groups") == 1


def clock(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def many(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def count(value: float) -> str:
    """`950`, `12.4k`, `3.1M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"
