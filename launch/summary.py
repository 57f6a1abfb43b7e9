"""The facts of a run in one record: for the last lines of `slipstream run`, summary.json and summary.md."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.experiment import resolved
from launch.history import History, Record
from launch.overview import clock, mean_of, step_seconds


@dataclass(frozen=True)
class Summary:
    name: str
    run_dir: str
    steps: int
    total_steps: int
    data_ended: bool
    """Whether the data ended behind the last of the steps."""
    training_seconds: float
    """Time of the recorded steps; pauses between restarts are not in it."""
    first_score: float | None
    last_score: float | None
    last_stderr: float | None
    """Standard error of the last score, over prompts."""
    last_scored_version: int | None
    pass_rates: dict[str, tuple[float | None, float | None]]
    """pass@k of the first and of the last evaluation, by name."""
    target: float | None
    reward_first: float | None
    reward_last: float | None
    reward_parts: dict[str, tuple[float | None, float | None]]
    """Mean of each part in the first and in the last step, by name."""
    samples_per_second: float | None
    learner_tokens_per_second: float | None
    server_tokens_per_second: float | None
    staleness_mean: float | None
    staleness_max: float | None
    publish_seconds_mean: float | None
    pause_seconds_mean: float | None
    pause_seconds_max: float | None
    evicted: int
    requeued: int
    """Prompts that went back to the queue."""
    requeued_causes: dict[str, int]
    wasted_tokens: int
    """Sampled for nothing, by all servers in the recorded steps."""
    starvation: dict[str, float | None]
    """What was trained beside what was generated (`buffer.starvation.report`)."""
    duplicates: int
    dropped: dict[str, int]
    model: str | None
    report: str

    @property
    def finished(self) -> bool:
        return self.steps >= self.total_steps or self.data_ended

    @property
    def target_reached(self) -> bool | None:
        """None when there is no target or no score of the last version."""
        if self.target is None or self.last_score is None or self.last_scored_version != self.steps:
            return None
        return self.last_score >= self.target

    def verdict(self) -> str:
        """One line: did it reach what it was asked to?"""
        if self.first_score is None or self.last_score is None:
            return "no evaluation was made"
        moved = f"{self.first_score:.3f} → {self.last_score:.3f}" + _say(" ± {:.3f}", self.last_stderr)
        if self.target is None:
            return f"eval score {moved}"
        if self.target_reached is None:
            return f"eval score {moved} so far, target {self.target:g} still open"
        outcome = "REACHED" if self.target_reached else "NOT reached"
        return f"target {self.target:g} {outcome}: eval score {moved}"

    def rows(self) -> list[tuple[str, str]]:
        """What, and its value, for people."""
        ended = "; the data ended behind them" if self.data_ended else ""
        generated, trained = self.server_tokens_per_second, self.learner_tokens_per_second
        rows = [
            ("steps", f"{self.steps} of {self.total_steps} in {clock(self.training_seconds)}{ended}"),
            ("reward", _say("{:.3f} first step → {:.3f} last step", self.reward_first, self.reward_last)),
            *((f"  {name}", _say("{:.3f} → {:.3f}", *ends)) for name, ends in self._shown_parts()),
            *((name, _say("{:.3f} → {:.3f}", *ends)) for name, ends in self.pass_rates.items()),
            ("samples", _say("{:.2f} a second", self.samples_per_second)),
            ("tokens", _say("{:.0f} a second generated, {:.0f} a second trained", generated, trained)),
            (
                "staleness",
                _say("{:.2f} in the mean, {:.0f} at most", self.staleness_mean, self.staleness_max),
            ),
            ("publish", _say("{:.2f} s in the mean", self.publish_seconds_mean)),
            (
                "pause",
                _say("{:.2f} s in the mean, {:.2f} at most", self.pause_seconds_mean, self.pause_seconds_max),
            ),
            ("groups", f"{self.evicted} evicted, {self.duplicates} duplicates"),
            ("requeued", _counts(self.requeued_causes)),
            ("wasted", f"{self.wasted_tokens} sampled tokens"),
            ("starvation", self._starvation()),
            ("dropped", _counts(self.dropped)),
        ]
        return [(key, value) for key, value in rows if value]

    def _starvation(self) -> str:
        of = self.starvation.get
        long = _say("trained groups {:.2f} times as long as generated ones", of("length_ratio"))
        long += _say(", lengths {:.2f} apart", of("length_ks"))
        long += _say("; evicted ones {:.2f} times as long as trained", of("evicted_length_ratio"))
        hard = _say(
            "trained and generated rewards {:.2f} apart (0: spread alike, 1: not at all)", of("reward_ks")
        )
        return f"long prompts: {long}; hard prompts: {hard}" if long and hard else ""

    def _shown_parts(self) -> list[tuple[str, tuple[float | None, float | None]]]:
        """A single one is the reward itself."""
        return list(self.reward_parts.items()) if len(self.reward_parts) > 1 else []

    def text(self) -> str:
        lines = [f"{self.name}: {self.verdict()}"]
        lines += [f"  {key:<10} {value}" for key, value in self.rows()]
        lines += [f"  {'model':<10} {self.model or 'not written yet'}", f"  {'report':<10} {self.report}"]
        return "\n".join(lines)

    def markdown(self) -> str:
        table = "\n".join(
            f"| {key} | {value} |" for key, value in (*self.rows(), ("model", self.model or "—"))
        )
        return f"# {self.name}\n\n**{self.verdict()}**\n\n| | |\n| --- | --- |\n{table}\n"

    def json(self) -> str:
        fields = dataclasses.asdict(self) | {"finished": self.finished, "target_reached": self.target_reached}
        return json.dumps(fields, indent=2) + "\n"


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(numbers.items()) if n) or "none"


def _say(form: str, *values: float | None) -> str:
    """The text, or nothing when a value is not known."""
    return "" if None in values else form.format(*values)


def summarize(run_dir: Path, history: History | None = None) -> Summary:
    """
    Raises:
        ValueError: The folder holds no run.
    """
    config = read_config(run_dir)
    if history is None:
        history = History(run_dir)
        history.refresh()
    records = [history.steps[s] for s in sorted(history.steps)]
    seconds = sum(step_seconds(history))
    buffer = history.buffer[-1] if history.buffer else {}
    requeued = {cause: int(n) for cause, n in dict(buffer.get("requeued") or {}).items()}
    scores = {v: float(r["score"]) for v, r in sorted(history.scores.items())}
    versions = list(scores)
    pauses = history.series("sync/pause_seconds")[1]
    stale = history.series("staleness/max")[1]
    rates = [mean_of(lines, "tokens_per_s") for lines in history.servers.values()]
    known_rates = [r for r in rates if r is not None]
    model = run_dir / "model"
    samples = sum(float(r.get("samples", 0)) for r in records)
    tokens = sum(float(r.get("tokens", 0)) for r in records)
    return Summary(
        name=config["name"],
        run_dir=str(run_dir),
        steps=max(history.steps, default=0),
        total_steps=config["learner"]["steps"],
        data_ended=history.data_end is not None,
        training_seconds=seconds,
        first_score=scores[versions[0]] if versions else None,
        last_score=scores[versions[-1]] if versions else None,
        last_stderr=history.scores[versions[-1]].get("stderr") if versions else None,
        last_scored_version=versions[-1] if versions else None,
        pass_rates=_ends([history.scores[v] for v in versions], "pass@"),
        target=(config.get("eval") or {}).get("target"),
        reward_first=mean_of(records[:1], "reward/mean"),
        reward_last=mean_of(records[-1:], "reward/mean"),
        reward_parts={
            key.removeprefix("reward_parts/"): ends for key, ends in _ends(records, "reward_parts/").items()
        },
        samples_per_second=samples / seconds if seconds and samples else None,
        learner_tokens_per_second=tokens / seconds if seconds and tokens else None,
        server_tokens_per_second=sum(known_rates) if known_rates else None,
        staleness_mean=mean_of(records, "staleness/mean"),
        staleness_max=max(stale, default=None),
        publish_seconds_mean=mean_of(records, "time/publish"),
        pause_seconds_mean=mean_of(records, "sync/pause_seconds"),
        pause_seconds_max=max(pauses, default=None),
        evicted=int(buffer.get("evicted", 0)),
        requeued=sum(requeued.values()),
        requeued_causes=requeued,
        wasted_tokens=sum(int(r.get("servers/wasted_tokens", 0)) for r in records),
        starvation=dict(buffer.get("starvation") or {}),
        duplicates=int(buffer.get("duplicates", 0)),
        dropped={rule: int(n) for rule, n in dict(buffer.get("dropped") or {}).items()},
        model=str(model) if (model / "config.json").exists() else None,
        report=str(run_dir / "report"),
    )


def _ends(records: list[Record], prefix: str) -> dict[str, tuple[float | None, float | None]]:
    """What the first and the last record have under every key that begins so."""
    keys = dict.fromkeys(key for record in records for key in record if key.startswith(prefix))
    first, last = records[:1], records[-1:]
    return {key: (mean_of(first, key), mean_of(last, key)) for key in keys}


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved experiment that `slipstream run` wrote.

    Raises:
        ValueError: There is none, or it was changed.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir}: no config.yaml in it; expected the folder of a run (its run_dir)")
    return resolved(path)
