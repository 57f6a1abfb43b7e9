"""What a person sees while a run goes on: a live screen on a terminal, one line per step everywhere else.

Consumes: the run's history and the services' logs, read again twice a second. Waits for nothing.
"""

import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.experiment import WholeExperiment
from launch.history import History, Record
from launch.overview import (
    RECENT,
    clock,
    count,
    learner_rate,
    learner_waits,
    many,
    mean_of,
    seconds_left,
    server_rate,
    servers_wait,
    taught_nothing,
    waste_rate,
)

REFRESH_S = 0.5
LONGEST_SILENCE_S = 30.0
"""Without a terminal, when nothing happens, that much is said."""
ECHO_WIDTH = 3
"""Left free beside the screen: a terminal that echoes `^C` there would otherwise begin a line, and the next
picture be drawn one line too low."""
BARS = "▁▂▃▄▅▆▇█"
ALARM = re.compile(
    r"\S+ (?P<time>[\d:]{8})\S* (WARNING|ERROR|CRITICAL) (?P<rank>rank \d+ )?"
    r"(buffer|sync|rollout|learner)\b[\w.]*: (?P<text>.*)"
)
"""Of the services' own loggers; those of vLLM and torch are in the log files for those who look."""
UP = re.compile(r"\S+ [\d:]{8}\S* INFO (rank \d+ )?(buffer|rollout|learner)\b[\w.]*: .*\bis up\b")
"""What every service logs once it works."""
STOPPING = "stopping"
STARTING = "starting: the engines and the learner load the model"
LONGEST_ALARM = 600
"""Characters of one that are shown."""
LONE_NUMBER = re.compile(r"(?<![\w-])\d[\d.,:/]*")
"""One that is no part of a name, such as a server's or a checkpoint's."""
SAID_IN_FULL = 3
"""So often the same alarm is shown; then the tenth, the hundredth and so on."""
MOST_ALARMS = 4
"""Shown at a time; the log files have all of them."""


class Watched(Protocol):
    """What the screen needs to know of the supervisor."""

    def states(self) -> dict[str, str]:
        """Service name → `running`, `ended` or `lost`."""
        ...


class Screen:
    """Context manager; `update` draws what is new, `say` tells one thing at once."""

    def __init__(self, experiment: WholeExperiment, history: History, watched: Watched, console: Console):
        self.experiment = experiment
        self.history = history
        self.watched = watched
        self.console = console
        self.started = time.monotonic()
        self.stopping = False
        """Set by the owner, when the run is to end before its time."""
        self.alarms = Alarms(Path(experiment.run_dir) / "logs")
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._due = 0.0
        self._told_scores = set(history.scores)
        self._told_phase = ""
        self._spoke = self.started

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(self._render(), refresh=True)
            self.live.stop()

    def say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + REFRESH_S
        fresh = self.history.refresh()
        alarms = self.alarms.refresh()
        if self.live:
            self.live.update(self._render(), refresh=True)
        else:
            self._tell(fresh, alarms)

    def _render(self) -> RenderableType:
        elapsed = time.monotonic() - self.started
        states, alarms = self.watched.states(), list(self.alarms.last)
        width = self.console.width - ECHO_WIDTH
        return render(self.experiment, self.history, self._phase(), states, elapsed, alarms, width)

    def _phase(self) -> str:
        return STOPPING if self.stopping else phase_of(self.experiment, self.history)

    def _tell(self, fresh: list[Record], alarms: list[str]) -> None:
        for record in fresh:
            self.say(step_line(self.experiment, self.history, record))
        phase = self._phase()
        if phase not in (self._told_phase, "training", STOPPING):
            self.say(phase)
        self._told_phase = phase
        for version in sorted(set(self.history.scores) - self._told_scores):
            self.say(f"eval of version {version}: {float(self.history.scores[version]['score']):.3f}")
        self._told_scores |= set(self.history.scores)
        for line in alarms:
            self.say(line)
        if time.monotonic() - self._spoke >= LONGEST_SILENCE_S:
            left = _evaluation_left(self.history)
            doing = phase.partition(":")[0] + (f", {left}" if left else "")
            if phase == STARTING:
                doing += _listed([name for name in self.watched.states() if name not in self.alarms.up])
            self.say(f"still {doing} · {clock(time.monotonic() - self.started)} since the start")


