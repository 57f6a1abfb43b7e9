"""What an offline stage came to: `RUN_DIR/report/` with a plot of the loss, and the facts in one record."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.history import History
from launch.overview import clock, step_seconds
from launch.plots import draw_stage
from launch.summary import changes_of, columns, model_told, others_written, told_changes, written


@dataclass(frozen=True)
class StageSummary:
    """Values of the first and the last step that has them; before and after of the held-out rows."""

    name: str
    stage: str
    run_dir: str
    steps: int
    total_steps: int
    training_seconds: float
    examples: int
    tokens: int
    """That the loss is over."""
    values: dict[str, tuple[float, float]]
    """Metric → first and last."""
    changes: list[tuple[int, str]]
    """Of the configuration: the last step that was made before, and what was changed."""
    left_out: dict[str, int]
    """Rule → examples."""
    held_out_left_out: int
    model: str | None
    exports: bool
    """Whether the stage is to write one at its end."""
    others: dict[str, str]
    """Folders of what else was trained, by what it is (`summary.others_written`)."""
    report: str

    @property
    def finished(self) -> bool:
        return 0 < self.total_steps <= self.steps

    def rows(self) -> list[tuple[str, str]]:
        """What, and its value, for people."""
        out = ", ".join(f"{n} {rule}" for rule, n in sorted(self.left_out.items()) if n) or "none"
        out += f"; {self.held_out_left_out} of the held-out rows" * bool(self.held_out_left_out)
        values = [(name, f"{first:.4f} → {last:.4f}") for name, (first, last) in self.values.items()]
        return [
            ("steps", f"{self.steps} of {self.total_steps} in {clock(self.training_seconds)}"),
            *values,
            ("examples", f"{self.examples}, {self.tokens} trained tokens"),
            ("left out", out),
            *(("changed", told) for told in told_changes(self.changes)),
            *self.others.items(),
            ("model", model_told(self.model, self.exports)),
        ]

    def text(self) -> str:
        rows = [*self.rows(), ("report", self.report)]
        return "\n".join([f"{self.name} ({self.stage})", *columns(rows)])

    def markdown(self) -> str:
        table = "\n".join(f"| {key} | {value} |" for key, value in self.rows())
        return f"# {self.name}: {self.stage}\n\n| | |\n| --- | --- |\n{table}\n"

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"finished": self.finished}, indent=2) + "\n"


SHOWN = ("loss", "accuracy", "margin", "eval/loss", "eval/perplexity", "eval/accuracy", "eval/margin")
LEFT_OUT = "left_out/"


def write_stage_report(run_dir: Path, config: dict[str, Any]) -> StageSummary:
    """Write or rewrite the report of a stage, finished or not.

    Args:
        run_dir: The run's folder.
        config: Its resolved experiment.
    """
    history = History(run_dir)
    history.refresh()
    summary = summarize_stage(run_dir, config, history)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    pictures = draw_stage(history, folder)
    shown = "\n".join(f"![{p.stem}]({p.name})\n" for p in pictures)
    (folder / "summary.md").write_text(f"{summary.markdown()}\n{shown}")
    (folder / "summary.json").write_text(summary.json())
    return summary


def summarize_stage(run_dir: Path, config: dict[str, Any], history: History) -> StageSummary:
    values = {name: series for name in SHOWN if (series := history.series(name)[1])}
    rules = {key for record in history.steps.values() for key in record if key.startswith(LEFT_OUT)}
    made = max(history.steps, default=0)
    return StageSummary(
        name=config["name"],
        stage=config["stage"]["kind"],
        run_dir=str(run_dir),
        steps=made,
        total_steps=int(history.steps[made]["steps"]) if made else 0,
        training_seconds=sum(step_seconds(history)),
        examples=round(sum(history.series("examples")[1])),
        tokens=round(sum(history.series("tokens")[1])),
        changes=changes_of(history),
        values={name: (series[0], series[-1]) for name, series in values.items()},
        left_out={k.removeprefix(LEFT_OUT): round(sum(history.series(k)[1])) for k in sorted(rules)},
        held_out_left_out=round((history.series("eval/left_out")[1] or [0])[-1]),
        model=written(run_dir / "model"),
        exports=config["learner"]["checkpoint"]["export"],
        others=others_written(run_dir),
        report=str(run_dir / "report"),
    )
