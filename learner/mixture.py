"""Mixture-of-experts layers: Megatron's router, dispatcher and experts, and tensor ranks that share the work.

An expert lies whole on one rank of its expert-parallel group, and the all-to-all dispatcher brings it its
tokens from all of them; none is dropped. Tensor ranks hold the same tokens, so each routes all and gives its
own part of them away. Shapes: S tokens of the micro-batch, h hidden size, E experts, t tensor size.
"""

from typing import Any

import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region as scatter
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from learner import parallel
from learner.layers import linears


class Router(TopKRouter):
    """Megatron's, but for two functions."""

    def gating(self, input: Tensor) -> Tensor:
        """[S, 1, h] → float32 [S, 1, E]. Megatron's fails where Transformer Engine is not installed."""
        return F.linear(input.float(), self.weight.float())

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Nothing: there is no bias. Megatron's would be compiled to find that out."""


class MixtureLayer(MoELayer):
    """Megatron's, on one part of the tokens for each tensor rank.

    Megatron has that by its sequence parallelism alone, which the other layers here know nothing of.
    """

    def __init__(self, config: TransformerConfig) -> None:
        spec = ModuleSpec(SequentialMLP, submodules=linears())
        super().__init__(config, MoESubmodules(experts=spec, router=Router))
        router: Any = self.router
        experts: Any = self.experts
        # Where it would refuse tensor ranks that hold the same tokens.
        self.attn_tp_group = parallel_state.get_expert_tensor_parallel_group()
        # Its balance loss is of all tokens already.
        router.tp_cp_group = self.attn_tp_group
        self._whole = 0
        for parameter in experts.parameters():
            # Megatron's sign of an expert: its gradient is summed over the ranks that hold a copy of it, and
            # it has an optimizer of its own. Set whatever the expert size, so that checkpoints are alike.
            parameter.allreduce = False

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """[S, 1, h], [S, E] and bool [S, E] → what this rank sends away of its S / t tokens.

        The tokens that fill up to a multiple of t go to no expert.
        """
        self._whole = len(hidden_states)
        size = parallel.tp_size()
        if size > 1:
            missing = -self._whole % size
            hidden_states = scatter(F.pad(hidden_states, (0, 0, 0, 0, 0, missing)))
            probs = scatter(F.pad(probs, (0, 0, 0, missing)))
            routing_map = F.pad(routing_map, (0, 0, 0, missing)).chunk(size)[parallel.tp_rank()]
        return super().preprocess(hidden_states, probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """This rank's part of the tokens back → [S, 1, h]."""
        output = super().postprocess(output, shared_expert_output)
        if parallel.tp_size() > 1:
            # What comes behind is the same on every tensor rank, and so is its gradient.
            whole = gather(output, tensor_parallel_output_grad=False)
            output = whole[: self._whole]
        return output
