"""Pretraining text beside reinforcement learning: PPO-ptx of InstructGPT (arXiv 2203.02155, equation 2).

γ · mean of −log π(token | what stands before it), over the tokens of some texts, is added to the loss of
every optimizer step: one gradient, clipped once. Called by `learner/step.py` on every rank.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from learner import collectives, parallel
from learner.config import PtxConfig
from learner.offline.encoding import Encoded, check_known
from learner.offline.feed import Rows
from learner.offline.packing import ExampleBatch, empty, pack
from learner.passes import equal_counts


@dataclass(frozen=True, slots=True)
class TextPart:
    """The texts of one optimizer step."""

    micro_batches: list[ExampleBatch]
    """Of this rank; equally many on all."""
    tokens: float
    """Trained ones, over all ranks."""


@dataclass(slots=True)
class TextReport:
    """Of one batch, summed over all ranks and the batch's optimizer steps."""

    losses: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        return {
            "ptx/loss": sum(self.losses) / len(self.losses) if self.losses else None,
            **{f"ptx/{name}": self.counts[name] for name in ("tokens", "texts", "cut", "left_out")},
        }


class Texts:
    """A step's texts are fixed by the data's order alone, so every layout trains the same, and a place in the
    data is all that a resume needs. `next` is collective."""

    def __init__(
        self,
        config: PtxConfig,
        rows: Rows,
        tokenizer: Any,
        max_length: int,
        budget: int,
        vocabulary: int | None = None,
    ) -> None:
        """Args:
        rows: At their beginning, without an end.
        tokenizer: A Hugging Face tokenizer. Its end mark, if it has one, is put behind every text.
        max_length: Tokens of a text; a longer one loses its end.
        budget: Tokens of a micro-batch.
        vocabulary: Tokens that the model has; None where nobody knows.
        """
        self.coefficient = config.coefficient
        self._batch_size = config.batch_size
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._budget = budget
        self._vocabulary = vocabulary

    def next(self, report: TextReport) -> TextPart:
        """The next optimizer step's.

        Raises:
            ValueError: A row that cannot be read, with its place; or the model lacks one of its tokens.
        """
        rows = self._rows.take(self._batch_size)
        texts = [str(row.prompt) for row in rows[parallel.dp_rank() :: parallel.dp_size()]]
        encoded = [self._encode(text) for text in texts]
        kept = [e for e in encoded if e is not None]
        mine = {
            "tokens": sum(len(r) for e in kept for r in e.responses),
            "texts": len(kept),
            "cut": sum(e.cut for e in kept),
            "left_out": len(texts) - len(kept),
        }
        sums = dict(zip(mine, map(int, collectives.sum_over_data([*mine.values()])), strict=True))
        report.counts.update(sums)
        micro_batches = equal_counts(pack(kept, self._budget), empty()) if sums["tokens"] else []
        return TextPart(micro_batches, sums["tokens"])

    def _encode(self, text: str) -> Encoded | None:
        """Its first token as the prompt, since nothing predicts it; None of a text that has no other."""
        ids = list(self._tokenizer.encode(text))
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        if len(ids) < 2:
            return None
        kept = np.array(ids[: self._max_length], np.int32)
        if self._vocabulary is not None:
            check_known(kept, self._vocabulary, self._tokenizer)
        return Encoded(kept[:1], (kept[1:],), (), cut=len(ids) > self._max_length)

    def objective(
        self, logprobs: Tensor, batch: ExampleBatch, part: TextPart
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of γ · loss, and of the loss.

        Args:
            logprobs: float32 [N], log π of the targets, at temperature 1.
        """
        loss = -(logprobs * batch.weights).sum() / part.tokens
        return self.coefficient * loss, {"loss": loss.detach().double()}

    @property
    def position(self) -> dict[str, Any]:
        """Where the next step's texts begin, plain JSON; the same on all ranks."""
        return self._rows.position

    def seek(self, position: dict[str, Any]) -> None:
        self._rows.seek(position)
