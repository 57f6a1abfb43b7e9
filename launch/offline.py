"""`slipstream sft|reward|dpo`: an offline stage's ranks on this machine, watched, with a summary at the end.

Consumes: an experiment. Waits for: the learner to end by itself, which it does once it has made its steps.
Unblocked by: that, its failure, or Ctrl-C.
"""

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from buffer.config_errors import ConfigError, placed
from buffer.experiment import load
from buffer.processor import COMPUTING_ENVIRONMENT
from launch import model_folder
from launch.experiment import check_kind, missing_rows, missing_start, own_models, unknown_readers
from launch.history import History, Record
from launch.local import (
    check_folder,
    conclude,
    deadlines,
    locked,
    stopping_line,
    tell_resuming,
    tell_unmade,
    write_config,
)
from launch.overview import clock, seconds_left
from launch.resuming import check_checkpoint, check_trained_from
from launch.screen import LONGEST_SILENCE_S
from launch.services import torchrun
from launch.supervisor import POLL_S, Failure, Service, Supervisor
from learner import ending
from learner.families import Head
from learner.offline.config import OfflineExperiment

REFRESH_S = 0.5
TOLD = ("loss", "accuracy", "margin", "eval/loss", "eval/accuracy", "eval/margin")


def load_stage(path: str | Path, overrides: list[str], kind: str | None) -> OfflineExperiment:
    """Read the file of a stage of this kind, or of any where None; files that it names need not exist yet.

    Raises:
        ConfigError: One line per mistake.
    """
    check_kind(path, overrides, "stage")
    experiment = load(path, overrides, OfflineExperiment)
    found = experiment.stage.kind
    if kind is not None and found != kind:
        raise ConfigError(f"{path}: stage.kind is {found}; run it with `slipstream {found}`")
    return experiment


def read_stage(path: str | Path, overrides: list[str], kind: str) -> OfflineExperiment:
    """Read and check everything that can be checked without loading the model.

    Raises:
        ConfigError: One line per mistake.
    """
    experiment = load_stage(path, overrides, kind)
    model = experiment.model
    head: Head = "score" if kind == "reward" else "vocabulary"
    layout = experiment.learner.parallel
    reasons = (
        own_models(experiment)
        + missing_rows(experiment)
        + unknown_readers(experiment)
        + missing_start(experiment.learner)
    )
    reasons += model_folder.trained("model.path", model.path, model.max_length, layout, head)
    if reasons:
        raise ConfigError("\n".join(placed(path, overrides, reason) for reason in reasons))
    return experiment


def run_stage(experiment: OfflineExperiment, command: str, console: Console) -> int:
    """Run the stage until it is finished, fails, or is interrupted.

    Args:
        experiment: Checked already.
        command: What the user typed; the same again resumes.
        console: Where to show it.

    Returns:
        The exit code: 0 finished, 1 failed, 130 interrupted.
    """
    run_dir = Path(experiment.run_dir)
    with locked(run_dir):
        check_folder(experiment)
        history = History(run_dir, live=True)
        history.refresh()
        if is_finished(experiment, history):
            check_trained_from(experiment)
            from launch.report import write_report  # matplotlib: not before it is needed

            summary = write_report(run_dir).text()
            end = ending.read(run_dir)
            more = "data.epochs" if end is not None and end.epochs is not None else "learner.steps"
            told = f"{run_dir} is finished. To train on, raise {more}; to start afresh, take another run_dir"
            console.print(f"{summary}\n{told}", highlight=False, markup=False, soft_wrap=True)
            tell_unmade(experiment, console)
            return 0
        check_checkpoint(experiment)
        config = write_config(experiment, history, console)
        command_line = [*torchrun(experiment.learner.processes), "learner.offline", str(config)]
        learner = Service(
            "learner", "learner", command_line, COMPUTING_ENVIRONMENT, stop_signal_to="children"
        )
        title = f"[bold]slipstream {experiment.stage.kind}[/] {experiment.name} → {run_dir}"
        console.print(title, highlight=False, soft_wrap=True)
        tell_resuming(history, run_dir, console)
        with (
            Supervisor([learner], run_dir / "logs", deadlines([learner])) as supervisor,
            ProgressLine(history, console) as line,
        ):
            failure = watch(supervisor, line)
            if failure is None and not supervisor.interrupts:
                failure = ended_early(experiment, history, supervisor)
            if failure or supervisor.interrupts:
                # Its only service that failed leaves nobody to stop.
                if failure is None:
                    line.say(stopping_line(history, failure))
                for name in supervisor.stop(line.update):
                    line.say(f"{name} did not end in time and was killed")
        return conclude(experiment, failure, supervisor.interrupts > 0, command, console)


