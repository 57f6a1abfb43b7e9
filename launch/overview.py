"""The numbers a person asks for about a run. Pure: what the services wrote in, plain values out."""

from collections.abc import Sequence
from statistics import median

from launch.history import History, Record

LEARNER_TIMES = (
    "time/wait_batch",
    "time/forward_backward",
    "time/optimizer",
    "time/publish",
    "time/checkpoint",
)
"""Where a learner's step goes, in the order of the plots."""

RECENT = 8
"""Steps or metric lines that "now" is averaged over."""


def step_seconds(history: History) -> list[float]:
    """Duration of each step, from the recorded times of consecutive steps; a gap of a restart is left out."""
    records = [history.steps[s] for s in sorted(history.steps)]
    durations = []
    for record in records:
        known = [float(record[k]) for k in LEARNER_TIMES if k in record]
        if known:
            durations.append(sum(known))
    return durations


def seconds_left(history: History, total: int) -> float | None:
    """At the pace of the last steps."""
    durations = step_seconds(history)[-RECENT:]
    if not durations:
        return None
    return median(durations) * max(0, total - max(history.steps))


def learner_rate(records: Sequence[Record]) -> float | None:
    """Tokens per second of wall-clock time over some steps."""
    seconds = sum(float(r.get(k, 0)) for r in records for k in LEARNER_TIMES)
    tokens = sum(float(r.get("tokens", 0)) for r in records)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def learner_waits(records: Sequence[Record]) -> float | None:
    """Share of the learner's time spent waiting for a batch."""
    seconds = sum(float(r.get(k, 0)) for r in records for k in LEARNER_TIMES)
    return sum(float(r.get("time/wait_batch", 0)) for r in records) / seconds if seconds > 0 else None


def server_rate(history: History) -> float | None:
    """Tokens per second of all servers together, over their last lines."""
    rates = [mean_of(lines[-RECENT:], "tokens_per_s") for lines in history.servers.values()]
    known = [r for r in rates if r is not None]
    return sum(known) if known else None


def servers_wait(history: History) -> float | None:
    """Share of the servers' time spent without a lease to work on, over their last lines."""
    shares = [waiting_share(lines[-RECENT:]) for lines in history.servers.values()]
    known = [s for s in shares if s is not None]
    return sum(known) / len(known) if known else None


def waiting_share(lines: Sequence[Record]) -> float | None:
    """`waiting_s/leases` counts from the start of the server: its rise over the time between two lines."""
    known = [line for line in lines if "waiting_s/leases" in line]
    if len(known) < 2:
        return None
    elapsed = float(known[-1]["time"]) - float(known[0]["time"])
    waited = float(known[-1]["waiting_s/leases"]) - float(known[0]["waiting_s/leases"])
    return min(1.0, max(0.0, waited / elapsed)) if elapsed > 0 else None


def mean_of(lines: Sequence[Record], key: str) -> float | None:
    values = [float(line[key]) for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def clock(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(value: float) -> str:
    """`950`, `12.4k`, `3.1M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"
