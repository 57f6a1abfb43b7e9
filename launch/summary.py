"""The facts of a run in one record: for the last lines of `slipstream run`, summary.json and summary.md."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launch.experiment import resolved
from launch.history import History, Record
from launch.overview import clock, many, mean_of, seconds_of, step_seconds, taught_nothing

LEARNED = {
    "value/loss": "value loss",
    "value/explained_variance": "explained variance",
    "kl/completion": "KL to reference",
    "kl/coefficient": "KL coefficient",
    "dpo/accuracy": "pairs in order",
}
"""Metrics of some runs only, and what they are called here."""
SCORING = ("rollout.rewards.", "eval.")
"""Keys by whose change an evaluation says another thing than the one before."""
CAUSES = {"finished": "on lease at the end"}
"""Why a prompt went back to the queue, where the name alone would puzzle."""


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
    """pass@k of the first and of the last evaluation, by name; of a sum with a reward model none."""
    target: float | None
    reward_first: float | None
    reward_last: float | None
    reward_parts: dict[str, tuple[float | None, float | None]]
    """Mean of each part in the first and in the last step, by name."""
    learned: dict[str, tuple[float | None, float | None]]
    """Of value model and reference, in the first and in the last step, by name."""
    taught_nothing: int
    """Steps, by `overview.taught_nothing`."""
    skipped: int
    """Optimizer steps not made because the gradient was not finite."""
    rho_mean: float | None
    ess_mean: float | None
    rated_steps: int
    """That the next three are of: without the first one of a start, which waits for the servers to start."""
    samples_per_second: float | None
    learner_tokens_per_second: float | None
    server_tokens_per_second: float | None
    """Of all servers together."""
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
    """Sampled for nothing: by all servers in the recorded steps, and of groups that no batch took."""
    starvation: dict[str, float | None]
    """What was trained beside what was generated (`buffer.starvation.report`)."""
    duplicates: int
    dropped: dict[str, int]
    changes: list[tuple[int, str]]
    """Of the configuration: the last step that was made before, and what was changed."""
    model: str | None
    exports: bool
    """Whether the run is to write one at its end."""
    others: dict[str, str]
    """Folders of what else was trained, by what it is (`others_written`)."""
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
        rescored = [step for step, change in self.changes if change.startswith(SCORING)]
        if any(step < (self.last_scored_version or 0) for step in rescored):
            moved += f" (what is scored was changed behind step {rescored[-1]}: the two do not compare)"
        if self.target is None:
            return f"eval score {moved}"
        if self.target_reached is None or not self.finished:
            return f"eval score {moved} so far, target {self.target:g} still open"
        outcome = "REACHED" if self.target_reached else "NOT reached"
        return f"target {self.target:g} {outcome}: eval score {moved}"

    def rows(self) -> list[tuple[str, str]]:
        """What, and its value, for people."""
        ended = "; the data ended behind them" if self.data_ended else ""
        rewards = self.starvation.get("reward_ks")
        # In it servers generate ahead: of a short run more is trained behind it than generated.
        steady = ", without the first step of a start" if self.rated_steps < self.steps else ""
        tokens = [
            _say("{:.0f} a second generated", self.server_tokens_per_second),
            _say("{:.0f} a second trained", self.learner_tokens_per_second),
        ]
        rows = [
            ("steps", f"{self.steps} of {self.total_steps} in {clock(self.training_seconds)}{ended}"),
            ("reward", _say("{:.3f} first step → {:.3f} last step", self.reward_first, self.reward_last)),
            *((f"  {name}", _say("{:.3f} → {:.3f}", *ends)) for name, ends in self._shown_parts()),
            *((name, _say("{:.3f} → {:.3f}", *ends)) for name, ends in self.pass_rates.items()),
            *((name, _say("{:.3f} → {:.3f}", *ends)) for name, ends in self.learned.items()),
            ("alike", self._alike()),
            ("skipped", f"{self.skipped} optimizer steps: the gradient was not finite" * bool(self.skipped)),
            ("samples", _say("{:.2f} a second" + steady, self.samples_per_second)),
            ("tokens", ", ".join(filter(None, tokens)) + steady if any(tokens) else ""),
            (
                "staleness",
                _say("{:.2f} in the mean, {:.0f} at most", self.staleness_mean, self.staleness_max),
            ),
            ("ρ", _say("{:.3f} in the mean; effective sample {:.2f}", self.rho_mean, self.ess_mean)),
            ("publish", _say("{:.2f} s in the mean", self.publish_seconds_mean)),
            (
                "pause",
                _say("{:.2f} s in the mean, {:.2f} at most", self.pause_seconds_mean, self.pause_seconds_max),
            ),
            ("groups", f"{self.evicted} evicted, {self.duplicates} duplicates"),
            ("requeued", _counts({CAUSES.get(c, c): n for c, n in self.requeued_causes.items()})),
            ("wasted", f"{self.wasted_tokens} sampled tokens"),
            ("long prompts", self._long_prompts()),
            ("hard prompts", _say("trained and generated rewards {:.2f} apart (0: alike)", rewards)),
            ("dropped", _counts(self.dropped)),
            *(("changed", told) for told in told_changes(self.changes)),
            *self.others.items(),
        ]
        return [(key, value) for key, value in rows if value]

    def _alike(self) -> str:
        told = (
            "taught nothing: completions of one prompt earned alike; buffer.dynamic_sampling asks for others"
        )
        return f"{many(self.taught_nothing, 'step')} {told}" * bool(self.taught_nothing)

    def _long_prompts(self) -> str:
        of = self.starvation.get
        told = _say("trained groups {:.2f} times as long as generated ones", of("length_ratio"))
        return told + _say("; evicted ones {:.2f} times as trained", of("evicted_length_ratio"))

    def _shown_parts(self) -> list[tuple[str, tuple[float | None, float | None]]]:
        """A single one is the reward itself."""
        return list(self.reward_parts.items()) if len(self.reward_parts) > 1 else []

    def text(self) -> str:
        model = model_told(self.model, self.exports)
        rows = [*self.rows(), ("model", model), ("report", self.report)]
        return "\n".join([f"{self.name}: {self.verdict()}", *columns(rows)])

    def markdown(self) -> str:
        table = "\n".join(
            f"| {key} | {value} |"
            for key, value in (*self.rows(), ("model", model_told(self.model, self.exports)))
        )
        return f"# {self.name}\n\n**{self.verdict()}**\n\n| | |\n| --- | --- |\n{table}\n"

    def json(self) -> str:
        fields = dataclasses.asdict(self) | {"finished": self.finished, "target_reached": self.target_reached}
        return json.dumps(fields, indent=2) + "\n"


def columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """What, and its value, beside each other."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}} {value}" for name, value in rows]


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
    durations = step_seconds(history)
    steady = _steady(records)
    buffer = history.buffer[-1] if history.buffer else {}
    requeued = {cause: int(n) for cause, n in dict(buffer.get("requeued") or {}).items()}
    scores = {v: float(r["score"]) for v, r in sorted(history.scores.items())}
    versions = list(scores)
    pauses = history.series("sync/pause_seconds")[1]
    stale = history.series("staleness/max")[1]
    a_second = partial(_rate, steady, sum(map(seconds_of, steady)))
    return Summary(
        name=config["name"],
        run_dir=str(run_dir),
        steps=max(history.steps, default=0),
        total_steps=config["learner"]["steps"],
        data_ended=history.data_end is not None,
        training_seconds=sum(durations),
        first_score=scores[versions[0]] if versions else None,
        last_score=scores[versions[-1]] if versions else None,
        last_stderr=history.scores[versions[-1]].get("stderr") if versions else None,
        last_scored_version=versions[-1] if versions else None,
        pass_rates=_pass_rates(config, [history.scores[v] for v in versions]),
        target=(config.get("eval") or {}).get("target"),
        reward_first=mean_of(records[:1], "reward/mean"),
        reward_last=mean_of(records[-1:], "reward/mean"),
        reward_parts={
            key.removeprefix("reward_parts/"): ends for key, ends in _ends(records, "reward_parts/").items()
        },
        learned=_learned(records),
        taught_nothing=sum(map(taught_nothing, records)),
        skipped=sum(int(r.get("skipped_updates", 0)) for r in records),
        rho_mean=mean_of(records, "rho/mean"),
        ess_mean=mean_of(records, "ess"),
        rated_steps=len(steady),
        samples_per_second=a_second("samples"),
        learner_tokens_per_second=a_second("tokens"),
        server_tokens_per_second=a_second("servers/tokens"),
        staleness_mean=mean_of(records, "staleness/mean"),
        staleness_max=max(stale, default=None),
        publish_seconds_mean=mean_of(records, "time/publish"),
        pause_seconds_mean=mean_of(records, "sync/pause_seconds"),
        pause_seconds_max=max(pauses, default=None),
        evicted=int(buffer.get("evicted", 0)),
        requeued=sum(requeued.values()),
        requeued_causes=requeued,
        wasted_tokens=sum(int(r.get("servers/wasted_tokens", 0)) for r in records)
        + int(buffer.get("wasted_tokens", 0)),
        starvation=dict(buffer.get("starvation") or {}),
        duplicates=int(buffer.get("duplicates", 0)),
        dropped={rule: int(n) for rule, n in dict(buffer.get("dropped") or {}).items()},
        changes=changes_of(history),
        model=written(run_dir / "model"),
        exports=config["learner"]["checkpoint"]["export"],
        others=others_written(run_dir),
        report=str(run_dir / "report"),
    )


