"""The command `slipstream`. Imports nothing slow: `--help` and a mistake in the config answer at once."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from buffer.ownership import keep_others_from_writing
from launch.cli_convert import convert
from launch.cli_planning import measure, plan, tune
from launch.cli_prediction import chat, evaluate, generate
from launch.command_line import Config, Overrides, fail, typed, writing

if TYPE_CHECKING:
    from launch.experiment import WholeExperiment

UsageError: Any = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; it has no public name there."""

app = typer.Typer(
    name="slipstream",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

RUNS, BEFORE, STAGES, MODELS = "Runs", "Before a run", "One stage", "With a model"
SERVICES = "One service of a run, each in a terminal or on a machine of its own"


def _told_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"slipstream {version('slipstream-rl')}")
        raise typer.Exit


@app.callback()
def _main(
    told: Annotated[
        bool, typer.Option("--version", help="Show which one this is.", callback=_told_version, is_eager=True)
    ] = False,
) -> None:
    keep_others_from_writing()


@app.command(rich_help_panel=RUNS)
def run(config: Config, overrides: Overrides = None) -> None:
    """Run every service of an experiment on this machine; the same command again resumes it."""

    from launch import local  # here and below: --help must not pay for what it does not need
    from launch.experiment import read
    from launch.terminal import open_console

    experiment = read(config, overrides or [])
    raise typer.Exit(local.run(experiment, typed(), open_console()))


PipelineOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override the pipeline's own file: run_dir=runs/second"),
]


@app.command(rich_help_panel=RUNS)
def pipeline(
    config: Annotated[Path, typer.Argument(metavar="PIPELINE", help="The pipeline's YAML file.")],
    overrides: PipelineOverrides = None,
) -> None:
    """Run stages one after the other, such as SFT, reward model and RL; the same command again resumes."""
    from launch import pipeline
    from launch.terminal import open_console

    stages = pipeline.read(config, overrides or [])
    command = typed()
    raise typer.Exit(pipeline.run(stages, command, open_console()))


@app.command(rich_help_panel=RUNS)
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder.")],
) -> None:
    """Write plots, sample completions and a summary of a run into RUN_DIR/report."""
    from launch.report import write_report

    typer.echo(write_report(run_dir).text())


@app.command(rich_help_panel=BEFORE)
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="An experiment to check too.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """What this machine has, and whether it is enough to run here."""
    from launch.doctor import diagnose, print_diagnosis
    from launch.terminal import open_console

    raise typer.Exit(print_diagnosis(diagnose(config, overrides or []), open_console()))


for command in (plan, measure, tune):
    app.command(rich_help_panel=BEFORE)(command)


@app.command(rich_help_panel=BEFORE)
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, on a disk that stays.")],
) -> None:
    """Make the keys by which the services of a run on several machines know each other."""
    from buffer.keys import PUBLIC, ROLES, make_keys

    with writing(folder):
        make_keys(folder)
    typer.echo(f"written: {folder}; set security.keys={folder} in the experiment file")
    typer.echo(f"each host needs {PUBLIC} and the secret of what runs there, over a safe channel:")
    for role in ROLES:
        typer.echo(f"  {role:<9} {folder / PUBLIC} {folder / f'{role}.secret'}")


@app.command(rich_help_panel=STAGES)
def sft(config: Config, overrides: Overrides = None) -> None:
    """Teach a model the responses of the data; the same command again resumes it."""
    _offline("sft", config, overrides)


@app.command(rich_help_panel=STAGES)
def reward(config: Config, overrides: Overrides = None) -> None:
    """Train a reward model on scored responses; the same command again resumes it."""
    _offline("reward", config, overrides)


@app.command(rich_help_panel=STAGES)
def dpo(config: Config, overrides: Overrides = None) -> None:
    """Train a model on preferences directly (DPO, IPO); the same command again resumes it."""
    _offline("dpo", config, overrides)


def _offline(kind: str, config: Path, overrides: list[str] | None) -> NoReturn:
    from launch.offline import read_stage, run_stage
    from launch.terminal import open_console

    experiment = read_stage(config, overrides or [], kind)
    raise typer.Exit(run_stage(experiment, typed(), open_console()))


@app.command(rich_help_panel=SERVICES)
def buffer(
    config: Annotated[str, typer.Argument(metavar="CONFIG|inspect", help="Experiment file, or `inspect`.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...|RUN_DIR")] = None,
) -> None:
    """Run the buffer alone; or `buffer inspect RUN_DIR`: what a run's buffer holds."""
    if config == "inspect":
        if len(overrides or []) != 1:
            raise ValueError("buffer inspect: expected one RUN_DIR")
        return _inspect(Path((overrides or [])[0]))
    experiment = _check(Path(config), overrides, "buffer")
    from launch.local import keep_config

    keep_config(experiment)
    _become("buffer", config, *(overrides or []))


