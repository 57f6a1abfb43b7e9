"""An engine on one folder of weights, without buffer or learner: what `slipstream generate` and `slipstream
evaluate` run."""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import uvloop

from buffer.cache import contents
from buffer.experiment import EvalConfig, PromptSource
from buffer.pass_rate import part_means, rates
from buffer.prompts import PromptRows, fingerprint
from buffer.rendering import Renderer
from buffer.stream import check, open_sources
from buffer.tokenizers import load_tokenizer
from buffer.whole_file import write_whole
from rollout.config import ModelReward, PredictionExperiment, Reward
from rollout.groups import SamplingPlan, evaluation_plan
from rollout.prediction import Line, Output, Predictor, Row, predict
from rollout.scorer.folder import model_reward
from rollout.scorer.local import LocalScorer, open_model
from rollout.total_reward import open_rewards
from sync.expected import INDEX, weight_files

DESCRIBES = (".json", ".jinja", ".model", ".txt")
"""Endings of the files beside a model's weights that say how it reads and writes."""


class Told(Protocol):
    """Who is told how it goes."""

    def starts(self) -> None:
        """All is well so far, and the engines start."""

    def up(self) -> None:
        """The engines have started, and rows are worked on from now on."""

    def written(self, number: int, total: int, line: Line) -> None:
        """Of this row, of so many, there is a line."""


def open_rows(experiment: PredictionExperiment, source: PromptSource) -> PromptRows:
    """
    Raises:
        ValueError: What is wrong with which source; or with a row, unless `data.on_bad_row` is skip.
    """
    sources, _ = open_sources(source, experiment.seed, "rl", None)
    check(sources, _skips_bad_rows(experiment))
    return PromptRows(sources)


def _skips_bad_rows(experiment: PredictionExperiment) -> bool:
    return experiment.data is not None and experiment.data.on_bad_row == "skip"


def generate(
    experiment: PredictionExperiment, rows: Sequence[Row] | Any, plan: SamplingPlan, path: Path, told: Told
) -> None:
    """Write completions of every row to `path`; the same call again goes on where this one ended.

    A row that cannot be read ends it, or gets a line without completions where `data.on_bad_row` is skip.

    Raises:
        ValueError: The file was made with other settings, or the model cannot be used.
        CompletionFailed, EngineFailed: What was written stays.
    """
    uvloop.run(_predict(experiment, rows, plan, path, told, scored=False))


def evaluate(
    experiment: PredictionExperiment, config: EvalConfig, folder: Path, told: Told
) -> dict[str, Any]:
    """Sample and score the prompts of an `eval` section.

    Writes `samples.jsonl` (every completion with its reward) and `results.json` into the folder.

    Returns:
        What `results.json` holds: score, standard error, parts of the reward, counts; and pass@k, unless a
        reward model is in the sum.

    Raises:
        ValueError: A reward model's folder cannot be one, or as `open_rows` and `generate`.
    """
    rewards = experiment.rollout.rewards.items()
    scorers = [name for name, r in rewards if isinstance(r, ModelReward) and r.weight != 0]
    for name in scorers:
        model_reward(experiment.rollout, experiment.model, name)
    rows = open_rows(experiment, config.source)
    plan = evaluation_plan(config, experiment.rollout.sampling)
    path = folder / "samples.jsonl"
    uvloop.run(_predict(experiment, rows, plan, path, told, scored=True))
    results = {"model": experiment.model.path, **results_of(path, has_mark=not scorers)}
    write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def results_of(path: Path, has_mark: bool) -> dict[str, Any]:
    """Scores and counts of a file that `evaluate` wrote.

    Args:
        path: The file.
        has_mark: Whether a reward of 1 says that a completion passes. A reward model's scores have no zero
            and no unit.
    """
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    completions = [c for line in lines for c in line["completions"]]
    results: dict[str, Any] = rates([[c["reward"] for c in line["completions"]] for line in lines])
    if not has_mark:
        results = {name: value for name, value in results.items() if not name.startswith("pass@")}
    if completions:
        results["parts"] = part_means([c["reward_parts"] for c in completions])
        results["mean_tokens"] = sum(c["tokens"] for c in completions) / len(completions)
        results["cut_off"] = sum(c["finish_reason"] == "length" for c in completions) / len(completions)
    results["refused"] = sum("refused" in line for line in lines)
    return results


