"""Logprobs and entropy of target tokens, over a vocabulary split across tensor-parallel ranks.

Logits are computed a chunk of targets at a time, and kept for the backward pass up to a bound; beyond it they
are computed again. Reductions are in float32 whatever the weights are. Shapes: N targets, h hidden size, V
vocabulary rows of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_NUMBERS = 1 << 24
"""Logits computed at once: 64 MiB in float32."""

KEPT_NUMBERS = 1 << 27
"""Logits kept for the backward pass, 512 MiB in float32; those beyond are computed again."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of the output layer that lie on this rank."""

    start: int
    rows: int
    """Real tokens; padding rows behind them take no part."""
    group: dist.ProcessGroup | None
    """Tensor-parallel ranks that hold the other rows; None when there are none."""


def target_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden · weightᵀ / temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden: [N, h], the same on all ranks of the shard's group.
        weight: [V, h].
        targets: int64 [N], ids in the whole vocabulary.
        shard: Which rows `weight` holds.
        temperature: Divides the logits.

    Returns:
        float32 [N] twice, the same on all ranks of the group. Both carry a gradient; the entropy's costs
        nothing when the loss does not use it.
    """
    keep = KEPT_NUMBERS if torch.is_grad_enabled() else 0
    return _TargetLogprobs.apply(hidden, weight, targets, shard, temperature, keep)  # pyright: ignore


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.kept = {}
        rows = weight[: shard.rows].to(hidden.dtype)
        log_total = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_total)
        logprobs = torch.empty_like(log_total)
        for part in _chunks(len(targets), shard.rows):
            logits = _logits(hidden[part], rows, temperature)
            peak = _reduce(logits.amax(dim=-1), dist.ReduceOp.MAX, shard)
            logits.sub_(peak[:, None])
            local, here = _local_targets(targets[part], shard)
            picked = logits.gather(1, local[:, None])[:, 0].masked_fill_(~here, 0.0)
            odds = logits.exp()
            # Σ e^l, Σ e^l·l and the target's l, each the sum of what the ranks have.
            sums = torch.stack([odds.sum(dim=-1), torch.einsum("nv,nv->n", odds, logits), picked])
            total, weighted, picked = _reduce(sums, dist.ReduceOp.SUM, shard)
            log_total[part] = total.log() + peak
            logprobs[part] = picked - total.log()
            entropy[part] = total.log() - weighted / total
            if keep >= logits.numel():
                keep -= logits.numel()
                ctx.kept[part.start] = logits.sub_(total.log()[:, None])
        ctx.save_for_backward(hidden, weight, targets, log_total, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        # An output that the loss does not use then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # dl = g · (onehot − p) − gₕ · p · (log p + H), with g and gₕ the gradients of logprob and entropy.
        hidden, weight, targets, log_total, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        of_logprobs = torch.zeros_like(log_total) if grads[0] is None else grads[0]
        of_entropy = grads[1]
        wide = weight[: shard.rows].to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(wide) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(targets), shard.rows):
            grad_logprobs = of_logprobs[part, None] / ctx.temperature
            logits = ctx.kept.pop(part.start, None)
            if logits is None:
                logits = _logits(hidden[part], wide, ctx.temperature).sub_(log_total[part, None])
            if of_entropy is not None:
                scale = of_entropy[part, None] / ctx.temperature
                factor = (logits + entropy[part, None]).mul_(scale).add_(grad_logprobs).neg_()
                slopes = logits.exp_().mul_(factor)
            else:
                slopes = logits.exp_().mul_(-grad_logprobs)
            local, here = _local_targets(targets[part], shard)
            slopes.scatter_add_(1, local[:, None], grad_logprobs * here[:, None])
            slopes = slopes.to(hidden.dtype)
            torch.mm(slopes, wide, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(slopes.t(), hidden[part])
        grad_hidden = _reduce(grad_hidden, dist.ReduceOp.SUM, shard)
        if grad_weight is not None:
            # Padding rows have no gradient.
            padding = len(weight) - shard.rows
            grad_weight = torch.nn.functional.pad(grad_weight.to(weight.dtype), (0, 0, 0, padding))
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(targets: int, rows: int) -> list[slice]:
    size = max(1, CHUNK_NUMBERS // max(rows, 1))
    return [slice(start, min(start + size, targets)) for start in range(0, targets, size)]


def _logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Float32 [n, V]."""
    logits = hidden.matmul(rows.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local_targets(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Row of each target on this rank, 0 where it lies on another; and whether it lies here."""
    local = targets - shard.start
    here = (local >= 0) & (local < shard.rows)
    return local.where(here, 0), here


def _reduce(values: Tensor, operation: Any, shard: VocabShard) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(values, op=operation, group=shard.group)
    return values
