"""Megatron's data-parallel wrapper and optimizer around the policy, and the learning-rate schedule.

Losses arrive normalised over the global batch, so gradients are summed over micro-batches and data-parallel
ranks and divided by nothing: Megatron's per-token mode, with its own division left out.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from learner import optimizer_resume, parallel
from learner.config import EmaConfig, OptimizerConfig, ParallelConfig
from learner.ema import Ema
from learner.slots import Slot, slots

logger = logging.getLogger(__name__)


MOST_SKIPPED = 20
"""Updates in a row without a finite gradient: nothing will ever be trained any more."""


@dataclass(slots=True)
class Updates:
    """Of this process."""

    made: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class Trainable:
    model: Any
    """Megatron's DistributedDataParallel around the policy."""
    optimizer: Any
    """Megatron's; fp32 master weights where the policy is bfloat16."""
    ema: Ema | None = None
    """The average of the weights, where one is kept."""
    updates: Updates = field(default_factory=Updates)

    def step(self, clip_grad: float) -> tuple[float, bool]:
        """`apply_gradients`, and one step of the average if it was made.

        Raises:
            ValueError: It was skipped, as so many before it in a row.
        """
        norm, made = apply_gradients(self.optimizer, clip_grad)
        updates = self.updates
        updates.made += made
        updates.skipped_in_a_row = 0 if made else updates.skipped_in_a_row + 1
        if updates.skipped_in_a_row >= MOST_SKIPPED:
            raise ValueError(
                f"the last {MOST_SKIPPED} updates were skipped, their gradients being {norm}: weights that "
                "are not finite stay so; start from others, or from an earlier checkpoint with a lower rate"
            )
        if made and self.ema is not None:
            self.ema.update()
        return norm, made


def make_trainable(
    model: Any, config: OptimizerConfig, layout: ParallelConfig, ema: EmaConfig | None = None
) -> Trainable:
    """Wrap a policy for training. Collective over all ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    _mark_split_parameters(model)
    fields = get_model_config(model)
    bfloat16 = fields.params_dtype is torch.bfloat16
    prepare_schedule(fields)
    fields.finalize_model_grads_func = _finalize_summed_gradients
    wrapped = DistributedDataParallel(
        fields,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
        ),
        model,
    )
    wrapped.broadcast_params()
    if layout.distributed_optimizer:
        optimizer_resume.apply()
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=bfloat16,
            params_dtype=fields.params_dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
        ),
        [wrapped],
    )
    return Trainable(wrapped, optimizer, Ema(wrapped, optimizer, ema.decay) if ema is not None else None)


def _mark_split_parameters(model: Any) -> None:
    """Say which parameters are a tensor rank's own part, so that the gradient's norm counts every part.

    Megatron takes what is not marked for a copy and counts it on tensor rank 0 only. Its layers mark their
    weights where they initialize them, which a model read from a checkpoint skips.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    if parallel.tp_size() == 1:
        return
    parameters = dict(model.named_parameters())
    places = [s for s in slots(model.family, parallel.layout()) if s.stage == parallel.pp_rank()]
    # Experts are uncut, but every rank's are counted: among its own kind each is there once.
    split = {s.parameter: _split_axis(s) for s in places if s.is_split or s.expert is not None}
    # Tied embeddings lie once more on a last stage that is not the first.
    for name, axis in {"output_layer.weight": 0, **split}.items():
        parameter = parameters.get(name)
        if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def _split_axis(slot: Slot) -> int:
    return int(len(slot.shard_shape) == 2 and slot.shard_shape[1] != slot.whole[0].shape[1])


def prepare_schedule(fields: Any) -> None:
    """Set what Megatron's pipeline schedules read from a model's config, for micro-batches of our kind."""
    fields.calculate_per_token_loss = True
    # Micro-batches differ in length, so pipeline stages tell each other the shapes.
    fields.variable_seq_lengths = fields.pipeline_model_parallel_size > 1


def _finalize_summed_gradients(model: list[Any], num_tokens: Any = None, **fields: Any) -> None:
    """Sum over ranks and stop there: the losses are divided already, so `num_tokens` is not passed on."""
    from megatron.core.distributed import finalize_model_grads

    del num_tokens
    finalize_model_grads(model, None, **fields)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate that batch `step` (from 0) of `steps` is trained with.

    Rises linearly over `warmup_steps`, then stays, or falls towards `min_lr`, which the step behind the last
    would have, as in transformers' and so DeepSpeed-Chat's schedules: with 0 there the last one still learns.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


def warn_of_warmup(config: OptimizerConfig, steps: int) -> None:
    """Say so where the rate never reaches what is configured."""
    if config.warmup_steps > steps:
        logger.warning(
            "learner.optimizer.warmup_steps=%d is more than the %d steps: the rate never reaches lr",
            config.warmup_steps, steps,
        )  # fmt: skip


def set_rates(optimizer: Any, rate: float, config: OptimizerConfig) -> None:
    """Give every parameter group this step's settings; a resume left it with the checkpoint's.

    Norms and biases have a `wd_mult` of 0: they are not decayed.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = config.betas, config.eps


def apply_gradients(optimizer: Any, clip_grad: float) -> tuple[float, bool]:
    """Clip and step. Collective.

    Returns:
        The gradient's global norm before clipping, and whether the step was made: a norm that is not finite
        leaves weights and optimizer as they were.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if overflow or not math.isfinite(norm):
        logger.error("gradient norm is %s: this optimizer step is skipped and counted", norm)
        return norm, False
    if clip_grad > 0:
        # Experts have an optimizer of their own, chained to the others'.
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        parameters = [parameter for part in parts for parameter in part.get_parameters()]
        clip_grad_by_total_norm_fp32(parameters, clip_grad, norm)
    optimizer.step_with_ready_grads()
    return norm, True