def is_finished(e: OfflineExperiment, history: History) -> bool:
    """Whether all steps are made, no more are asked for now, and the last one's model is evaluated and
    written as is asked for now."""
    run_dir, end = Path(e.run_dir), ending.read(Path(e.run_dir))
    if end is None or end.step != max(history.steps, default=0):
        return False
    scored = e.eval is None or end.evaluated
    return scored and end.suffices(e.learner.steps, e.data.epochs) and end.has_model(run_dir, e.learner)


def watch(supervisor: Supervisor, line: "ProgressLine") -> Failure | None:
    """Look after the learner until it has ended or the user interrupts."""
    while supervisor.running and not supervisor.interrupts:
        failure = supervisor.check()
        line.update()
        if failure:
            return failure
        time.sleep(POLL_S)
    line.refresh()
    return supervisor.check()


def ended_early(e: OfflineExperiment, history: History, supervisor: Supervisor) -> Failure | None:
    """What is missing of a stage whose learner ended in order: somebody else told it to stop, or a function
    of the user's ended its process. No pipeline is to go on behind it."""
    if is_finished(e, history):
        return None
    (child,) = supervisor.children
    made = max(history.steps, default=0)
    return replace(child.failure(), reason=f"ended behind step {made}, before the stage was finished")


class ProgressLine:
    """Context manager: one live line on a terminal, one line a step everywhere else."""

    def __init__(self, history: History, console: Console) -> None:
        self._history = history
        self._console = console
        self._due = 0.0
        self._started = self._spoke = time.monotonic()
        self._progress: Progress | None = None
        if console.is_terminal:
            step, told = TextColumn("{task.description}"), TextColumn("{task.fields[told]}")
            self._progress = Progress(step, BarColumn(), TimeRemainingColumn(), told, console=console)
            self._task = self._progress.add_task("starting", total=None, told="")

    def __enter__(self) -> "ProgressLine":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self) -> None:
        """Show what is new, twice a second at most."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REFRESH_S
            self.refresh()

    def refresh(self) -> None:
        for record in self._history.refresh():
            made, total = record["step"], record["steps"]
            step = f"step {made} of {total}"
            if self._progress:
                self._progress.update(
                    self._task, description=step, completed=made, total=total, told=told_of(record)
                )
            else:
                left = seconds_left(self._history, total)
                self.say(f"{step}: {told_of(record)}{f'  {clock(left)} left' if left else ''}")
        if not self._progress and time.monotonic() - self._spoke >= LONGEST_SILENCE_S:
            fresh = self._history.since_opened(list(self._history.steps.values()))
            doing = f"at work behind step {fresh[-1]['step']}" if fresh else "starting"
            self.say(f"still {doing} · {clock(time.monotonic() - self._started)} since the start")


def told_of(record: Record) -> str:
    """What a step's record says, in a few words."""
    facts = [f"{name} {float(record[name]):.4f}" for name in TOLD if record.get(name) is not None]
    rate = float(record.get("tokens/s") or 0)
    return "  ".join([*facts, *([f"{rate:.0f} tokens/s"] if rate else [])])
