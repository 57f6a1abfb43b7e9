"""The commands that tell before a run what it will take: `plan`, `measure` and `tune`."""

import itertools
from pathlib import Path
from typing import Annotated

import typer

from launch.command_line import Config, Overrides, typed


def plan(
    config: Config,
    overrides: Overrides = None,
    devices: Annotated[int | None, typer.Option(min=1, help="GPUs there are, learner and servers.")] = None,
    device_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Of one; 80, with --cpu what this machine has.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for CPU ranks on one machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What every rank would hold in memory, and what to change if it does not fit; loads no weights."""
    from launch import plan_screen
    from launch.plan import Target
    from launch.plan_stages import plans
    from launch.terminal import open_console

    made = plans(config, overrides or [], Target.of(not cpu, devices, device_gib))
    if as_json:
        typer.echo(plan_screen.as_json(made))
        raise typer.Exit(int(any(each.reasons() for each in made)))
    raise typer.Exit(plan_screen.print_plans(made, open_console(wide=True)))


def measure(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=4, help="Batches of each side; the first is left out.")] = 12,
    train_seconds: Annotated[
        float, typer.Option(min=0, help="Sleep of the learner for each batch while servers are measured.")
    ] = 0.0,
) -> None:
    """Measure servers and learner each alone: one sleeps, or replays, while the other works."""
    from launch.experiment import read
    from launch.measuring import measure as measured
    from launch.terminal import open_console

    experiment = read(config, overrides or [])
    command = typed()
    raise typer.Exit(measured(experiment, steps, train_seconds, command, open_console()))


MOST_TRIED = 65_536
Tried = Annotated[list[int] | None, typer.Option(help="To try; may be given several times.")]


def tune(
    config: Config,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Of the run to calibrate from; else the file's own run_dir.")
    ] = None,
    servers: Tried = None,
    max_staleness: Tried = None,
    groups_per_batch: Tried = None,
    generate_seconds: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Of a group alone on a server; with --train-seconds no run."),
    ] = None,
    train_seconds: Annotated[
        float | None, typer.Option(min=0, help="Of a batch of buffer.groups_per_batch.")
    ] = None,
    publish_seconds: Annotated[float, typer.Option(min=0, help="To send a version.")] = 0.0,
    pause_seconds: Annotated[float, typer.Option(min=0, help="Of a server, to load one.")] = 0.0,
    spread: Annotated[
        float, typer.Option(min=0, max=4, help="Of a group's seconds: σ of their logarithm.")
    ] = 0.5,
    contention: Annotated[
        float,
        typer.Option(min=0, max=1, help="0: groups in hand do not slow each other down; 1: they share."),
    ] = 0.0,
) -> None:
    """Predict throughput, idle time and staleness over max_staleness, servers and batch size."""
    from launch import tuning_screen
    from launch.experiment import read
    from launch.terminal import open_console

    if (generate_seconds is None) != (train_seconds is None):
        raise ValueError("--generate-seconds and --train-seconds: expected both, or neither and a run")
    experiment = read(config, overrides or [], [])
    assumed = None
    if generate_seconds is not None and train_seconds is not None:
        assumed = tuning_screen.Assumed(
            generate_seconds, train_seconds, publish_seconds, pause_seconds, spread, contention
        )
    folder = run_dir or Path(experiment.run_dir)
    tried = (servers or [], max_staleness or [], groups_per_batch or [])
    if min([1, *tried[0], *tried[2]]) < 1 or min([0, *tried[1]]) < 0:
        raise ValueError("--servers, --groups-per-batch: expected 1 or more; --max-staleness: 0 or more")
    if max([0, *itertools.chain(*tried)]) > MOST_TRIED:
        raise ValueError(
            f"--servers, --groups-per-batch, --max-staleness: expected at most {MOST_TRIED}; simulating more "
            "takes hours"
        )
    tuning_screen.tune(experiment, folder, assumed, *tried, open_console())
