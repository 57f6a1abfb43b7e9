"""The frozen initial model that KL terms and DPO measure from, on the learner's own ranks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor

from learner.adapter import without_adapters
from learner.layout import Layout
from learner.passes import target_logprobs


class ReferenceModel(Protocol):
    """Wherever it is."""

    def ask(self, parts: Sequence[Sequence[Layout]], temperature: float) -> list[Iterator[Tensor]]:
        """For each part log π_ref of its micro-batches' targets, float32 [N] each, in their order; on the
        last pipeline stage only. Collective, and so is taking them."""
        ...

    def seconds(self) -> float:
        """What it cost since the last call: its passes here, or the longest that a rank waited for answers.
        Collective."""
        ...


class Reference:
    """A model of its own; of a policy with adapters the policy itself without them, which takes no memory."""

    def __init__(self, model: Any, is_policy: bool = False) -> None:
        """Args:
        model: A frozen one, or the policy that is trained by adapters.
        is_policy: Which of them.
        """
        self._model = model
        self._is_policy = is_policy
        self._seconds = 0.0

    def ask(self, parts: Sequence[Sequence[Layout]], temperature: float) -> list[Iterator[Tensor]]:
        """At once: a policy with adapters is its reference only before the next update."""
        started = time.perf_counter()
        found = [iter(self.logprobs(part, temperature)) for part in parts]
        self._seconds += time.perf_counter() - started
        return found

    def seconds(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken

    def logprobs(self, micro_batches: Sequence[Layout], temperature: float = 1.0) -> list[Tensor]:
        """As `passes.target_logprobs`; collective."""
        with without_adapters(self._model) if self._is_policy else nullcontext():
            return target_logprobs(self._model, micro_batches, temperature)
