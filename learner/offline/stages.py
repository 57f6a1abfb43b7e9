"""What is particular to a stage: which examples teach it something, its loss, and how its sums are told.

Losses are parts of the mean over the global batch, of which `size` says how much an example counts; so they
add up over micro-batches and ranks.
"""

import math
from typing import Any, Protocol

from torch import Tensor

from learner.families import Head
from learner.offline.config import DpoConfig, RewardConfig, SftConfig
from learner.offline.encoding import Encoded
from learner.offline.packing import ExampleBatch
from learner.preference import PAIR_SUMS, bradley_terry, over_pairs, pair_loss, sum_by_response

Row = dict[str, Any]


class Stage(Protocol):
    """
    Attributes:
        head: Of the model it trains.
        needs_reference: Whether micro-batches carry the logprobs of the initial model.
        sums: Names of what `objective` sums.
    """

    head: Head
    needs_reference: bool
    sums: tuple[str, ...]

    def size(self, example: Encoded) -> float:
        """What the example adds to the denominator of the loss; 0 where it teaches nothing."""
        ...

    def objective(self, output: Any, batch: ExampleBatch, total: float) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the loss, and of the sums; `total` is the global batch's size."""
        ...

    def row(self, sums: dict[str, float]) -> Row:
        """What is told of the sums over a global batch."""
        ...


class Sft:
    """Cross-entropy of the responses' tokens and end marks, of a conversation of its answers', averaged over
    all of them."""

    head: Head = "vocabulary"
    needs_reference: bool = False
    sums: tuple[str, ...] = ("loss",)

    def size(self, example: Encoded) -> float:
        return float(example.trained)

    def objective(self, output: Any, batch: ExampleBatch, total: float) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, _entropy = output
        loss = -(logprobs * batch.weights).sum() / total
        return loss, {"loss": loss.detach().double()}

    def row(self, sums: dict[str, float]) -> Row:
        return {"loss": sums["loss"], "perplexity": math.exp(min(sums["loss"], 700.0))}


class Preferences:
    """What reward model and DPO share: an example counts once, if any two responses differ, and in their
    scores too."""

    sums: tuple[str, ...] = PAIR_SUMS

    def size(self, example: Encoded) -> float:
        texts = {response.tobytes() for response in example.responses}
        return float(len(set(example.scores)) > 1 and len(texts) > 1)

    def row(self, sums: dict[str, float]) -> Row:
        pairs = int(sums["pairs"])
        if not pairs:
            return {"pairs": 0}
        preferred, other = sums["preferred"] / pairs, sums["other"] / pairs
        return {
            "loss": sums["loss"],
            "accuracy": sums["correct"] / pairs,
            "margin": preferred - other,
            "reward/preferred": preferred,
            "reward/other": other,
            "pairs": pairs,
        }


class Reward(Preferences):
    """-log σ(s_preferred − s_other); a response's score is read at its last token, the end mark."""

    head: Head = "score"
    needs_reference: bool = False

    def objective(self, output: Any, batch: ExampleBatch, total: float) -> tuple[Tensor, dict[str, Tensor]]:
        return over_pairs(output, batch.scores, batch.prompts, bradley_terry, total)


class Dpo(Preferences):
    """DPO or IPO; a response's implicit reward is β Σ log π / π_ref over its tokens and end mark."""

    head: Head = "vocabulary"
    needs_reference: bool = True

    def __init__(self, config: DpoConfig) -> None:
        self._beta = config.beta
        self._loss = pair_loss(config)

    def objective(self, output: Any, batch: ExampleBatch, total: float) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, _entropy = output
        assert batch.reference_logprobs is not None
        gained = (logprobs - batch.reference_logprobs) * batch.weights
        values = sum_by_response(gained, batch.sequence_index, len(batch.scores))
        return over_pairs(values, batch.scores, batch.prompts, self._loss, total)

    def row(self, sums: dict[str, float]) -> Row:
        rewards = {name: self._beta * sums[name] for name in ("preferred", "other")}
        return super().row({**sums, **rewards})


def make_stage(config: SftConfig | RewardConfig | DpoConfig) -> Stage:
    match config:
        case SftConfig():
            return Sft()
        case RewardConfig():
            return Reward()
        case DpoConfig():
            return Dpo(config)
