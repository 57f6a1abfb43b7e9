"""The command `slipstream`. Imports nothing slow: `--help` and a mistake in the config answer at once."""

import errno
import itertools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from buffer.ctrl_c import EXIT_INTERRUPTED
from buffer.ownership import keep_others_from_writing

if TYPE_CHECKING:
    from launch.experiment import WholeExperiment

EXIT_USAGE = 2
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

convert = typer.Typer(help="Hugging Face folders to Megatron checkpoints and back, in one process.")
app.add_typer(convert, name="convert")


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


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The experiment's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override the file: learner.steps=20")
]
PipelineOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override the pipeline's own file: run_dir=runs/second"),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder.")]


@app.command()
def run(config: Config, overrides: Overrides = None) -> None:
    """Run every service of an experiment on this machine; the same command again resumes it."""

    from launch import local  # here and below: --help must not pay for what it does not need
    from launch.experiment import read
    from launch.terminal import open_console

    experiment = read(config, overrides or [])
    raise typer.Exit(local.run(experiment, _typed(), open_console()))


@app.command()
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


@app.command()
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


@app.command()
def scorer(
    config: Config,
    name: Annotated[str, typer.Option(help="Which reward model of rollout.rewards.")],
    overrides: Overrides = None,
) -> None:
    """Serve one reward model to the rollout servers, for the whole run."""
    from launch.experiment import check_scorer

    check_scorer(config, overrides or [], name)
    _become("rollout.scorer", str(config), "--name", name, *(overrides or []))


@app.command()
def learner(config: Config, overrides: Overrides = None) -> None:
    """Run the learner's ranks on this machine; for more machines use torchrun with `-m learner`."""
    from launch.services import torchrun

    experiment = _check(config, overrides, "learner")
    command = [*torchrun(experiment.learner.processes), "learner", str(config), *(overrides or [])]
    os.execv(command[0], command)


@app.command()
def reference(config: Config, overrides: Overrides = None) -> None:
    """Run the frozen reference's own ranks on this machine (learner.reference), for the whole run."""
    _become_job("reference", "learner.reference", "reference", config, overrides)


@app.command()
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


@app.command()
def pipeline(
    config: Annotated[Path, typer.Argument(metavar="PIPELINE", help="The pipeline's YAML file.")],
    overrides: PipelineOverrides = None,
) -> None:
    """Run stages one after the other, such as SFT, reward model and RL; the same command again resumes."""
    from launch import pipeline
    from launch.terminal import open_console

    stages = pipeline.read(config, overrides or [])
    command = _typed()
    raise typer.Exit(pipeline.run(stages, command, open_console()))


ModelFolder = Annotated[Path | None, typer.Option(help="Another model folder than the file's model.path.")]


@app.command()
def generate(
    config: Config,
    source: Annotated[Path, typer.Argument(metavar="PROMPTS", help="JSONL, parquet… with a prompt a row.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL, one line a prompt, in order.")],
    overrides: Overrides = None,
    model: ModelFolder = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: rollout.sampling.temperature; 0 is greedy.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="From the most probable tokens of this share together.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="From so many of the most probable tokens.")
    ] = None,
    adapter: Annotated[
        str, typer.Option(help="How a row is read (docs/data.md): a name, or module:function of yours.")
    ] = "auto",
) -> None:
    """Complete every prompt of a file; the same command again goes on where it was stopped."""
    from buffer.experiment import FilesSource
    from launch import prediction

    if top_p == 0:
        raise ValueError("--top-p: expected more than 0; greedy is --temperature 0")
    experiment = prediction.read(config, overrides or [], model)
    with _resumable(output):
        prompts = FilesSource(kind="files", path=str(source), adapter=adapter)
        typer.echo(prediction.generate(experiment, prompts, output, samples, temperature, top_p, top_k))


@app.command()
def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: ModelFolder = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results and samples; default RUN_DIR/evaluation.")
    ] = None,
) -> None:
    """Sample and score a model on the experiment's eval prompts: mean reward and pass@k."""
    from launch import prediction
    from launch.terminal import open_console

    experiment = prediction.read(config, overrides or [], model)
    folder = output or Path(experiment.run_dir) / "evaluation"
    with _resumable(folder):
        prediction.evaluate(experiment, folder, open_console())


