"""Low-rank adapters in training: of each Megatron linear one module, `adapter`, beside its frozen weight.

The linear multiplies by W' = W + alpha / rank · B · A itself, rounded to the type of the weights: by the very
numbers that are published, so that learner and rollout servers have the same policy. W' is made anew in each
pass, one linear's at a time. The gradient is that of the sum before rounding.

Shapes: S tokens, in and out features of this rank. Of several modules in one linear the As lie one behind the
other, [R, in], and B is [out, R], zero where a row is another module's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from learner import lora, parallel
from learner.config import LoraConfig
from learner.slots import Slot, StackedSlot, slots

if TYPE_CHECKING:
    from learner.model import PolicyModel


class Adapter(torch.nn.Module):
    """Of the linear whose weight is `slot`."""

    def __init__(self, slot: Slot, config: LoraConfig, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.enabled = True
        self.scale = config.scale
        self._slot = slot
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        self._axes: dict[str, int] = {}
        for module, pair in lora.factors(slot, config).items():
            for name, of in zip("ab", pair, strict=True):
                shard = of.read(lora.Initial(of.whole[0], seed), parallel.tp_rank())
                parameter = torch.nn.Parameter(shard.to(parallel.device(), dtype).contiguous())
                getattr(self, name)[module] = parameter
                if of.is_split:
                    # B is cut along its rows, A along its columns; Megatron counts what is cut in norms.
                    self._axes[f"{name}.{module}"] = axis = "ba".index(name)
                    set_tensor_model_parallel_attributes(parameter, True, axis, 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [R, in] and B [out, R]."""
        a, slot = torch.cat([*self.a.values()]), self._slot
        if not isinstance(slot, StackedSlot):
            (b,) = self.b.values()
            return a, b
        parts, start = [], 0
        sharing = 1 if slot.splits_groups else slot.tensor
        for name, shape in slot.whole:
            module = name.split(".")[-2]
            b = self.b[module] if module in self.b else a.new_zeros(shape[0] // sharing, 0)
            parts.append(F.pad(b, (start, len(a) - start - b.shape[1])))
            start += b.shape[1]
        b = slot.stack(parts)
        if slot.splits_groups:
            # Each rank gives slopes to its own rows alone, of what all ranks have whole.
            b = slot.part_of(copy_to_tensor_model_parallel_region(b), parallel.tp_rank())
        return a, b

    @torch.no_grad()
    def fused(self, weight: Tensor) -> Tensor:
        """W' of this rank's shard."""
        return lora.fuse(weight, *self.factors(), self.scale)

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        outputs_of: dist.ProcessGroup | None = None,
        inputs_of: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """x · W'ᵀ + b, of x [..., in].

        Args:
            bias: Frozen too.
            outputs_of: Ranks that hold the other output features, if there are any; x is the same on all.
            inputs_of: Ranks that hold the other input features; the gradient is the same on all.
        """
        a, b = self.factors()
        return _Multiply.apply(x, weight, a, b, bias, self.scale, outputs_of, inputs_of)  # pyright: ignore

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """In Megatron's description, as `learner/megatron_folder.py` reads it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        held = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": parallel.tensor_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(held, prefix, self._axes, sharded_offsets, **groups)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale: float,
        outputs_of: dist.ProcessGroup | None,
        inputs_of: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale, ctx.outputs_of, ctx.inputs_of = scale, outputs_of, inputs_of
        fused = lora.fuse(weight, a, b, scale).to(x.dtype)
        return F.linear(x, fused, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # dx = g · W'; dA = scale · (g · B)ᵀ · x; dB = scale · gᵀ · (x · Aᵀ).
        x, weight, a, b = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad.matmul(lora.fuse(weight, a, b, ctx.scale).to(grad.dtype))
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        through_b = rows.matmul(b.to(grad.dtype)).mul_(ctx.scale)
        through_a = inputs.matmul(a.to(grad.dtype).t()).mul_(ctx.scale)
        # Each is a sum over features, of which the ranks of a group have a part each.
        for part in (grad_x, through_b) if ctx.outputs_of else ():
            dist.all_reduce(part, group=ctx.outputs_of)
        if ctx.inputs_of:
            dist.all_reduce(through_a, group=ctx.inputs_of)
        grad_a = through_b.t().matmul(inputs).to(a.dtype)
        grad_b = rows.t().matmul(through_a).to(b.dtype)
        return grad_x, None, grad_a, grad_b, None, None, None, None


def attach(model: "PolicyModel", config: LoraConfig) -> None:
    """Freeze a model and give its linears adapters from the run's seed; a score model's row stays trained."""
    family, seed = model.family, torch.initial_seed()
    model.requires_grad_(False)
    for slot in slots(family, parallel.layout()):
        if slot.stage == parallel.pp_rank() and lora.factors(slot, config):
            linear = model.get_submodule(slot.parameter.removesuffix(".weight"))
            linear.adapter = Adapter(slot, config, model.config.params_dtype, seed)
    if family.head == "score" and model.is_last_stage:
        model.get_parameter("score.weight").requires_grad_(True)


def adapter_of(model: torch.nn.Module, parameter: str) -> Adapter | None:
    """The adapter of the weight of that name, if it has one."""
    home, _, kind = parameter.rpartition(".")
    return getattr(model.get_submodule(home), "adapter", None) if kind == "weight" else None


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is its frozen base."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
