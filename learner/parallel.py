"""The learner's processes: torch.distributed and Megatron's groups, and where this process stands in them.

Under torchrun the world comes from its environment; without it this is a world of one process.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore

from learner import cpu_backend
from learner.config import ParallelConfig

COLLECTIVE_S = 1800.0
"""Longest wait in any collective before the process fails."""

_export_group: dist.ProcessGroup | None = None


def initialize(parallel: ParallelConfig, seed: int = 1, key: str = "learner.parallel") -> None:
    """Start the processes' groups and random generators. Collective.

    Args:
        parallel: Tensor, pipeline and expert sizes; what tensor and pipeline leave of the world is data
            parallel.
        seed: Of the generators; tensor-parallel ranks get distinct streams from it.
        key: The layout's section, for messages.

    Raises:
        ValueError: The world size is not a multiple of tensor · pipeline, or a stage's of the expert size.
    """
    global _export_group
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cells = parallel.tensor * parallel.pipeline
    if world % cells:
        raise ValueError(
            f"{key}: {world} processes are not a multiple of tensor · pipeline = {cells}; "
            f"start {cells} or a multiple (torchrun --nproc-per-node)"
        )
    if world // parallel.pipeline % parallel.expert:
        raise ValueError(
            f"{key}: a pipeline stage's {world // parallel.pipeline} processes are not a multiple "
            f"of expert = {parallel.expert}"
        )
    if not torch.cuda.is_available():
        cpu_backend.apply()
    if not dist.is_initialized():
        _join_world()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        # Tensor ranks do not cut experts: each has its own, or a copy.
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=COLLECTIVE_S / 60,  # pyright: ignore[reportArgumentType]  it takes any number
    )
    group = dist.new_group(first_copy())
    _export_group = group if isinstance(group, dist.ProcessGroup) else None
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _join_world() -> None:
    timeout = timedelta(seconds=COLLECTIVE_S)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # gloo beside nccl: batches are handed round as CPU tensors.
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def shutdown() -> None:
    """Leave the groups. Safe to call twice."""
    global _export_group
    _export_group = None
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def device() -> torch.device:
    """Where this process keeps its parameters."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def is_of_others(error: RuntimeError) -> bool:
    """Whether a collective failed for want of another rank. NCCL has errors of its own for that, gloo plain
    ones that name its source."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def is_first_stage() -> bool:
    return pp_rank() == 0


def is_last_stage() -> bool:
    """Whether this process computes logprobs and losses."""
    return pp_rank() == pp_size() - 1


def dp_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def dp_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def pp_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def pp_size() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size()


def ep_rank() -> int:
    """Which share of every layer's experts this process holds."""
    return parallel_state.get_expert_model_parallel_rank()


def ep_size() -> int:
    return parallel_state.get_expert_model_parallel_world_size()


def data_parallel_group() -> dist.ProcessGroup:
    """The processes that hold the same shard of the model."""
    return _only(parallel_state.get_data_parallel_group())


def tensor_parallel_group() -> dist.ProcessGroup:
    return _only(parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _only(parallel_state.get_pipeline_model_parallel_group())


def model_parallel_group() -> dist.ProcessGroup:
    """The processes that together hold one copy of the model; all of them need the same batch shard."""
    return _only(parallel_state.get_model_parallel_group())


def model_parallel_source() -> int:
    """Global rank that hands its model copy's processes their batch shard: first stage, tensor rank 0."""
    return min(dist.get_process_group_ranks(model_parallel_group()))


def first_copy() -> list[int]:
    """Global ranks that hold the first copy of the model, stage by stage.

    In each they are its first ranks: as many as there are tensor ranks, or expert-parallel ranks if more.
    """
    ranks = range(max(tp_size(), ep_size()))
    return [first_of_stage(stage) + rank for stage in range(pp_size()) for rank in ranks]


def first_of_stage(stage: int) -> int:
    """The lowest global rank of a pipeline stage."""
    return stage * (dist.get_world_size() // pp_size())


def layout() -> ParallelConfig:
    """The sizes that `initialize` was given."""
    return ParallelConfig(tensor=tp_size(), pipeline=pp_size(), expert=ep_size())


def export_group() -> dist.ProcessGroup:
    """The first copy's processes, in a group that training never uses: weights reach rank 0 through it."""
    assert _export_group is not None, "initialize first"
    return _export_group


def _only(group: object) -> dist.ProcessGroup:
    """Narrow what Megatron and torch declare loosely."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def last_stage_source() -> int:
    """Global rank of the last stage in this process's pipeline: it has the losses to tell the others."""
    return parallel_state.get_pipeline_model_parallel_last_rank()