def _steady(records: list[Record]) -> list[Record]:
    """Without the first step of each start, which waits for the servers to start."""
    return [r for r in records[1:] if not r.get("time/first_publish")] or records


def _rate(records: list[Record], seconds: float, key: str) -> float | None:
    count = sum(float(r.get(key, 0)) for r in records)
    return count / seconds if seconds and count else None


def _pass_rates(config: dict[str, Any], scores: list[Record]) -> dict[str, tuple[float | None, float | None]]:
    """A reward model's scores have no zero and no unit: with one in the sum, 1 is no mark to pass."""
    rewards = dict(config.get("rollout", {}).get("rewards") or {}).values()
    if any("model" in reward and reward.get("weight") != 0 for reward in rewards):
        return {}
    return _ends(scores, "pass@")


def _learned(records: list[Record]) -> dict[str, tuple[float | None, float | None]]:
    refers = any("time/reference" in record for record in records)
    penalised = any(record.get("kl/coefficient") for record in records)
    absent = {key for key, there in (("kl/completion", refers), ("kl/coefficient", penalised)) if not there}
    shown = [key for key in LEARNED if key not in absent]
    ends = {LEARNED[key]: (mean_of(records[:1], key), mean_of(records[-1:], key)) for key in shown}
    return {name: both for name, both in ends.items() if None not in both}


