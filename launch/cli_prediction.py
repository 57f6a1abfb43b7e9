"""The commands that sample a model: `generate`, `evaluate` and `chat`."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from buffer.ctrl_c import EXIT_INTERRUPTED
from launch.command_line import Config, Overrides, fail


def _finite(value: float | None) -> float | None:
    if value is not None and math.isinf(value):
        raise typer.BadParameter("expected a finite number")
    return value


ModelFolder = Annotated[Path | None, typer.Option(help="Another model folder than the file's model.path.")]


def generate(
    config: Config,
    source: Annotated[Path, typer.Argument(metavar="PROMPTS", help="JSONL, parquet… with a prompt a row.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL, one line a prompt, in order.")],
    overrides: Overrides = None,
    model: ModelFolder = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, callback=_finite, help="Default: rollout.sampling.temperature; 0 is greedy."),
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

    if output.is_dir():
        raise ValueError(f"{output}: a folder; expected the file that is to be written")
    if output.suffix == ".log":
        raise ValueError(
            f"{output}: what the engine says goes to OUTPUT's name with .log; take another ending"
        )
    if top_p == 0:
        raise ValueError("--top-p: expected more than 0; greedy is --temperature 0")
    experiment = prediction.read(config, overrides or [], model)
    with _resumable(output):
        prompts = FilesSource(kind="files", path=str(source), adapter=adapter)
        typer.echo(prediction.generate(experiment, prompts, output, samples, temperature, top_p, top_k))


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
    if folder.is_file():
        raise ValueError(f"--output {folder}: a file; expected a folder")
    with _resumable(folder):
        prediction.evaluate(experiment, folder, open_console())


def chat(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    system: Annotated[str | None, typer.Option(help="The system message it begins with.")] = None,
    temperature: Annotated[float, typer.Option(min=0, callback=_finite, help="0 is greedy.")] = 0.7,
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


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    """Ctrl-C and a failing engine leave whole lines, from which the same command goes on."""
    from rollout.engine import CompletionFailed, EngineFailed

    # A shell that starts a command in the background has it ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{output} keeps what was written, the same command goes on from there"
        typer.echo(f"stopped; {kept if output.exists() else 'nothing was written yet'}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (CompletionFailed, EngineFailed) as failure:
        fail(f"{failure}; {output} keeps what was written, the same command goes on from there")