@app.command()
def chat(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    system: Annotated[str | None, typer.Option(help="The system message it begins with.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.001, max=1, help="As of `generate`.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    max_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of the conversation; default: the model's, up to 4096.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share the model.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of what is drawn.")] = 0,
) -> None:
    """Talk with a model, such as one that a run has written."""
    from launch import chat as terminal
    from rollout.config import EngineConfig
    from rollout.engine import EngineFailed

    engine = EngineConfig(tensor_parallel=tensor_parallel, max_num_seqs=1)
    served = terminal.check(model, max_length, engine)
    try:
        terminal.chat(served, engine, system, temperature, top_p, max_tokens, seed)
    except EngineFailed as failure:
        fail(str(failure))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def sft(config: Config, overrides: Overrides = None) -> None:
    """Teach a model the responses of the data; the same command again resumes it."""
    _offline("sft", config, overrides)


@app.command()
def reward(config: Config, overrides: Overrides = None) -> None:
    """Train a reward model on scored responses; the same command again resumes it."""
    _offline("reward", config, overrides)


@app.command()
def dpo(config: Config, overrides: Overrides = None) -> None:
    """Train a model on preferences directly (DPO, IPO); the same command again resumes it."""
    _offline("dpo", config, overrides)


@app.command()
def report(run_dir: RunDir) -> None:
    """Write plots, sample completions and a summary of a run into RUN_DIR/report."""
    from launch.report import write_report

    typer.echo(write_report(run_dir).text())


@app.command()
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
    """What every rank of a run, a stage or a pipeline would hold in memory, and what to change if it does not
    fit; loads no weights."""
    from launch import plan_screen
    from launch.plan import Target
    from launch.plan_stages import plans
    from launch.terminal import open_console

    made = plans(config, overrides or [], Target.of(not cpu, devices, device_gib))
    if as_json:
        typer.echo(plan_screen.as_json(made))
        raise typer.Exit(int(any(each.reasons() for each in made)))
    raise typer.Exit(plan_screen.print_plans(made, open_console(wide=True)))


@app.command()
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
    command = _typed()
    raise typer.Exit(measured(experiment, steps, train_seconds, command, open_console()))


MOST_TRIED = 65_536
Tried = Annotated[list[int] | None, typer.Option(help="To try; may be given several times.")]


@app.command()
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


@app.command()
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


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, on a disk that stays.")],
) -> None:
    """Make the keys by which the services of a run on several machines know each other."""
    from buffer.keys import PUBLIC, ROLES, make_keys

    with _writing(folder):
        make_keys(folder)
    typer.echo(f"written: {folder}; set security.keys={folder} in the experiment file")
    typer.echo(f"each host needs {PUBLIC} and the secret of what runs there, over a safe channel:")
    for role in ROLES:
        typer.echo(f"  {role:<9} {folder / PUBLIC} {folder / f'{role}.secret'}")


Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="runs/NAME/checkpoints/step-…")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")]
Tensor = Annotated[int, typer.Option(min=1, help="Tensor-parallel size to cut it for.")]
Pipeline = Annotated[int, typer.Option(min=1, help="Pipeline-parallel size to cut it for.")]
Expert = Annotated[int, typer.Option(min=1, help="Expert-parallel size to cut it for.")]
Model = Annotated[Path | None, typer.Option(help="Folder with config and tokenizer; else the run's own.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Convert to it; else as it is."),
]


@convert.command()
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face folder.")],
    target: Target,
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    expert: Expert = 1,
    dtype: Dtype = None,
) -> None:
    """Weights for `learner.init_from`, from a Hugging Face folder."""
    from learner import families
    from learner.checkpoint_files import refuse_existing

    refuse_existing(target)  # here and below: before torch is imported
    families.read(source, families.own_head(source))
    from learner import conversion

    with _writing(target):
        conversion.hf_to_megatron(source, target, _layout(tensor, pipeline, expert), dtype)
    typer.echo(f"written: {target}")


@convert.command()
def megatron_to_hf(
    checkpoint: Checkpoint,
    target: Target,
    model: Model = None,
    dtype: Dtype = None,
    averaged: Annotated[bool, typer.Option(help="The moving average of a run with learner.ema.")] = False,
    value: Annotated[
        bool, typer.Option("--value", help="PPO's value model; --model is then its folder.")
    ] = False,
) -> None:
    """A Hugging Face folder, from any checkpoint."""
    from learner.checkpoint_files import named_meta, refuse_existing

    if averaged and value:
        raise ValueError("--averaged is of the policy and --value the value model; give one of them")
    refuse_existing(target)
    named_meta(checkpoint)
    from learner import conversion

    with _writing(target):
        conversion.megatron_to_hf(checkpoint, target, model, dtype, averaged, value)
    typer.echo(f"written: {target}")


@convert.command()
def reshard(
    checkpoint: Checkpoint,
    target: Target,
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    expert: Expert = 1,
    model: Model = None,
    value_model: Annotated[Path | None, typer.Option(help="The same of PPO's value model.")] = None,
) -> None:
    """The same checkpoint, optimizer too, stored as another layout would have written it."""
    from learner.checkpoint_files import named_meta, refuse_existing

    refuse_existing(target)
    named_meta(checkpoint)
    from learner import conversion

    with _writing(target):
        conversion.reshard(checkpoint, target, _layout(tensor, pipeline, expert), model, value_model)
    typer.echo(f"written: {target}")


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Name what could not be written: the system's own reason, of a full disk say, often names nothing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"{target}: cannot be written: {error.strerror or error}") from error


def _layout(tensor: int, pipeline: int, expert: int) -> Any:
    from learner.config import ParallelConfig

    return ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert)


def _offline(kind: str, config: Path, overrides: list[str] | None) -> NoReturn:
    from launch.offline import read_stage, run_stage
    from launch.terminal import open_console

    experiment = read_stage(config, overrides or [], kind)
    raise typer.Exit(run_stage(experiment, _typed(), open_console()))


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    """Ctrl-C and a failing engine leave whole lines, from which the same command goes on."""
    from rollout.engine import CompletionFailed, EngineFailed

    # A shell that starts a command in the background has it ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {output} keeps what was written, the same command goes on from there", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (CompletionFailed, EngineFailed) as failure:
        fail(f"{failure}; {output} keeps what was written, the same command goes on from there")


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


def _typed() -> str:
    """This command, as it can be given again: by its path where the environment is not activated."""
    by_path = Path(sys.argv[0]).name == "slipstream" and not shutil.which("slipstream")
    return shlex.join([sys.argv[0] if by_path else "slipstream", *sys.argv[1:]])


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
    except (ValueError, OSError) as error:
        # Of ours, a ValueError is always the user's mistake, told in full by its text.
        fail(str(error))


def fail(reason: str) -> NoReturn:
    for line in reason.splitlines():
        typer.echo(f"error: {line}", err=True)
    sys.exit(EXIT_USAGE)
