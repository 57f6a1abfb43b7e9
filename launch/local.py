"""`slipstream run`: every service of an experiment on this machine.

Consumes: an experiment. Waits for: the services to end by themselves, which they do once the learner has made
its steps and the last evaluation is in. Unblocked by: that, the first failure, or Ctrl-C.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from buffer.errors import FolderInUse
from buffer.experiment import Experiment
from buffer.run_lock import RunLock
from buffer.whole_file import write_whole
from launch import resuming
from launch.experiment import WholeExperiment, addresses, apart, differences, dump, resolved, reward_models
from launch.history import CHANGES, History
from launch.overview import many
from launch.placement import settle_address, usable_cores, visible_gpus
from launch.screen import Screen
from launch.services import gpu_shares, plan_services, training_jobs
from launch.summary import summarize
from launch.supervisor import POLL_S, Failure, Service, Supervisor
from launch.watchdog import Watchdog
from learner import ending
from learner.checkpoint_files import found_in

STOP_S = {
    "learner": 180.0,
    "reference": 20.0,
    "value": 20.0,
    "rollout": 30.0,
    "scorer": 20.0,
    "buffer": 20.0,
}
"""After SIGTERM, in the order in which the roles stop: the learner ends its step with the answers of those
beside it, has the value model write its part of the last checkpoint, and tells the buffer of it; servers then
give the buffer their leases back."""

KEEPERS = ("learner", "value")
"""Services without which there is no checkpoint."""


class RunError(ValueError):
    """Why the run cannot start, in one line."""


Plan = Callable[[WholeExperiment, Path], list[Service]]


def run(experiment: WholeExperiment, command: str, console: Console, plan: Plan | None = None) -> int:
    """Run the experiment until it is finished, fails, or is interrupted.

    Args:
        experiment: Checked already.
        command: What the user typed; the same again resumes.
        console: Where to show it.
        plan: What to start, from the experiment and its written file; None takes `plan_services`.

    Returns:
        The exit code: 0 finished, 1 a service failed, 130 interrupted.
    """
    run_dir = Path(experiment.run_dir)
    with locked(run_dir):
        check_folder(experiment)
        history = History(run_dir, live=True)
        history.refresh()
        if is_finished(experiment, history):
            resuming.check_trained_from(experiment)
            return _tell_finished(experiment, console)
        resuming.check(experiment)
        for service in ("buffer", "learner"):
            RunLock(run_dir, service).release()  # refused before all is started: one that was by hand lives
        experiment = settle(experiment)
        config = write_config(experiment, history, console)
        services = (plan or plan_services)(experiment, config)
        announce(experiment, history, console)
        with (
            Supervisor(services, run_dir / "logs", deadlines(services)) as supervisor,
            Screen(experiment, history, supervisor, console) as screen,
        ):
            failure = watch(experiment, history, supervisor, screen)
            if failure or supervisor.interrupts:
                screen.stopping = True
                screen.say(stopping_line(history, failure))
                for name in supervisor.stop(screen.update):
                    screen.say(f"{name} did not end in time and was killed")
        return conclude(experiment, failure, supervisor.interrupts > 0, command, console)


def watch(e: WholeExperiment, history: History, supervisor: Supervisor, screen: Screen) -> Failure | None:
    """Look after the services until all have ended, one has failed, or the user interrupts."""
    watchdog = Watchdog(e, history, supervisor)
    while supervisor.running and not supervisor.interrupts:
        failure = supervisor.check()
        screen.update()
        for line in watchdog.look():
            screen.say(line)
        if failure:
            return failure
        for role in supervisor.deadlines:
            if supervisor.ended(role) and (failure := _ended_early(e, history, supervisor, role)):
                return failure
        if supervisor.ended("learner") and supervisor.ended("buffer"):
            # A server whose engine came up too late has nobody left to tell it that the run is over; one that
            # is about to end may die of the signal, which is no failure any more.
            supervisor.stop(screen.update)
            screen.update()
            return None
        time.sleep(POLL_S)
    screen.update()
    return supervisor.check()


def stopping_line(history: History, failure: Failure | None) -> str:
    """Why, and what is waited for: a checkpoint needs a step, the learner and its value model."""
    stays = failure is None or failure.service not in KEEPERS
    keeps = stays and max(history.steps, default=0) > 0
    what = f"{failure.service} {failure.reason}; stopping the others" if failure else "stopping"
    kept = ": the learner writes a checkpoint" if keeps else ""
    most = f", for {STOP_S['learner']:.0f} s at most" if stays else ""
    return f"{what}{kept}{most}; Ctrl-C {'twice' if failure else 'again'} ends everything at once"


def _ended_early(e: WholeExperiment, history: History, supervisor: Supervisor, role: str) -> Failure | None:
    """When all services of a role have ended in order, by themselves or because something else than this told
    them to: what is missing, if anything is. Servers have to evaluate the last version too."""
    history.refresh()
    made = max(history.steps, default=0)
    over = made >= e.learner.steps or history.data_end is not None
    if over and (role != "rollout" or _evaluated(e, history)):
        return None
    *_, service = (c for c in supervisor.children if c.service.role == role)
    name, reason = service.service.name, f"ended at step {made} of {e.learner.steps}"
    return Failure(name, reason, service.failure().lines, service.log)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; the kernel lets go of it when this process ends, however it does.

    Raises:
        RunError: Another process holds it, or it cannot be written.
    """
    try:
        with writing(run_dir):
            if run_dir.exists() and not run_dir.is_dir():
                raise RunError(f"run_dir={run_dir}: is no folder; expected one, which need not exist yet")
            lock = RunLock(run_dir, "run", grace_s=0)
    except FolderInUse as held:
        raise RunError(str(held)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Name the folder where writing in it fails: the system's own reason often names nothing."""
    try:
        yield
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: cannot be written: {error.strerror}") from None


def is_finished(e: WholeExperiment, history: History) -> bool:
    """Whether all steps are made that there is data for, the last version is evaluated, and its model is
    written."""
    run_dir, end = Path(e.run_dir), ending.read(Path(e.run_dir))
    if end is None or end.step != max(history.steps, default=0):
        return False
    enough = end.suffices(e.learner.steps, e.data.epochs)
    return enough and end.has_model(run_dir, e.learner) and _evaluated(e, history)


def _evaluated(e: WholeExperiment, history: History) -> bool:
    last = max(history.steps, default=0)  # more than are wanted now, where `learner.steps` was lowered
    return e.eval is None or last in history.scores


def settle(e: WholeExperiment) -> WholeExperiment:
    """The experiment with addresses whose ports are free, and a weight transport that its GPUs allow."""
    taken: set[str] = set()
    found = {key: settle_address(key, address, taken) for key, address in addresses(e).items()}
    sync = e.sync.model_copy(update={"address": found["sync.address"]})
    if sync.backend == "auto" and visible_gpus() and gpu_shares(e) is None:
        # NCCL refuses two ranks on one device, and learner and server share one here.
        sync = sync.model_copy(update={"backend": "gloo"})
    buffer = e.buffer.model_copy(update={"address": found["buffer.address"]})
    scorers = {
        name: reward.model_copy(update={"address": found[f"rollout.rewards.{name}.address"]})
        for name, reward in reward_models(e).items()
    }
    rollout = e.rollout.model_copy(update={"rewards": e.rollout.rewards | scorers})
    learner = e.learner
    jobs = {
        service: of.model_copy(update={"address": found[f"{of.KEY}.address"]})
        for service, of in apart(learner).items()
    }
    if "reference" in jobs:
        learner = learner.model_copy(update={"reference": jobs["reference"]})
    if "value" in jobs and learner.value is not None:
        value = learner.value.model_copy(update={"ranks": jobs["value"]})
        learner = learner.model_copy(update={"value": value})
    return e.model_copy(update={"buffer": buffer, "sync": sync, "rollout": rollout, "learner": learner})


def check_folder(e: Experiment) -> None:
    """Before anything in the run's folder is looked at.

    Raises:
        RunError: It holds a run of another name or command.
    """
    path = Path(e.run_dir) / "config.yaml"
    if not path.exists():
        return
    old, new = resolved(path), e.model_dump(mode="json")
    if old.get("name") != e.name:
        raise RunError(
            f"{path.parent}: holds the run {old.get('name')!r}, not {e.name!r}; take another run_dir"
        )
    stages = (found.get("stage") for found in (old, new))
    there, here = (stage.get("kind") if isinstance(stage, dict) else "run" for stage in stages)
    if there != here:
        raise RunError(f"{path.parent}: holds a run of `slipstream {there}`; take another run_dir")


def write_config(e: Experiment, history: History, console: Console) -> Path:
    """Write the resolved experiment beside the run; tell what changed when the run is resumed, and keep that
    for the summary, which compares what was before with what is behind."""
    path, step = Path(e.run_dir) / "config.yaml", max(history.steps, default=0)
    changes = _changes(e)
    if changes:
        told = f"changed since the last start: {', '.join(changes)}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    with writing(path.parent):
        if changes and step:
            with (path.parent / CHANGES).open("a") as file:
                file.write(json.dumps({"step": step, "changes": changes}) + "\n")
        write_whole(path, dump(e))
    return path


def tell_unmade(e: Experiment, console: Console) -> None:
    """Of a run that is finished: what this command asks for otherwise than the last start of it did. How
    weights travel and what is logged trained nothing."""
    if changes := [c for c in _changes(e) if not c.startswith(("sync.", "logging."))]:
        told = (
            f"changed since it was made, and not trained: {', '.join(changes)}; take another run_dir for it"
        )
        console.print(told, highlight=False, markup=False, soft_wrap=True)


def _changes(e: Experiment) -> list[str]:
    """Since the last start, where there was one."""
    path = Path(e.run_dir) / "config.yaml"
    if not path.exists():
        return []
    # A port that was free may be another one at each start; that is no change of the experiment.
    found = differences(resolved(path), e.model_dump(mode="json"))
    return [change for change in found if ".address " not in change]


def keep_config(e: WholeExperiment) -> None:
    """Write the resolved experiment of services that are started one by one, for the report; a run has one
    buffer. What `slipstream run` wrote stays: its addresses may be others."""
    path = Path(e.run_dir) / "config.yaml"
    if path.exists():
        return
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, dump(e))


