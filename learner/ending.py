"""How a run ended, written where whoever gives the same command again finds it: to tell what is left to do of
what that asks for now, and because there may be nobody left to wait for."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from buffer.evaluations import EVALUATIONS
from buffer.whole_file import write_whole
from learner.config import LearnerExperiment, TrainingConfig
from learner.resuming import newest

FINISHED = "finished.json"
"""In the run's folder: an `End`."""
UNREADABLE = (OSError, ValueError, RecursionError, TypeError, KeyError)


@dataclass(frozen=True, slots=True)
class End:
    """Of a run that made the steps which were asked for, or those that there was data for."""

    step: int
    """The last."""
    evaluated: bool
    """Whether its model was."""
    exported: bool
    """Whether its model is what lies in `model/`: one that does is of an earlier end otherwise."""
    epochs: int | None
    """`data.epochs`, where these were used up; None where the steps were the limit."""
    over: bool = True
    """Whether the buffer, where there is one, said that it knows: it may be gone since."""

    def suffices(self, steps: int | None, epochs: int | None) -> bool:
        """Whether no more steps are to be made now, by `learner.steps` and `data.epochs`."""
        used_up = self.epochs is not None and epochs is not None and epochs <= self.epochs
        return used_up or (steps is not None and self.step >= steps)

    def has_model(self, run_dir: Path, learner: TrainingConfig) -> bool:
        """Whether the last step's model is there, if it is wanted."""
        there = self.exported and (run_dir / "model" / "config.json").exists()
        return there or not learner.checkpoint.export


def write(run_dir: Path, end: End) -> None:
    write_whole(run_dir / FINISHED, json.dumps(asdict(end)))


def read(run_dir: Path) -> End | None:
    """The run's last end, if it came to one; its `step` says whether others were made since."""
    try:
        told = json.loads((run_dir / FINISHED).read_text())
        step, evaluated = int(told["step"]), told["evaluated"] is True
        # What an older one does not tell is taken from what lies there.
        exported, over = told.get("exported", True) is True, told.get("over", True) is True
        epochs = told.get("epochs")
        return End(step, evaluated, exported, None if epochs is None else int(epochs), over)
    except UNREADABLE:
        return None


def finished_step(experiment: LearnerExperiment) -> int:
    """The step that the run is over with, where a learner would find nothing to do; 0 where it would: more
    steps are wanted, there is no checkpoint of the last one, no exported model of it, or no evaluation."""
    end = _over(experiment)
    return end.step if end and end.has_model(Path(experiment.run_dir), experiment.learner) else 0


def unexported_step(experiment: LearnerExperiment) -> int:
    """The step that the run is over with, where all that is missing is its exported model; else 0. The buffer
    has nothing to do any more then."""
    end = _over(experiment)
    return end.step if end and not end.has_model(Path(experiment.run_dir), experiment.learner) else 0


def _over(experiment: LearnerExperiment) -> End | None:
    """The end of a run that wants no more steps, has a checkpoint of the last, and is evaluated."""
    run_dir = Path(experiment.run_dir)
    end, path = read(run_dir), newest(run_dir)
    if end is None or path is None or path.name != f"step-{end.step:06d}":
        return None
    # The learner may have been killed while that was made: the buffer, which has ended since, wrote of it.
    evaluated = last_evaluated(run_dir) == end.step
    over = end.over or evaluated
    scored = experiment.eval is None or end.evaluated or evaluated
    return end if over and scored and end.suffices(experiment.learner.steps, experiment.data.epochs) else None


def last_evaluated(run_dir: Path) -> int:
    """The version of the run's last evaluation, if that was made; 0 if it was not."""
    try:
        *_, line = (run_dir / EVALUATIONS).read_text().splitlines()
        told = json.loads(line)
        return int(told["version"]) if told["final"] else 0
    except UNREADABLE:
        return 0
