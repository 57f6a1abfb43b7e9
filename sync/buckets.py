"""Buckets of a version's byte stream: packed from tensors, checked, and unpacked into views. Pure.

Packing holds one bucket at a time in memory that the caller lends, so that one bucket can be sent while the
next is packed and the learner never holds a second copy of the model.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec

__all__ = ["Manifest", "TensorSpec", "checksum", "combine", "pack", "spec_of", "unpack"]

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: its odd multiples look unrelated


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def pack(
    manifest: Manifest,
    tensors: Iterable[tuple[str, Tensor]],
    lend: Callable[[int], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Copy tensors into buckets as they come.

    Args:
        manifest: What `tensors` will yield, in this order.
        lend: Called with a size in bytes when a bucket begins; returns a uint8 tensor of that size to fill.
            It may block until one is free.

    Yields:
        (index, the filled bucket), as soon as it is full.

    Raises:
        ValueError: `tensors` and `manifest` disagree; the text names the first tensor that does.
    """
    bucket: Tensor | None = None
    index = start = end = 0
    placed = zip(manifest.tensors, manifest.offsets, strict=True)
    for name, tensor in tensors:
        spec, offset = next(placed, (None, 0))
        if spec is None:
            raise ValueError(f"{name}: yielded, but the manifest has only {len(manifest.tensors)} tensors")
        if spec != spec_of(name, tensor):
            raise ValueError(f"{spec_of(name, tensor)}: yielded where the manifest has {spec}")
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        done = 0
        while done < spec.size_bytes:
            place = offset + done
            if bucket is not None and place >= end:
                yield index, bucket
                bucket, index = None, index + 1
            if bucket is None:
                start, end = manifest.bucket(index)
                bucket = lend(end - start)
            count = min(end - place, spec.size_bytes - done)
            _copy(bucket[place - start : place - start + count], source[done : done + count])
            done += count
    missing = next(placed, None)
    if missing is not None:
        raise ValueError(f"{missing[0].name}: in the manifest, but not yielded")
    if bucket is not None:
        yield index, bucket


def _copy(target: Tensor, source: Tensor) -> None:
    """One thread does it on CPU: torch's team of them spins for cores that the engine and gloo are using."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def unpack(manifest: Manifest, stream: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of every tensor in a received stream (uint8, at least `manifest.stream_bytes` long)."""
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        raw = stream[offset : offset + spec.size_bytes]
        yield spec.name, raw.view(getattr(torch, spec.dtype)).view(spec.shape)


def checksum(bucket: Tensor) -> int:
    """A 64-bit checksum of a bucket (uint8, whole blocks): signed, so that msgpack and int64 tensors hold it.

    Sums of 8-byte words modulo 2^64 in each block of 4 KiB, then the blocks' sums weighted by odd numbers
    that depend on their place. It runs at memory speed (crc32 takes four times as long) and finds what a
    transfer can do wrong: any changed word, a torn or stale buffer, blocks or buckets in another order. It
    is not meant against an adversary. On CPU numpy does it, in one thread and without the interpreter's
    lock: torch would start a second team of threads beside the engine's.
    """
    assert bucket.numel() % BLOCK_BYTES == 0, f"{bucket.numel()} bytes are no whole blocks"
    words = bucket.view(torch.int64).view(-1, BLOCK_BYTES // 8)
    on_cpu = bucket.device.type == "cpu"
    return _weigh(words.numpy().sum(axis=1) if on_cpu else words.sum(dim=1).cpu().numpy())


def combine(checksums: list[int]) -> int:
    """One checksum of a version, from those of its buckets in order."""
    return _weigh(np.array(checksums, dtype=np.int64))


def _weigh(sums: np.ndarray) -> int:
    weights = (2 * np.arange(len(sums), dtype=np.uint64) + np.uint64(1)) * _ODD
    return int((sums.view(np.uint64) * weights).sum(dtype=np.uint64).view(np.int64))
