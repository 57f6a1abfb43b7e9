"""`slipstream generate` and `slipstream evaluate`, as a person sees them: progress, then what came of it."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from buffer.config_errors import placed
from buffer.dotted import fault
from buffer.experiment import FilesSource, load
from launch import model_folder
from launch.experiment import engine_reasons
from launch.overview import clock
from rollout.config import PredictionExperiment
from rollout.engine_log import engine_log

LINE_EVERY_S = 10.0
"""Between lines where there is no terminal."""
STARTING_EVERY_S = 30.0
"""The same while the engine starts."""


def read(config: Path, overrides: list[str], model: Path | None) -> PredictionExperiment:
    """The experiment file as offline prediction reads it.

    Args:
        config: The experiment file.
        overrides: `section.key=value` texts.
        model: Another folder than the file's `model.path`.

    Raises:
        ConfigError: One line per mistake.
        ValueError: The model's folder cannot be one, its engine cannot run here, or there is no such
            episode.
    """
    sys.path.append(os.getcwd())  # adapters and episodes are run here, and found where the services find them
    given = [*overrides, *([f"model.path={json.dumps(str(model))}"] if model else [])]
    experiment = load(config, given, PredictionExperiment)
    faults = model_folder.served("model.path", experiment.model.path, experiment.model.max_length)
    faults += engine_reasons("rollout.engine", experiment.rollout.engine, "model.path", experiment.model.path)
    episode = experiment.rollout.episode
    if episode is not None and (reason := fault(episode, is_async=True)):
        faults.append(f"rollout.episode={episode}: {reason}")
    if faults:
        raise ValueError("\n".join(placed(config, given, each) for each in faults))
    return experiment


def generate(
    experiment: PredictionExperiment,
    source: FilesSource,
    output: Path,
    samples: int,
    temperature: float | None,
    top_p: float,
    top_k: int | None,
) -> str:
    """Complete every prompt of a file.

    Returns:
        One line that says what was written.
    """
    from rollout import offline  # here and below: a mistake in the file must be told at once
    from rollout.groups import SamplingPlan
    from rollout.prediction import refused_lines

    sampling = experiment.rollout.sampling
    chosen = sampling.temperature if temperature is None else temperature
    plan = SamplingPlan(samples, chosen, sampling.max_tokens, top_p, top_k)
    rows = offline.open_rows(experiment, source)
    with engine_log(output.with_suffix(".log")) as terminal, ProgressLine("generating", terminal) as told:
        offline.generate(experiment, rows, plan, output, told)
    refused = refused_lines(output)
    without = f"; {refused} of them refused, each line says why" if refused else ""
    return f"{output}: {len(rows)} rows, {samples} completions each{without}"


def evaluate(experiment: PredictionExperiment, folder: Path, console: Console) -> None:
    """Score the model on the `eval` section's prompts, and show the results.

    Raises:
        ValueError: There is no such section, or what `offline.evaluate` refuses.
    """
    config = experiment.eval
    if config is None:
        raise ValueError("evaluate: the experiment has no `eval` section; expected eval.source at least")
    from rollout import offline

    with engine_log(folder / "engine.log") as terminal, ProgressLine("evaluating", terminal) as told:
        results = offline.evaluate(experiment, config, folder, told)
    console.print(table_of(results))
    target = config.target
    if target is not None and "score" in results:
        verdict = "REACHED" if results["score"] >= target else "NOT reached"
        console.print(f"target {target:g} {verdict}")
    console.print(f"every completion: {folder / 'samples.jsonl'}", soft_wrap=True)


def table_of(results: dict[str, Any]) -> Table:
    table = Table("", "", title=str(results["model"]), show_header=False)
    for name, value in results.items():
        if name == "model":
            continue
        if isinstance(value, dict):
            for part, mean in value.items():
                table.add_row(f"{name}/{part}", f"{mean:.4g}")
        else:
            table.add_row(name, f"{value:.4g}")
    return table


class ProgressLine:
    """Context manager: rows done, rate and time left; a bar on a terminal, lines elsewhere."""

    def __init__(self, doing: str, terminal: TextIO) -> None:
        self._doing = doing
        self._console = Console(file=terminal)
        self._completions = 0
        self._working_since = time.monotonic()
        self._last_line = time.monotonic()
        self._row_came = threading.Event()
        self._filler: threading.Thread | None = None
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(doing, total=None, rate="starting the engine")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._row_came.set()
        if self._filler is not None:
            self._filler.join()
        self._bar.stop()

    def starts(self) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._doing}: the engine starts, which takes half a minute or so")
            self._filler = threading.Thread(target=self._fill_silence, daemon=True)
            self._filler.start()

    def _fill_silence(self) -> None:
        """In a thread: what starts an engine, and the engine, leave the event loop no time."""
        started = time.monotonic()
        while not self._row_came.wait(STARTING_EVERY_S):
            waited = clock(time.monotonic() - started)
            self._console.print(f"{self._doing}: no row is done yet, {waited} since the start")

    def up(self) -> None:
        self._working_since = time.monotonic()

    def written(self, number: int, total: int, line: dict[str, Any]) -> None:
        now = time.monotonic()
        self._row_came.set()
        self._completions += len(line["completions"])
        # Of the engine's whole work: rows of one wave are written within milliseconds of each other.
        seconds = now - self._working_since
        rate = f"{self._completions / seconds:.1f} completions/s" if seconds > 0 else ""
        self._bar.update(self._task, completed=number + 1, total=total, rate=rate)
        if not self._console.is_terminal and (now - self._last_line >= LINE_EVERY_S or number + 1 == total):
            self._last_line = now
            self._console.print(f"{self._doing}: row {number + 1} of {total}{f', {rate}' if rate else ''}")
