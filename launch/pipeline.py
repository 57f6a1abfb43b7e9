"""`slipstream pipeline`: stages one after the other, such as SFT, then a reward model, then RL.

Consumes: a pipeline file. Waits for: each stage's own command, which resumes by itself. Unblocked by: the
stage's end; the first that does not end well ends the pipeline, and the same command goes on with that stage.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from rich.console import Console

from buffer.experiment import ConfigError, Experiment, Section, folder_name, load
from launch.command_line import TYPED
from launch.experiment import check_kind

REFERENCE = re.compile(r"(?<!\{)\{([\w-]+)\}(?!\})")
"""No other braces: they may be of a template, or of JSON."""
OWN = {"name", "run_dir"}
"""Settings of a stage that follow from the pipeline's."""
REFERENCE_HELP = "{name} of an earlier stage stands for the model folder that stage writes"


def _stage_name(value: str) -> str:
    if not re.fullmatch(r"[\w-]+", value):
        raise ValueError("expected a name of letters, digits, _ and -")
    return value


class StageConfig(Section):
    name: Annotated[str, AfterValidator(_stage_name)]
    command: Literal["sft", "reward", "dpo", "run", "evaluate"]
    config: str
    """The stage's experiment file, relative to the pipeline's."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Of the experiment file, `section.key: value`; `{sft}` in a text is the folder of the model that the
    earlier stage `sft` wrote."""

    @field_validator("overrides")
    @classmethod
    def _leaves_its_place(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for key in OWN & overrides.keys():
            raise ValueError(
                f"{key} is what the pipeline gives each stage, by which later ones find its model; set the "
                "pipeline's own"
            )
        return overrides


class PipelineConfig(Section):
    name: Annotated[str, AfterValidator(folder_name)]
    run_dir: str
    """Each stage's run folder is `run_dir/<stage>`."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)

    @field_validator("stages")
    @classmethod
    def _differ(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"two stages have the same name, of {', '.join(names)}")
        return stages


class Stage:
    """One stage as it will be started."""

    def __init__(
        self, pipeline: PipelineConfig, number: int, folder: Path, models: dict[str, Path] | None = None
    ) -> None:
        """Args:
        folder: That stages' files are named from.
        models: Folders that stand in the place of those which earlier stages will write.
        """
        self.config = pipeline.stages[number]
        self.run_dir = Path(pipeline.run_dir) / self.config.name
        self.model = self.run_dir / "model"
        self.file = folder / self.config.config
        writing = [s for s in pipeline.stages[:number] if s.command != "evaluate"]
        earlier = {s.name: Path(pipeline.run_dir) / s.name / "model" for s in writing} | (models or {})
        settings = {"name": f"{pipeline.name}-{self.config.name}", "run_dir": str(self.run_dir)}
        settings |= {
            key: _filled(value, earlier, self.config.name) for key, value in self.config.overrides.items()
        }
        self.overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "launch", self.config.command, str(self.file), *self.overrides]

    def experiment(self) -> Experiment:
        """Its experiment file as its command will read it; models that earlier stages write need not exist.

        Raises:
            ConfigError: One line per mistake.
        """
        from launch import experiment
        from launch.offline import load_stage
        from rollout.config import PredictionExperiment

        match self.config.command:
            case "run":
                return experiment.read(self.file, self.overrides, services=[])
            case "evaluate":
                return load(self.file, self.overrides, PredictionExperiment)
            case kind:
                return load_stage(self.file, self.overrides, kind)


def open_file(path: Path, overrides: list[str]) -> PipelineConfig:
    """A pipeline's file, without its stages'.

    Raises:
        ConfigError: One line per mistake.
    """
    check_kind(path, overrides, "pipeline")
    return load(path, overrides, PipelineConfig, tuple(PipelineConfig.model_fields))


def read(path: Path, overrides: list[str]) -> list[Stage]:
    """The stages of a pipeline file, each checked.

    Raises:
        ConfigError: One line per mistake, of any stage, before the first one starts.
    """
    pipeline = open_file(path, overrides)
    stages = [Stage(pipeline, number, path.parent) for number in range(len(pipeline.stages))]
    faults: list[str] = []
    checked: list[tuple[Stage, Experiment]] = []
    for stage in stages:
        try:
            experiment = stage.experiment()
            found = _misfits(experiment, checked)
            checked.append((stage, experiment))
        except ConfigError as error:
            found = str(error).splitlines()
        faults += [f"{path}: stage {stage.config.name}: {line}" for line in found]
    if faults:
        raise ConfigError("\n".join(faults))
    return stages


def _misfits(experiment: Experiment, earlier: list[tuple[Stage, Experiment]]) -> list[str]:
    """Models of earlier stages, under the settings that name them, which will not be there or not fit."""
    writers = {os.fspath(stage.model): (stage.config, made.model_dump()) for stage, made in earlier}
    faults: list[str] = []
    for key, path, kinds in _models_of(experiment.model_dump()):
        if path not in writers:
            continue
        writer, fields = writers[path]
        kind = "reward model" if writer.command == "reward" else "language model"
        if kind not in kinds:
            faults.append(f"{key}: the stage {writer.name} writes a {kind}; expected a {kinds[0]}")
        elif not fields.get("learner", {}).get("checkpoint", {}).get("export", True):
            faults.append(
                f"{key}: the stage {writer.name} writes no model, by its learner.checkpoint.export=false"
            )
    return faults


def _models_of(fields: dict[str, Any]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """The folders of models that an experiment starts from: key, path, and what they may hold."""
    policy, scorer = "language model", "reward model"
    trains_scores = (fields.get("stage") or {}).get("kind") == "reward"
    yield "model.path", fields["model"]["path"], (policy, scorer) if trains_scores else (policy,)
    if value := (fields.get("learner") or {}).get("value"):
        yield "learner.value.path", value["path"], (scorer, policy)
    for name, reward in (fields.get("rollout") or {}).get("rewards", {}).items():
        if reward["weight"] and "model" in reward:
            yield f"rollout.rewards.{name}.model", reward["model"], (scorer,)


def run(stages: list[Stage], command: str, console: Console) -> int:
    """Run the stages in order; those that are finished say so at once.

    Args:
        stages: Checked already.
        command: What the user typed; the same again resumes.
        console: Where to tell which stage it is.

    Returns:
        The exit code: 0, or that of the stage that did not end well.
    """
    for number, stage in enumerate(stages, 1):
        console.rule(f"stage {number} of {len(stages)}: {stage.config.name}")
        code = _run(stage.command, command)
        if code:
            # How to go on the stage has said, or what is to be mended.
            told = f"stage {number} of {len(stages)}, {stage.config.name}, is not finished"
            console.print(f"the pipeline ends here: {told}", highlight=False, markup=False, soft_wrap=True)
            return code
    return 0


def _run(words: list[str], command: str) -> int:
    """Run one stage in front and wait for its end, whatever signal comes; to go on with it, the user is told
    `command`."""
    environment = os.environ | {TYPED: command}
    # Python itself cannot take a Ctrl-C while it comes up: the stage lets it through once it can.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with subprocess.Popen(words, env=environment) as child:
        # A terminal sends Ctrl-C to parent and child alike; SIGTERM comes here alone.
        handlers: dict[int, Any] = {
            signal.SIGINT: lambda *_: None,
            signal.SIGTERM: lambda *_: child.terminate(),
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _filled(value: Any, models: dict[str, Path], stage: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(v, models, stage) for key, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, models, stage) for v in value]
    if not isinstance(value, str):
        return value
    unknown = [name for name in REFERENCE.findall(value) if name not in models]
    if unknown:
        raise ConfigError(
            f"stage {stage}: overrides: {value!r}: {', '.join(unknown)}: {REFERENCE_HELP}; earlier stages: "
            f"{', '.join(models) or 'none'}"
        )
    return REFERENCE.sub(lambda found: os.fspath(models[found[1]]), value)
