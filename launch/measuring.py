"""`slipstream measure`: each side of a run alone, on this machine, so that neither waits for the other.

The servers generate for a learner that sleeps, once with as many groups in hand as they are allowed and once
with fewer, which tells how much groups slow each other down; and the learner trains on what they made. All
are runs like any other, in folders below the run's own, which `slipstream tune` reads.
"""

import shutil
from pathlib import Path

from rich.console import Console

from launch import local
from launch.calibration import Alone, alone
from launch.experiment import WholeExperiment
from launch.history import History
from launch.tuning import decoded_groups
from learner.config import RECORDED

SERVERS, FEW, LEARNER = "alone/servers", "alone/servers-few", "alone/learner"
"""Folders in the run's."""


def measure(
    experiment: WholeExperiment,
    steps: int,
    train_seconds: float,
    command: str,
    console: Console,
    plan: local.Plan | None = None,
) -> int:
    """Measure both sides, one after the other, and tell what they take.

    Args:
        experiment: Checked already.
        steps: Batches of each side.
        train_seconds: That the learner sleeps for each while the servers are measured.
        command: What the user typed.
        console: To print on.
        plan: As of `local.run`.

    Returns:
        The exit code of the run that failed, or 0.
    """
    if Path(experiment.run_dir, "alone").exists():
        shutil.rmtree(Path(experiment.run_dir, "alone"))
    runs = [servers_alone(experiment, steps, train_seconds), learner_alone(experiment, steps)]
    if experiment.rollout.max_groups > 1:
        runs.insert(1, with_few(experiment, steps, train_seconds))
    for of in runs:
        code = local.run(of, command, console, plan)
        if code:
            return code
    console.print(told(read_alone(experiment, Path(experiment.run_dir))), highlight=False)
    return 0


def servers_alone(e: WholeExperiment, steps: int, train_seconds: float) -> WholeExperiment:
    changed = _changed(e, SERVERS, steps)
    learner = changed.learner.model_copy(update={"idle_s": train_seconds, "loop": None})
    return changed.model_copy(update={"learner": learner})


def with_few(e: WholeExperiment, steps: int, train_seconds: float) -> WholeExperiment:
    """The servers alone, with a quarter of the groups in hand."""
    rollout = e.rollout.model_copy(update={"max_groups": max(1, e.rollout.max_groups // 4)})
    few = servers_alone(e.model_copy(update={"rollout": rollout}), max(4, steps // 2), train_seconds)
    return few.model_copy(update={"run_dir": f"{e.run_dir}/{FEW}"})


def learner_alone(e: WholeExperiment, steps: int) -> WholeExperiment:
    """One server is enough: it answers at once. Learned rewards are in the record, so no scorer starts."""
    changed = _changed(e, LEARNER, steps)
    recorded = str(Path(e.run_dir) / SERVERS / RECORDED)
    functions = {"recorded": {"function": "rollout.rewards:exact_number"}}
    rollout = changed.rollout.model_copy(update={"recorded": recorded, "servers": 1})
    rollout = type(rollout).model_validate(rollout.model_dump() | {"rewards": functions})
    # Who keeps nothing of a version needs no GPU to receive it.
    sync = changed.sync.model_copy(update={"backend": "gloo"})
    return changed.model_copy(update={"rollout": rollout, "sync": sync})


def _changed(e: WholeExperiment, folder: str, steps: int) -> WholeExperiment:
    checkpoint = e.learner.checkpoint.model_copy(update={"every": steps, "every_s": None, "export": False})
    learner = e.learner.model_copy(update={"steps": steps, "checkpoint": checkpoint})
    data = e.data.model_copy(update={"epochs": None})
    changed = {"run_dir": f"{e.run_dir}/{folder}", "learner": learner, "eval": None, "data": data}
    return e.model_copy(update=changed)


def read_alone(experiment: WholeExperiment, run_dir: Path) -> Alone:
    """What both sides of an experiment took that were measured in its folder or another.

    Raises:
        ValueError: One of them has not been measured.
    """
    servers, few, learner = (History(run_dir / folder) for folder in (SERVERS, FEW, LEARNER))
    for history in (servers, few, learner):
        history.refresh()
    decoded = decoded_groups(experiment.rollout)
    return alone(servers, few if few.steps else None, learner, decoded)


def is_measured(run_dir: Path) -> bool:
    return all((run_dir / folder / "metrics.jsonl").is_file() for folder in (SERVERS, LEARNER))


def told(of: Alone) -> str:
    both, slower = of.generate + of.train, max(of.generate, of.train)
    return (
        f"alone, the servers take {of.generate:.2f} s for a batch and the learner {of.train:.2f} s, of which "
        f"sending {of.costs.send:.2f}: one after the other {both:.2f} s a step, beside each other "
        f"{slower:.2f} at best, {both / slower:.2f} times as fast"
    )
