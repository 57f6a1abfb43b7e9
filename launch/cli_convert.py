"""The commands `slipstream convert …`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from launch.command_line import writing

convert = typer.Typer(help="Hugging Face folders to Megatron checkpoints and back, in one process.")

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

    with writing(target):
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

    with writing(target):
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

    with writing(target):
        conversion.reshard(checkpoint, target, _layout(tensor, pipeline, expert), model, value_model)
    typer.echo(f"written: {target}")


def _layout(tensor: int, pipeline: int, expert: int) -> Any:
    from learner.config import ParallelConfig

    return ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert)
