"""The few numbers and bytes the learner's ranks tell each other, beside what Megatron exchanges itself.

Plain numbers in tensors and length-prefixed bytes; nothing is pickled.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from buffer.groups import Frame
from learner import parallel

DIGEST_BYTES = 16


def sum_over_data(values: Sequence[float]) -> list[float]:
    """Sums over the data-parallel ranks, in float64."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_data(values: Sequence[float]) -> list[float]:
    return _reduce(values, dist.ReduceOp.MAX)


def _reduce(values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=parallel.device())
    dist.all_reduce(tensor, how, parallel.data_parallel_group())
    return tensor.tolist()


def from_last_stage(values: Sequence[float]) -> list[float]:
    """What the last pipeline stage holds, on every stage; all give equally many."""
    tensor = torch.tensor(values, dtype=torch.float64, device=parallel.device())
    dist.broadcast(tensor, parallel.last_stage_source(), parallel.pipeline_group())
    return tensor.tolist()


def numbers_over_data(mine: torch.Tensor) -> torch.Tensor:
    """The numbers [n] of all data-parallel ranks in one tensor, float64, in the ranks' order."""
    counts = torch.zeros(parallel.dp_size(), dtype=torch.int64, device=mine.device)
    counts[parallel.dp_rank()] = len(mine)
    dist.all_reduce(counts, group=parallel.data_parallel_group())
    padded = torch.zeros(max(1, int(counts.max())), dtype=torch.float64, device=mine.device)
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in range(parallel.dp_size())]
    dist.all_gather(found, padded, parallel.data_parallel_group())
    return torch.cat([part[:count] for part, count in zip(found, counts.tolist(), strict=True)])


def digests_over_data(digests: Sequence[bytes]) -> list[bytes]:
    """The digests, DIGEST_BYTES long each, of all data-parallel ranks."""
    return _rows_over_data(digests, DIGEST_BYTES)


def names_over_data(names: Iterable[str]) -> list[str]:
    """Every name that any data-parallel rank has, sorted."""
    mine = [name.encode() for name in names]
    (longest,) = max_over_data([max(map(len, mine), default=0)])
    if not longest:
        return []
    return sorted({row.rstrip(b"\0").decode() for row in _rows_over_data(mine, int(longest))})


def _rows_over_data(rows: Sequence[bytes], width: int) -> list[bytes]:
    """Rows of at most `width` bytes, filled up with zeros, of all data-parallel ranks."""
    counts = torch.zeros(parallel.dp_size(), dtype=torch.int64, device=parallel.device())
    counts[parallel.dp_rank()] = len(rows)
    dist.all_reduce(counts, group=parallel.data_parallel_group())
    longest = int(counts.max())
    mine = np.zeros((longest, width), np.uint8)
    for place, row in zip(mine, rows, strict=False):
        place[: len(row)] = np.frombuffer(row, np.uint8)
    tensor = torch.from_numpy(mine).to(parallel.device())
    found = [torch.empty_like(tensor) for _ in range(parallel.dp_size())]
    dist.all_gather(found, tensor, parallel.data_parallel_group())
    tables = zip(found, counts.tolist(), strict=True)
    return [row.tobytes() for table, count in tables for row in table.cpu().numpy()[:count]]


def broadcast_numbers(values: Sequence[int]) -> list[int]:
    """Global rank 0's integers, on every rank; all give equally many."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.broadcast(tensor, 0)
    return tensor.tolist()


def wait_on_first(done: Callable[[], bool]) -> None:
    """Wait until `done`, asked again and again on global rank 0, says so.

    The others are told each time, so that a long wait never looks like a dead rank 0.
    """
    while not broadcast_numbers([parallel.rank() != 0 or done()])[0]:
        pass


def max_over_world(values: Sequence[int]) -> list[int]:
    """The largest of every rank's integers, on every rank; all give equally many."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def are_same(text: str) -> bool:
    """Whether every rank gave the same text. Collective."""
    mine = text.encode()
    (first,) = broadcast_frames([mine] if parallel.rank() == 0 else None, 0, None)
    return not max_over_world([first != mine])[0]


def sum_over_world(values: Sequence[float]) -> list[float]:
    """Sums over all ranks, in float64; all give equally many."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def sum_on_first(mine: torch.Tensor) -> torch.Tensor:
    """The sums of every rank's float32 numbers [n], on global rank 0; elsewhere of no meaning."""
    dist.reduce(mine, 0)
    return mine


def broadcast_frames(
    frames: Sequence[Frame] | None, source: int, group: dist.ProcessGroup | None
) -> list[bytes]:
    """Bytes of one rank, on all ranks of a group.

    Args:
        frames: On the source, what to send; None elsewhere.
        source: Its global rank.
        group: None is every rank.
    """
    count = torch.tensor([0 if frames is None else len(frames)])
    dist.broadcast(count, source, group)
    sizes = torch.zeros(int(count), dtype=torch.int64)
    if frames is not None:
        sizes = torch.tensor([memoryview(f).nbytes for f in frames], dtype=torch.int64)
    dist.broadcast(sizes, source, group)
    body = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    if frames is not None:
        joined = bytearray().join(frames)
        body = torch.frombuffer(joined, dtype=torch.uint8) if joined else body
    dist.broadcast(body, source, group)
    raw = body.numpy()
    ends = np.cumsum(sizes.numpy())
    return [raw[end - size : end].tobytes() for end, size in zip(ends, sizes.tolist(), strict=True)]