def deadlines(services: Sequence[Service]) -> dict[str, float]:
    """Seconds that each role has to stop, in the order in which they do."""
    roles = dict.fromkeys(service.role for service in services)
    return {role: s for kind, s in STOP_S.items() for role in roles if role.partition("-")[0] == kind}


def announce(e: WholeExperiment, history: History, console: Console) -> None:
    """What is about to run, before anything slow starts."""
    source = e.data.train
    data = source.dataset if source.kind == "reasoning_gym" else getattr(source, "path", source.kind)
    servers = many(e.rollout.servers, "rollout server")
    models = len(reward_models(e))
    scorers = f"{many(models, 'scorer')}, " if models else ""
    ranks = ", ".join(many(job.processes, f"{name} rank") for name, job in training_jobs(e).items())
    device = f"{len(visible_gpus())} GPU" if visible_gpus() else f"{len(usable_cores())} cores"
    oldest = e.buffer.max_staleness
    lines = {
        "model": f"{e.model.path} · {e.model.dtype}, at most {e.model.max_length} tokens",
        "data": f"{data}",
        "training": f"{many(e.learner.steps, 'step')} of {many(e.buffer.groups_per_batch, 'group')} × "
        f"{many(e.rollout.group_size, 'completion')} · {e.learner.algorithm.at_age(oldest).told}, "
        f"staleness at most {oldest}",
        "rewards": " + ".join(f"{r.weight:g} · {name}" for name, r in e.rollout.rewards.items() if r.weight),
        "services": f"buffer, {servers}, {scorers}{ranks} on {device}",
        "logs": f"{e.run_dir}/logs",
    }
    console.print(f"[bold]slipstream[/] {e.name} → {e.run_dir}", highlight=False)
    for key, text in lines.items():
        console.print(f"  [dim]{key:<9}[/] {text}", highlight=False, soft_wrap=True)
    tell_resuming(history, Path(e.run_dir), console)


