"""The frozen initial model that KL terms and DPO measure from."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from learner.adapter import without_adapters
from learner.layout import Layout
from learner.passes import target_logprobs


class Reference:
    """A model of its own; of a policy with adapters the policy itself without them, which takes no memory."""

    def __init__(self, model: Any, is_policy: bool = False) -> None:
        """Args:
        model: A frozen one, or the policy that is trained by adapters.
        is_policy: Which of them.
        """
        self._model = model
        self._is_policy = is_policy

    def logprobs(self, micro_batches: Sequence[Layout], temperature: float = 1.0) -> list[Tensor]:
        """As `passes.target_logprobs`; collective."""
        with without_adapters(self._model) if self._is_policy else nullcontext():
            return target_logprobs(self._model, micro_batches, temperature)
