"""Mends for megatron-core 0.16.1's distributed optimizer, which resumes wrongly with torch's own Adam.

They matter on every device where neither Transformer Engine nor Apex brings its fused Adam. `apply` is called
before an optimizer is built or loaded; `prepare` before its sharded state dict is asked for. `complete` and
`complete_loaded` are for every kind of optimizer.
"""

from typing import Any

import torch

_applied = False


def apply() -> None:
    """Mend loading of the distributed optimizer. Does nothing the second time, or with a fused Adam."""
    from megatron.core.optimizer import distrib_optimizer

    global _applied
    if _applied or distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer
    _mend_parameter_state(optimizer_class)
    _mend_shared_step(optimizer_class)
    _applied = True


def prepare(optimizer: Any) -> None:
    """Give a never-stepped distributed optimizer its moments, so that they can be described and loaded.

    Megatron makes them by a step with zero gradients. That step would also decay the weights, so it is made
    at learning rate 0; and it counts as a step, so call this only on an optimizer that is about to be loaded.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in _parts(optimizer):
        if not isinstance(part, DistributedOptimizer) or part.optimizer.state:
            continue
        rates = [group["lr"] for group in part.optimizer.param_groups]
        for group in part.optimizer.param_groups:
            group["lr"] = 0.0
        part._init_optimizer_states_with_dummy_values()
        for group, rate in zip(part.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def complete(optimizer: Any) -> None:
    """Give a never-stepped optimizer, as of a run that had nothing to learn from so far, the state of step 0.

    It has none before its first step, and cannot be saved without.
    """
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _counts_by_parameter(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def complete_loaded(optimizer: Any, loaded: Any) -> None:
    """Put the step 0, which Megatron does not save, into what was loaded for `load_state_dict`."""
    if not isinstance(loaded, dict) or not all(map(_counts_by_parameter, _parts(optimizer))):
        return
    if "param_groups" in loaded and loaded.get("state"):
        loaded["state"].setdefault("common_step", torch.tensor(0.0))
        return
    for inner in loaded.values():
        complete_loaded(optimizer, inner)


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _counts_by_parameter(part: Any) -> bool:
    """torch's Adam does; a fused one counts in its groups, and there from its first step on."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _mend_parameter_state(optimizer_class: Any) -> None:
    """Copying a parameter's state asks the checkpoint for `step`, which it does not hold there (KeyError),
    and in one sharding writes to a leaf that requires gradients (RuntimeError)."""

    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group_index, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][order]
        targets = {"param": main_param, **self.optimizer.state[main_param]}
        for key, target in targets.items():
            # `step` comes with the parameter groups, through load_state_dict.
            if key != "step":
                target.copy_(tensors[key])

    optimizer_class._set_main_param_and_optimizer_states = set_states


def _mend_shared_step(optimizer_class: Any) -> None:
    """load_state_dict gives every parameter the same `step` tensor, so that torch's Adam counts one step per
    parameter instead of one per step: a silently wrong bias correction after a resume."""
    load_state_dict = optimizer_class.load_state_dict

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer_class.load_state_dict = load_with_own_steps
