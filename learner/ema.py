"""The exponential moving average of the trained weights, sharded as their master weights are.

    average ← average + (1 − decay) · (weights − average)      after every optimizer step, in float32

It starts as the initial weights, and is of what is trained: with adapters of their A and their B. Made by
`learner/optimizer.py`; `learner/checkpoint.py` keeps it beside the weights, cut for no layout, and
`learner/service.py` writes it as a model of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from learner import parallel


@dataclass(frozen=True, slots=True)
class _Share:
    """What this rank keeps of one parameter."""

    parameter: torch.nn.Parameter
    """The model's, of any type."""
    master: Tensor
    """float32, what the optimizer moves: all of the parameter, or a flat piece of it."""
    start: int
    """Of the piece in the flattened parameter."""
    average: Tensor
    """float32, of the master's shape."""


class Ema:
    """Its methods but `update` are collective."""

    def __init__(self, model: Any, optimizer: Any, decay: float) -> None:
        """Args:
        model: Megatron's DistributedDataParallel around the policy.
        optimizer: Megatron's, of the model's parameters.
        decay: How much of the average stays at each step.
        """
        self._model = model
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._decay = decay
        self._shares = [
            _Share(parameter, master, start, master.detach().float().clone())
            for parameter, master, start in self._masters()
        ]

    def _masters(self) -> Iterator[tuple[torch.nn.Parameter, Tensor, int]]:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if not self._is_distributed:
            for parameter in self._model.module.parameters():
                if parameter.requires_grad:
                    yield parameter, getattr(parameter, "main_param", parameter), 0
            return
        for part in self._parts:
            assert isinstance(part, DistributedOptimizer)
            for parameter, (group, order) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(parameter)["param"]
                yield parameter, part.optimizer.param_groups[group]["params"][order], span.start

    @property
    def _is_distributed(self) -> bool:
        return self._model.ddp_config.use_distributed_optimizer

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, once for a step that was made."""
        for share in self._shares:
            share.average.lerp_(share.master, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's weights are the average; afterwards they are what they were, bit by bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for share in self._shares:
            held = share.master.clone()
            share.master.copy_(share.average)
            share.average.copy_(held)
        for part in self._parts:
            # One of float32 weights that are not sharded has them for masters.
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if self._is_distributed:
            self._model.start_param_sync()

    def sharded_state(self, loading: bool) -> dict[str, Any]:
        """The average as the checkpoint format describes it, under the names of the model's weights.

        Args:
            loading: The tensors are only to be filled, and given to `load`.
        """
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
        from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

        model = self._model.module
        described, _ = extract_sharded_tensors_and_factories(model.sharded_state_dict(prefix=""))
        places = {id(place.data): place for place in nested_values(described)}
        state: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            tensor = torch.empty(parameter.shape) if loading else self._whole(parameter)
            place = places[id(parameter)]
            # What is stored in several tensors, such as gate and up, is taken apart by its place.
            fields = {} if isinstance(place, ShardedTensorFactory) else {"dtype": tensor.dtype}
            state[name] = replace(place, data=tensor, **fields)
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take what `sharded_state` asked for, by the parameters' names."""
        names = {id(parameter): name for name, parameter in self._model.module.named_parameters()}
        for share in self._shares:
            flat = state[names[id(share.parameter)]].flatten()
            piece = flat[share.start : share.start + share.average.numel()]
            share.average.copy_(piece.view_as(share.average))

    def _whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """A parameter's average on the host, put together from the data-parallel ranks if they share it."""
        share = next((s for s in self._shares if s.parameter is parameter), None)
        if not self._is_distributed:
            assert share is not None
            return share.average.cpu()
        whole = torch.zeros(parameter.shape, device=parameter.device)
        if share is not None:
            whole.view(-1)[share.start : share.start + share.average.numel()] = share.average
        # Megatron's mark of an expert, of which other ranks hold the pieces.
        expert = not getattr(parameter, "allreduce", True)
        group = parallel_state.get_expert_data_parallel_group() if expert else parallel.data_parallel_group()
        dist.all_reduce(whole, group=group)
        return whole.cpu()
