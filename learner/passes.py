"""Passes of micro-batches through a model, by Megatron's schedules, and their sums over all ranks.

Every function is collective: ranks of one model copy hold the same micro-batches in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from learner import collectives, parallel
from learner.layout import Layout

L = TypeVar("L", bound=Layout)
Measure = Callable[[Any, Any], tuple[Tensor, Any]]
"""From a micro-batch and the model's output for it: the loss, and what to keep."""


def equal_counts(micro_batches: list[L], filler: L) -> list[L]:
    """On this rank's device and padded to the most that any rank has, and at least one: Megatron's
    collectives pair them up.

    Args:
        micro_batches: Of this rank.
        filler: Adds nothing to any sum.
    """
    (most,) = collectives.max_over_data([max(1, len(micro_batches))])
    padded = micro_batches + [filler] * (int(most) - len(micro_batches))
    return [m.to(parallel.device()) for m in padded]


def run_schedule(
    model: Any,
    micro_batches: Sequence[Layout],
    measure: Measure,
    forward_only: bool,
    temperature: float | Sequence[float] = 1.0,
    balance: float = 0.0,
) -> list[Any]:
    """Drive Megatron's schedule.

    Args:
        model: In Megatron's data-parallel wrapper, or frozen.
        micro_batches: From `equal_counts`.
        measure: Called on the last pipeline stage.
        forward_only: Without gradients.
        temperature: Divides the logits; of all micro-batches, or one for each.
        balance: Coefficient of the experts' balance loss, whose mean over all ranks' micro-batches is added
            to the loss in the backward pass alone.

    Returns:
        What `measure` kept of each micro-batch, on the last stage; nothing elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    # Megatron adds every router's for every micro-batch.
    get_model_config(model).moe_aux_loss_coeff = balance / (len(micro_batches) * parallel.dp_size())

    def loss(batch: Layout, output: Any) -> tuple[Tensor, Tensor, Any]:
        value, kept = measure(batch, output)
        # The count Megatron would divide gradients by in its per-token mode; ours are divided already.
        return value, torch.zeros((), dtype=torch.int32, device=parallel.device()), kept

    def forward_step(batches: Iterator[tuple[Layout, float]], model: Any) -> tuple[Any, Any]:
        batch, divisor = next(batches)
        return model(batch, divisor), partial(loss, batch)

    temperatures = [temperature] * len(micro_batches) if isinstance(temperature, int | float) else temperature
    model.train(not forward_only)
    # Megatron's schedule leaves it to its caller to keep nothing for a backward pass that does not come.
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=zip(micro_batches, temperatures, strict=True),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=max(m.num_tokens for m in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def target_logprobs(
    model: Any, micro_batches: Sequence[Layout], temperature: float | Sequence[float] = 1.0
) -> list[Tensor]:
    """log π of every micro-batch's targets, float32 [N] each, without gradients; on the last stage only."""

    def keep(batch: Layout, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logprobs = output[0].detach()
        return logprobs.sum(), logprobs

    return run_schedule(model, micro_batches, keep, True, temperature)


def reduce_sums(found: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, float]:
    """Sums of this rank's micro-batches into those of the global batch, on every rank.

    Args:
        found: On the last stage; empty elsewhere.
        names: What to sum; of one that ends in `_max` the largest counts.
    """
    added = [n for n in names if not n.endswith("_max")]
    highest = [n for n in names if n.endswith("_max")]
    sums = [float(sum(m[name] for m in found)) for name in added]
    peaks = [max((float(m[name]) for m in found), default=0.0) for name in highest]
    over_data = collectives.sum_over_data(sums)
    if highest:
        over_data += collectives.max_over_data(peaks)
    return dict(zip([*added, *highest], collectives.from_last_stage(over_data), strict=True))
