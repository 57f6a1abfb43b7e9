"""How a run ended, written where the learner finds it again: there is then nobody left to wait for."""

import json
from pathlib import Path

from buffer.evaluations import EVALUATIONS
from buffer.whole_file import write_whole
from learner.config import LearnerExperiment
from learner.resuming import newest

FINISHED = "finished.json"
"""In the run's folder: the last step, and whether its model was evaluated."""


def write(experiment: LearnerExperiment, step: int) -> None:
    """The buffer said that the run is over."""
    told = {"step": step, "evaluated": experiment.eval is not None}
    write_whole(Path(experiment.run_dir) / FINISHED, json.dumps(told))


def finished_step(experiment: LearnerExperiment) -> int:
    """The step that the run is over with, where a learner would find nothing to do; 0 where it would: fewer
    steps than wanted, no checkpoint of the last one, no exported model, or no evaluation."""
    run_dir, checkpoint = Path(experiment.run_dir), experiment.learner.checkpoint
    path = newest(run_dir)
    try:
        told = json.loads((run_dir / FINISHED).read_text())
        step, evaluated = told["step"], told["evaluated"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        # Killed while the last version was evaluated: the buffer, which has ended since, wrote of it.
        step = last_evaluated(run_dir)
        evaluated = bool(step)
    saved = path is not None and path.name == f"step-{step:06d}"
    exported = not checkpoint.export or (run_dir / "model" / "config.json").exists()
    scored = experiment.eval is None or evaluated is True
    return step if saved and exported and scored and step >= experiment.learner.steps else 0


def last_evaluated(run_dir: Path) -> int:
    """The version of the run's last evaluation, if that was made; 0 if it was not."""
    try:
        *_, line = (run_dir / EVALUATIONS).read_text().splitlines()
        told = json.loads(line)
        return int(told["version"]) if told["final"] else 0
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return 0