async def _predict(
    experiment: PredictionExperiment,
    rows: Sequence[Row] | Any,
    plan: SamplingPlan,
    path: Path,
    told: Told,
    scored: bool,
) -> None:
    from rollout.vllm_engine import VLLMEngine

    model, rollout = experiment.model, experiment.rollout
    if plan.max_tokens >= model.max_length:
        key = "eval.max_tokens" if scored else "rollout.sampling.max_tokens"
        raise ValueError(
            f"{key}: {plan.max_tokens} new tokens leave no room for a prompt in model.max_length="
            f"{model.max_length}; lower the one or raise the other"
        )
    system_prompt = experiment.data.system_prompt if experiment.data else None
    tokenizer = load_tokenizer("model.path", model.path)
    renderer = Renderer(tokenizer, model.max_length, system_prompt)
    output = Output(path, settings_of(experiment, rows, plan, scored))
    async with AsyncExitStack() as stack:
        stack.enter_context(output.held())
        if output.begin() == len(rows):
            return
        told.starts()
        rewards = None
        if scored:

            async def reach(name: str, reward: ModelReward) -> LocalScorer:
                return LocalScorer(*await open_model(name, reward, model, system_prompt, stack))

            configured = rollout.rewards
            rewards = await open_rewards(
                configured, experiment.name, "evaluate", tokenizer, stack, path.parent, reach
            )
            await rewards.ready()
        engine = VLLMEngine(model, rollout.engine, rollout.sampling.stop, experiment.seed)
        stack.push_async_callback(engine.close)
        await engine.start()
        await engine.freeze()
        told.up()
        predictor = Predictor(engine, renderer, plan, rewards, rollout.episode)
        # Twice what is decoded at a time keeps the engine full while the oldest row is waited for.
        window = max(2, 2 * rollout.engine.max_num_seqs // plan.samples)
        skip = _skips_bad_rows(experiment)
        total = len(rows)
        await predict(
            rows, output, predictor.line, window, lambda i, line: told.written(i, total, line), skip
        )


def settings_of(
    experiment: PredictionExperiment, rows: Sequence[Row] | Any, plan: SamplingPlan, scored: bool
) -> dict[str, Any]:
    """All that the lines of an output depend on, plain JSON.

    Args:
        experiment: Its model, rewards, system prompt, seed.
        rows: The data.
        plan: Of the sampling.
        scored: Whether there are rewards in the lines.

    Raises:
        ValueError: The weights of the model, or of a reward model in the sum, cannot be read.
    """
    return {
        "model": str(Path(experiment.model.path).resolve()),
        "weights": weights_of(experiment.model.path),
        "described": described(experiment.model.path),
        "dtype": experiment.model.dtype,
        "max_length": experiment.model.max_length,
        "data": fingerprint(rows),
        "system_prompt": experiment.data.system_prompt if experiment.data else None,
        "samples": plan.samples,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "top_k": plan.top_k,
        "max_tokens": plan.max_tokens,
        "stop": list(experiment.rollout.sampling.stop),
        "episode": experiment.rollout.episode,
        "rewards": {n: _reward(r) for n, r in experiment.rollout.rewards.items()} if scored else None,
        "seed": experiment.seed,
    }


def _reward(reward: Reward) -> dict[str, Any]:
    told = reward.model_dump(mode="json")
    if isinstance(reward, ModelReward) and reward.weight != 0:
        told |= {"weights": weights_of(reward.model), "described": described(reward.model)}
    return told


def described(path: str) -> str:
    """Changes when what lies beside the weights in a model's folder does: config, tokenizer, chat template.

    Raises:
        ValueError: A file of it cannot be read.
    """
    try:
        files = sorted(Path(path).iterdir())
        return contents(file for file in files if file.suffix in DESCRIBES and file.name != INDEX)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def weights_of(path: str) -> str:
    """Changes when the model in a folder is trained again, and not when its files are copied or written
    again as they were. How closely a large file is looked at: `buffer.cache.content`.

    Raises:
        ValueError: A file of its weights cannot be read.
    """
    try:
        return contents(weight_files(Path(path)))
    except OSError as error:
        raise ValueError(f"{path}: its weights cannot be read: {error}") from None