class Alarms:
    """What of the services' logs since this screen opened a user is told: warnings, errors, who is up."""

    def __init__(self, logs: Path, keep: int = 3):
        self.logs = logs
        self.last: deque[str] = deque(maxlen=keep)
        self.up: set[str] = set()
        """Services that logged that they are up since then."""
        self._said: Counter[tuple[Path, str]] = Counter()
        """Of each log and alarm, its numbers aside."""
        self._offsets = {path: path.stat().st_size for path in logs.glob("*.log")}

    def refresh(self) -> list[str]:
        found: list[str] = []
        for path in sorted(self.logs.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
            lines = whole.decode(errors="replace").splitlines()
            if any(UP.match(line) for line in lines):
                self.up.add(path.stem)
            alarms = [alarm for line in lines if (alarm := ALARM.match(line))]
            told = [line for alarm in alarms if (line := self._line(path, alarm))]
            if len(told) > MOST_ALARMS:
                more = f"{path.stem} │ … and {len(told) - MOST_ALARMS + 1} more, all of them in {path}"
                told = [*told[: MOST_ALARMS - 1], more]
            found += told
        self.last.extend(found)
        return found

    def _line(self, path: Path, alarm: re.Match[str]) -> str | None:
        """What is shown of one; None of one that was said before, its numbers aside."""
        said = path, LONE_NUMBER.sub("0", alarm["text"])
        self._said[said] += 1
        times = self._said[said]
        if not _is_told(times):
            return None
        again = f" (said {times} times, all of them in {path})" if times > SAID_IN_FULL else ""
        return f"{path.stem} │ {alarm['time']} {alarm['rank'] or ''}{_shortened(alarm['text'])}{again}"


def _is_told(times: int) -> bool:
    """The first ones, and then ever fewer."""
    return times <= SAID_IN_FULL or times == 10 ** (len(str(times)) - 1)


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST_ALARM else f"{text[:LONGEST_ALARM]}…"


def phase_of(e: WholeExperiment, history: History) -> str:
    made = max(history.steps, default=0)
    if made and (made >= e.learner.steps or history.data_end is not None):
        return "evaluating for the last time" if e.eval else "finishing"
    buffer = (history.since_opened(history.buffer[-1:]) or [{}])[-1]
    if buffer.get("eval_left"):
        return f"evaluating version {buffer['published']}"
    if history.steps and history.since_opened([history.steps[max(history.steps)]]):
        return "training"
    if not any(history.since_opened(lines) for lines in history.servers.values()):
        return STARTING
    if buffer.get("frontier") and not history.steps:
        return "training on the first batch"
    return "generating the first groups"


def _listed(absent: Sequence[str]) -> str:
    if absent:
        return f" (not up yet: {', '.join(absent)})"
    return " (all services are up; the learner publishes the first version)"


def step_line(e: WholeExperiment, history: History, record: Record) -> str:
    """One step in one line of plain text, for logs."""
    left = seconds_left(history, e.learner.steps)
    parts = [
        f"step {int(record['step'])}/{e.learner.steps}",
        _part(record, "reward/mean", "reward {:.3f}"),
        "taught nothing, rewards are alike" if taught_nothing(record) else "",
        _part(record, "staleness/mean", "staleness {:.2f}"),
        _part(record, "rho/mean", "ρ {:.3f}"),
        _part(record, "time/wait_batch", "learner waited {:.1f} s"),
        _part(record, "time/publish", "publish {:.1f} s"),
        f"{clock(left)} left" if left else "",
    ]
    return " · ".join(part for part in parts if part)


def _part(record: Record, key: str, form: str) -> str:
    return form.format(float(record[key])) if record.get(key) is not None else ""


def render(
    e: WholeExperiment,
    history: History,
    phase: str,
    states: dict[str, str],
    elapsed: float,
    alarms: Sequence[str],
    width: int,
) -> RenderableType:
    """The whole screen.

    Args:
        e: The experiment.
        history: What was read so far.
        phase: What the run is at.
        states: As `Watched.states`.
        elapsed: Seconds since this start.
        alarms: Lines for the bottom.
        width: In columns.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("progress", _progress(e, history))
    for name, text in _rows(e, history):
        table.add_row(name, text)
    table.add_row("services", _services(states))
    parts: list[RenderableType] = [table]
    if alarms:
        *older, newest = (Text(line, style="yellow") for line in alarms)
        for line in older:
            line.no_wrap, line.overflow = True, "ellipsis"
        parts += [Text(), *older, newest]  # what to do stands at a line's end: one of them is told in full
    title = Text.assemble(("slipstream", "bold cyan"), f" {e.name} · ", (phase, "italic"))
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=f"{e.run_dir} · {clock(elapsed)}",
        subtitle_align="right", border_style="cyan", padding=(1, 2), width=width,
    )  # fmt: skip


def _progress(e: WholeExperiment, history: History) -> RenderableType:
    done, total = max(history.steps, default=0), e.learner.steps
    left = seconds_left(history, total)
    bar = ProgressBar(total=total, completed=done, width=32)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar, f"{done}/{total} steps", f"{clock(left)} left" if left else "")
    return grid


def _rows(e: WholeExperiment, history: History) -> list[tuple[str, Text]]:
    """What is known by now, a name and a text each."""
    last = [history.steps[s] for s in sorted(history.steps)[-RECENT:]]
    recent = history.since_opened(last)  # nothing goes on at the pace of an earlier start
    rows = [
        ("reward", _reward(history)),
        ("parts", _reward_parts(last[-1:])),
        ("eval", _evaluations(e, history)),
        ("evaluating", Text(_evaluation_left(history))),
    ]
    mean, highest = mean_of(recent, "staleness/mean"), mean_of(recent[-1:], "staleness/max")
    if mean is not None and highest is not None:
        bound = e.buffer.max_staleness
        rows.append(("staleness", Text(f"{mean:.2f} in the mean, {highest:.0f} at most (bound {bound})")))
    rows.append(("tokens/s", _rates(server_rate(history), learner_rate(recent), waste_rate(recent))))
    rows.append(("waiting", _waiting(servers_wait(history), learner_waits(recent))))
    publish, pause = mean_of(recent, "time/publish"), mean_of(recent, "sync/pause_seconds")
    if publish is not None:
        paused = "" if pause is None else f", generation paused {pause:.2f} s"
        rows.append(("publish", Text(f"{publish:.2f} s{paused}")))
    if history.since_opened(history.buffer[-1:]):
        rows.append(("buffer", _buffer(history.buffer[-1])))
    return [(name, text) for name, text in rows if text.plain]


def _reward(history: History) -> Text:
    _, values = history.series("reward/mean")
    if not values:
        return Text()
    return Text.assemble((f"{values[-1]:.3f} ", "bold green"), (sparkline(values, 40), "green"))


def _reward_parts(last: Sequence[Record]) -> Text:
    prefix = "reward_parts/"
    parts = {k.removeprefix(prefix): v for r in last for k, v in r.items() if k.startswith(prefix)}
    if len(parts) < 2:
        return Text()  # the reward itself
    return Text(" · ".join(f"{name} {float(value):.3f}" for name, value in parts.items()))


def _evaluations(e: WholeExperiment, history: History) -> Text:
    scores = [f"v{v} {float(r['score']):.3f}" for v, r in sorted(history.scores.items())]
    if not scores:
        return Text()
    shown = scores if len(scores) <= 6 else [scores[0], "…", *scores[-4:]]
    target = f"   target {e.eval.target:g}" if e.eval and e.eval.target is not None else ""
    return Text.assemble((" → ".join(shown), "bold"), (target, "dim"))


def _evaluation_left(history: History) -> str:
    """How much of an evaluation is to come; nothing where none is under way."""
    buffer = (history.since_opened(history.buffer[-1:]) or [{}])[-1]
    left = int(buffer.get("eval_left") or 0)
    return f"{many(left, 'prompt')} left" if left else ""


def _rates(servers: float | None, learner: float | None, wasted: float | None) -> Text:
    parts = [("generated", servers), ("trained", learner), ("sampled for nothing", wasted)]
    return Text(" · ".join(f"{count(rate)} {what}" for what, rate in parts if rate is not None))


def _waiting(servers: float | None, learner: float | None) -> Text:
    """Who waits for whom, the longer wait first."""
    parts = [
        (share, text)
        for share, text in ((learner, "learner waits for batches"), (servers, "servers wait for leases"))
        if share is not None
    ]
    return Text(" · ".join(f"{text} {share:.0%} of the time" for share, text in sorted(parts, reverse=True)))


def _buffer(record: Record) -> Text:
    keys = ("leased", "stored", "evicted", "duplicates")
    parts = [f"{int(record[key])} {key}" for key in keys if record.get(key) is not None]
    dropped = sum(int(n) for n in dict(record.get("dropped") or {}).values())
    return Text(" · ".join(parts + ([f"{dropped} dropped"] if dropped else [])))


def _services(states: dict[str, str]) -> Text:
    marks = {"running": ("●", "green"), "ended": ("✓", "dim"), "lost": ("✗", "bold red")}
    text = Text()
    for name, state in states.items():
        mark, style = marks[state]
        text.append(f"{mark} ", style=style).append(f"{name}   ")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """Bars of the values, averaged down to at most `width` of them, from the lowest to the highest."""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((m - low) / span * len(BARS)))] for m in means)