def changes_of(history: History) -> list[tuple[int, str]]:
    """Each once, of what was not undone by a checkpoint: the steps that were made again count as of then."""
    made = max(history.steps, default=0)
    found = ((int(r["step"]), change) for r in history.changes for change in r["changes"])
    return list(dict.fromkeys((step, change) for step, change in found if step <= made))


def told_changes(changes: Sequence[tuple[int, str]]) -> list[str]:
    """A line for each start that changed something."""
    steps = dict.fromkeys(step for step, _ in changes)
    return [f"behind step {step}: {', '.join(c for s, c in changes if s == step)}" for step in steps]


def model_told(model: str | None, exports: bool) -> str:
    if model is not None:
        return model
    return "not written yet" if exports else "not written: learner.checkpoint.export=false"


def written(model: Path) -> str | None:
    return str(model) if (model / "config.json").exists() else None


def others_written(run_dir: Path) -> dict[str, str]:
    """Folders beside the model's that a run has written, by what they hold."""
    adapter = run_dir / "adapter"
    found = {
        "adapter": str(adapter) if (adapter / "adapter_config.json").exists() else None,
        "averaged": written(run_dir / "ema_model"),
        "value model": written(run_dir / "value_model"),
    }
    return {name: folder for name, folder in found.items() if folder}


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
