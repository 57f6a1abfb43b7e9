"""Which folder a scorer serves, and what must be true of it; reads its config.json only."""

import json
from pathlib import Path
from typing import Any

from buffer.experiment import ConfigError, ModelConfig
from rollout.config import ModelReward, RolloutConfig, engine_faults


def model_reward(rollout: RolloutConfig, policy: ModelConfig, name: str) -> ModelReward:
    """The reward model of that name, whose folder was looked at.

    Raises:
        ConfigError: There is none, or it cannot serve.
    """
    models = [known for known, reward in rollout.rewards.items() if isinstance(reward, ModelReward)]
    reward = rollout.rewards.get(name)
    if not isinstance(reward, ModelReward):
        raise ConfigError(
            f"--name {name}: no reward model of this name in rollout.rewards; there: "
            f"{', '.join(models) or 'none'}"
        )
    wrong = faults(f"rollout.rewards.{name}.model", reward.model, longest(policy, reward))
    wrong += engine_faults(f"rollout.rewards.{name}.engine", reward.engine)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return reward


def longest(policy: ModelConfig, reward: ModelReward) -> int:
    """Longest sequence that the reward model scores, tokens."""
    return reward.max_length or policy.max_length


def faults(key: str, path: str, max_length: int) -> list[str]:
    """What is wrong with a reward model's folder, one line each.

    Args:
        key: The setting that names it, for the lines.
        path: The folder.
        max_length: Longest sequence it is to score, tokens.
    """
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except OSError:
        return [f"{key}={path}: no config.json in it, expected a Hugging Face folder"]
    except (ValueError, RecursionError) as error:
        return [f"{key}={path}: config.json is not JSON: {error}"]
    if not isinstance(config, dict):
        return [f"{key}={path}: config.json: expected a mapping"]
    return _kind(key, path, config) + _length(key, path, config, max_length)


def _kind(key: str, path: str, config: dict[str, Any]) -> list[str]:
    named = config.get("architectures") or ["nothing"]
    if not isinstance(named, list):
        return [f"{key}={path}: config.json: architectures: expected a list of names"]
    if not str(named[0]).endswith("ForSequenceClassification"):
        return [f"{key}={path}: holds {named[0]}; a reward model is a …ForSequenceClassification"]
    # As Hugging Face counts them: two, if nothing is said.
    names = config.get("id2label", "01")
    labels = config.get("num_labels", len(names) if isinstance(names, dict | str) else names)
    return [] if labels == 1 else [f"{key}={path}: has {labels} labels; a reward model has one"]


def _length(key: str, path: str, config: dict[str, Any], max_length: int) -> list[str]:
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and max_length > longest:
        return [f"{key}={path}: takes at most {longest} tokens, and is to score up to {max_length}"]
    return []