@app.command(rich_help_panel=SERVICES)
def rollout(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="The server's name, its own within the run.")] = "server-0",
) -> None:
    """Run one rollout server; it may join and leave a run at any time."""
    from buffer.experiment import folder_name

    _check(config, overrides, "rollout")
    try:
        folder_name(name)
    except ValueError as error:
        raise ValueError(f"--name {name}: {error}") from None
    _become("rollout", str(config), "--name", name, *(overrides or []))


@app.command(rich_help_panel=SERVICES)
def scorer(
    config: Config,
    name: Annotated[str, typer.Option(help="Which reward model of rollout.rewards.")],
    overrides: Overrides = None,
) -> None:
    """Serve one reward model to the rollout servers, for the whole run."""
    from launch.experiment import check_scorer

    check_scorer(config, overrides or [], name)
    _become("rollout.scorer", str(config), "--name", name, *(overrides or []))


@app.command(rich_help_panel=SERVICES)
def learner(config: Config, overrides: Overrides = None) -> None:
    """Run the learner's ranks on this machine; for more machines use torchrun with `-m learner`."""
    from launch.services import torchrun

    experiment = _check(config, overrides, "learner")
    command = [*torchrun(experiment.learner.processes), "learner", str(config), *(overrides or [])]
    os.execv(command[0], command)


@app.command(rich_help_panel=SERVICES)
def reference(config: Config, overrides: Overrides = None) -> None:
    """Run the frozen reference's own ranks on this machine (learner.reference), for the whole run."""
    _become_job("reference", "learner.reference", "reference", config, overrides)


@app.command(rich_help_panel=SERVICES)
def value(config: Config, overrides: Overrides = None) -> None:
    """Run the value model's own ranks on this machine (learner.value.ranks), for the whole run."""
    _become_job("value", "learner.value.ranks", "value model", config, overrides)


def _become_job(service: str, key: str, model: str, config: Path, overrides: list[str] | None) -> NoReturn:
    """Torchrun, with the ranks of a model that has its own."""
    from launch.experiment import apart
    from launch.services import JOBS, torchrun

    of = apart(_check(config, overrides, service).learner).get(service)
    if of is None:
        raise ValueError(f"{config}: {key}: missing; without it the {model} is on the learner's own ranks")
    command = [*torchrun(of.processes), JOBS[service][0], str(config), *(overrides or [])]
    os.execv(command[0], command)


for command in (generate, evaluate, chat):
    app.command(rich_help_panel=MODELS)(command)
app.add_typer(convert, name="convert", rich_help_panel=MODELS)


INSPECTED = {
    "published": "policy version that the servers hold",
    "frontier": "batches put together",
    "trained": "batches that the learner made a version of",
    "committed": "batches in every checkpoint that a resume may start from, and deleted here",
}
"""What numbers of `buffer inspect` count, where their names do not say it."""


def _inspect(run_dir: Path) -> None:
    """One line a fact; a mapping's entries on the same line."""
    from buffer.inspection import inspect

    for name, value in inspect(run_dir).items():
        shown = _entries(value) if isinstance(value, dict) else "none" if value is None else str(value)
        about = f"   {INSPECTED[name]}" if name in INSPECTED else ""
        typer.echo(f"{name.replace('_', ' '):<16} {shown}{about}")


def _entries(mapping: dict[Any, Any]) -> str:
    told = (f"{k}: ({_entries(v)})" if isinstance(v, dict) else f"{k}: {v}" for k, v in mapping.items())
    return ", ".join(told) or "none"


def _check(config: Path, overrides: list[str] | None, service: str) -> "WholeExperiment":
    from launch import resuming
    from launch.experiment import read

    experiment = read(config, overrides or [], [service])
    resuming.check(experiment, [service])
    return experiment


def _become(module: str, *arguments: str) -> None:
    """Turn this process into `python -m module`: signals and exit codes are then the service's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main() -> None:
    """Every mistake of the user is one line on stderr and exit code 2, never a traceback."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except UsageError as error:
        asked = error.ctx.command_path if error.ctx else "slipstream"
        told = error.format_message()
        fail(f"{told}{'' if told.endswith(('.', '?')) else '.'} See `{asked} --help`.")
    except ValueError as error:
        fail(str(error))  # of ours, always the user's mistake, told in full by its text
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        fail(f"{error.filename}: {error.strerror}" if named else str(error))