def tell_resuming(history: History, run_dir: Path, console: Console) -> None:
    """Where a run goes on that was started before."""
    made = max(history.steps, default=0)
    if made:
        kept = found_in(run_dir / "checkpoints")
        where = kept[-1].name if kept else "the first step"
        steps = f"{made} step{'s were' if made > 1 else ' was'} made"
        console.print(f"  [dim]{'resuming':<9}[/] from {where}; {steps}", highlight=False)


def conclude(
    e: Experiment, failure: Failure | None, interrupted: bool, command: str, console: Console
) -> int:
    """The last words: what failed or how to go on, or the summary of a finished run."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    kept = found_in(Path(e.run_dir) / "checkpoints")
    onward = "To go on from the last checkpoint" if kept else "There is no checkpoint yet. To start again"
    if interrupted:
        say(f"stopped. {onward}: {command}")
        return 130
    if failure:
        for line in failure.lines:
            say(f"  {failure.service} │ {line}")
        if failure.cause:
            say(f"  {failure.service} │ the last error in its log: {failure.cause}")
        say(f"{failure.service} {failure.reason}; whole log: {failure.log}")
        say(f"{onward} once that is mended: {command}")
        return 1
    from launch.report import write_report  # matplotlib: not before the run has started

    say(write_report(Path(e.run_dir)).text())
    return 0


def _tell_finished(e: WholeExperiment, console: Console) -> int:
    run_dir = Path(e.run_dir)
    summary = summarize(run_dir)
    if not Path(summary.report).is_dir():  # who interrupted it after its last step has none yet
        from launch.report import write_report

        summary = write_report(run_dir)
    console.print(summary.text(), highlight=False, markup=False, soft_wrap=True)
    tell_unmade(e, console)
    more = "learner.steps" if summary.steps >= e.learner.steps else "data.epochs"
    console.print(
        f"{e.run_dir} is finished. To train on, raise {more}; to start afresh, take another run_dir",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0
