"""The modules of a transformer layer, chosen by device, and the arithmetic they run in.

On CUDA they are Transformer Engine's, or Megatron's own where that is not installed. On CPU they are the few
here: the same mathematics and parameter names as Megatron's, in fewer passes over memory, and able to compute
in float32 on bfloat16 weights. Shapes: S tokens, h hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from learner import parallel
from learner.attention import SegmentAttention


def compute_dtype(weights: torch.dtype) -> torch.dtype:
    """In which activations and matrix products are computed, for weights of this type.

    A CPU without bfloat16 instructions multiplies bfloat16 matrices 4 to 70 times slower than float32 ones
    (measured on AVX2), so there each weight is widened where it is used; the numbers only get better.
    """
    if weights != torch.bfloat16 or torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weights
    return torch.float32


def block_spec(
    num_layers: int, qk_norm: bool, mixture: type | None = None, adapted: bool = False
) -> TransformerBlockSubmodules:
    """Megatron's description of this stage's layers.

    Args:
        mixture: Takes the place of the MLP.
        adapted: Whether the linears are to have adapters.
    """
    norm, column, row, mlp = _modules(adapted)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=SegmentAttention,  # pyright: ignore[reportArgumentType]
                    linear_proj=row,
                    q_layernorm=norm if qk_norm else IdentityOp,
                    k_layernorm=norm if qk_norm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm,
            mlp=mixture or mlp,
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def linears() -> MLPSubmodules:
    """Of an MLP on this machine."""
    _, column, row, _ = _modules()
    return MLPSubmodules(linear_fc1=column, linear_fc2=row)


def _modules(adapted: bool = False) -> tuple[Any, Any, Any, Any]:
    """Norm, column-parallel linear, row-parallel linear and MLP for this machine.

    Only the linears of this file know of adapters, so that those that have some are theirs on CUDA too.
    """
    if not torch.cuda.is_available():
        return RMSNorm, ColumnLinear, RowLinear, GatedMLP
    from megatron.core.extensions import transformer_engine as te

    norm, column, row = RMSNorm, ColumnParallelLinear, RowParallelLinear
    if te.HAVE_TE:
        norm, column, row = te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear
    if adapted:
        column, row = ColumnLinear, RowLinear
    return norm, column, row, ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))


class RMSNorm(torch.nn.Module):
    """x / rms(x) · weight, reduced in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        # Rounded before the weight and after it, as vLLM and Hugging Face do.
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # With n = x · scale: dx = scale · (g·w − n · mean(g·w·n)), dw = Σ g·n.
        x, weight, scale = ctx.saved_tensors
        grad, normal = grads[0].float(), x.float() * scale
        product = grad * normal
        grad_weight = product.flatten(0, -2).sum(0)
        inner = torch.mv(product.flatten(0, -2), weight.float()).view(scale.shape).div_(-x.shape[-1])
        grad_x = torch.mul(grad, weight).addcmul_(normal, inner).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Adaptable(torch.nn.Module):
    """A linear that may have an `adapter` (`learner/adapter.py`) beside its weight."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.adapter: Any = None

    def _enabled_adapter(self) -> Any | None:
        return self.adapter if self.adapter is not None and self.adapter.enabled else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        described = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # pyright: ignore
        if self.adapter is not None:
            described |= self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return described


class ColumnLinear(_Adaptable, ColumnParallelLinear):
    """Megatron's, multiplying in the type of its input."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        if adapter := self._enabled_adapter():
            return adapter.multiply(input, weight, bias, outputs_of=group)
        return _Multiply.apply(input, weight, bias, group)  # pyright: ignore[reportReturnType]


class RowLinear(_Adaptable, RowParallelLinear):
    """Megatron's, multiplying in the type of its input."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        if adapter := self._enabled_adapter():
            group = parallel.tensor_parallel_group() if parallel.tp_size() > 1 else None
            return adapter.multiply(input, weight, bias, inputs_of=group)
        return _Multiply.apply(input, weight, bias, None)  # pyright: ignore[reportReturnType]


class _Multiply(torch.autograd.Function):
    """x · Wᵀ + b; a widened copy of W lives only as long as the product takes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad.matmul(weight.to(grad.dtype))
        # The input is the same on all ranks of the group, so its gradient is the sum of theirs.
        reduced = dist.all_reduce(grad_x, group=ctx.group, async_op=True) if ctx.group else None
        rows = grad.flatten(0, -2)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t().matmul(x.flatten(0, -2)).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        if reduced is not None:
            reduced.wait()
        return grad_x, grad_weight, grad_bias, None


class GatedMLP(MLP):
    """Megatron's MLP with silu(gate) · up in one function that keeps only its input."""

    def __init__(self, config: Any) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        super().__init__(config, linears, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        output, _bias = self.linear_fc2(_SwiGLU.apply(gate_up))
        return output, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        # In float32 and rounded once, as vLLM does: each further rounding is a difference to the engine.
        return F.silu(gate.float()).mul_(up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return grad
