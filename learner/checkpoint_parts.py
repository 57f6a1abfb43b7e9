"""One model of a checkpoint: its weights and its optimizer's state, in Megatron's distributed format.

Collective over all ranks of whichever job holds the model.
"""

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from learner import optimizer_resume, parallel
from learner.checkpoint_files import disk_error
from learner.optimizer import Trainable


def save_part(folder: Path, part: Trainable, distributed_optimizer: bool) -> None:
    """Write it into a folder that is made if need be."""
    from megatron.core import dist_checkpointing

    _write_in_this_process()
    make(folder)
    optimizer_resume.complete(part.optimizer)
    dist_checkpointing.save(_state(part, distributed_optimizer, loading=False), str(folder))


def load_part(folder: Path, part: Trainable, distributed_optimizer: bool) -> None:
    """The reverse, under whatever layout."""
    from megatron.core import dist_checkpointing

    if distributed_optimizer:
        optimizer_resume.prepare(part.optimizer)
    state: Any = dist_checkpointing.load(_state(part, distributed_optimizer, loading=True), str(folder))
    _fill(_unwrapped(part), state["model"])
    optimizer_resume.complete_loaded(part.optimizer, state["optimizer"])
    part.optimizer.load_state_dict(state["optimizer"])


def _state(part: Trainable, distributed_optimizer: bool, loading: bool) -> dict[str, Any]:
    """What is saved, described shard by shard."""
    model = _described(_unwrapped(part))
    fields: dict[str, Any] = {}
    if distributed_optimizer:
        fields["metadata"] = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    optimizer = part.optimizer.sharded_state_dict(model, is_loading=loading, **fields)
    return {"model": model, "optimizer": optimizer}


def _described(model: Any) -> dict[str, Any]:
    """A model's weights as the format describes them; the frozen ones of a model with adapters are left out,
    since the run's start has them."""
    described = model.sharded_state_dict(prefix="")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = len(trained) == sum(1 for _ in model.parameters())
    return described if whole else {name: place for name, place in described.items() if name in trained}


def _fill(model: Any, state: dict[str, Any]) -> None:
    """The reverse."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    missing, unknown = model.load_state_dict(state, strict=not frozen)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not unknown, unknown
    assert not trained & set(missing), missing


def reason_of(error: BaseException) -> str:
    """The line that says it, out of what torch and Megatron wrap around it."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _write_in_this_process() -> None:
    """Have Megatron's writer start no process: its own are meant for writing in the background.

    One serves a queue of results, and stays for ever when the learner is killed with SIGKILL. Others are
    forked to write a file each, and are waited for without end: where one is killed the learner stands.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert hasattr(filesystem_async, "_results_queue"), "megatron-core moved its writer's queue"
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.SimpleQueue()
    writer: Any = filesystem_async.FileSystemWriterAsync
    assert hasattr(writer, "write_preloaded_data_multiproc"), "megatron-core moved its writing of files"
    writer.write_preloaded_data_multiproc = staticmethod(_write_files)


def _write_files(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: "queue.SimpleQueue[Any]"
) -> None:
    """In the place of FileSystemWriterAsync.write_preloaded_data_multiproc: a thread for each file."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write(number: int) -> Any:
        told: Any = queue.SimpleQueue()
        counted: Any = queue.Queue()
        counted.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, buckets[number], told, counted, use_fsync=True, use_msc=use_msc
        )
        return told.get()[1]

    with ThreadPoolExecutor(len(buckets)) as pool:
        found = list(pool.map(write, range(len(buckets))))
    errors = [one for one in found if isinstance(one, Exception)]
    results.put(disk_error(errors[0]) or errors[0] if errors else dict(enumerate(found)))


def make(folder: Path) -> None:
    """Collective."""
    if parallel.rank() == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()


def _unwrapped(trainable: Trainable) -> Any:
    """The model inside the data-parallel wrapper."""
    return trainable.model.module
