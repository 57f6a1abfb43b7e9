"""Plans of offline stages, and of every stage of a pipeline, by the arithmetic of `launch/plan.py`."""

from pathlib import Path

from launch import pipeline, plan
from launch.experiment import WholeExperiment, kind_of
from launch.offline import load_stage
from launch.plan import (
    WEIGHT_BYTES,
    Plan,
    RankKind,
    Target,
    Training,
    engine_ranks,
    machine_of,
    scorers,
    training,
)
from learner import budget, families
from learner.families import Head
from learner.offline.config import OfflineExperiment
from rollout.config import PredictionExperiment

RESPONSES = {"sft": 1, "reward": 2, "dpo": 2}
"""Taken to lie behind one prompt; rows with more take more."""


def plans(config: Path, overrides: list[str], target: Target) -> list[Plan]:
    """One plan of a run or of an offline stage, as many as a pipeline has stages.

    Of models only their config.json must exist here; of those that a stage of the pipeline writes, that of
    the model which the stage starts from.

    Raises:
        ConfigError: A mistake in a file.
        ValueError: A model is not supported, or a layout does not fit it.
    """
    found = kind_of(config, overrides)
    match found[0] if found else "run":
        case "pipeline":
            return _of_pipeline(config, overrides, target)
        case "stage":
            return [of_experiment(load_stage(config, overrides, None), target)]
    return [plan.plan(config, overrides, target)]


def _of_pipeline(path: Path, overrides: list[str], target: Target) -> list[Plan]:
    file = pipeline.open_file(path, overrides)
    models: dict[str, Path] = {}
    made: list[Plan] = []
    for number, config in enumerate(file.stages):
        experiment = pipeline.Stage(file, number, path.parent, models).experiment()
        assert isinstance(experiment, WholeExperiment | OfflineExperiment | PredictionExperiment)
        models[config.name] = Path(experiment.model.path)
        made.append(of_experiment(experiment, target))
    return made


def of_experiment(
    experiment: WholeExperiment | OfflineExperiment | PredictionExperiment, target: Target
) -> Plan:
    """The plan of what was read already."""
    if isinstance(experiment, OfflineExperiment):
        return _of_stage(experiment, target)
    family = families.read(experiment.model.path)
    if isinstance(experiment, WholeExperiment):
        return plan.of(experiment, family, target)
    engine = experiment.rollout.engine
    size, length = WEIGHT_BYTES[experiment.model.dtype], experiment.model.max_length
    ranks = engine_ranks("evaluation rank", 1, family, engine, size, length, target)
    return Plan(experiment, family, target, (*scorers(experiment, target), ranks))


def _of_stage(experiment: OfflineExperiment, target: Target) -> Plan:
    kind, learner, length = experiment.stage.kind, experiment.learner, experiment.model.max_length
    head: Head = "score" if kind == "reward" else "vocabulary"
    family = families.read(experiment.model.path, head)
    family.check_layout(learner.parallel)
    family.check_length(length)
    # Prompts of one token: of what fits, every other token is then a target. An example is never divided.
    number = RESPONSES[kind]
    tokens = max(learner.tokens_per_microbatch, 1 + number * (length - 1))
    batch = budget.largest_micro_batch(length, length - 1, number, tokens)
    reference = kind == "dpo" and learner.lora is None
    job = Training(family, learner, machine_of(experiment, target.gpu), (batch,), reference)
    kinds: list[RankKind] = training(job)
    return Plan(experiment, family, target, tuple(kinds))
