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

_CACHED_BYTES = 1 << 18
"""What a core's second-level cache holds with room to spare."""


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def pack(
    manifest: Manifest,
    tensors: Iterable[tuple[str, Tensor]],
    lend: Callable[[int], Tensor],
) -> Iterator[tuple[Tensor, int]]:
    """Copy tensors into buckets as they come.

    Args:
        manifest: What `tensors` will yield, in this order.
        lend: Called with a size in bytes when a bucket begins; returns a uint8 tensor of that size to fill.
            It may block until one is free.

    Yields:
        (the filled bucket, its `checksum`), as soon as it is full.

    Raises:
        ValueError: `tensors` and `manifest` disagree; the text names the first tensor that does.
    """
    filling: _Filling | None = None
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
            if filling is not None and place >= end:
                yield filling.bucket, filling.checksum()
                filling, index = None, index + 1
            if filling is None:
                start, end = manifest.bucket(index)
                filling = _Filling(lend(end - start))
            count = min(end - place, spec.size_bytes - done)
            filling.put(place - start, source[done : done + count])
            done += count
    missing = next(placed, None)
    if missing is not None:
        raise ValueError(f"{missing[0].name}: in the manifest, but not yielded")
    if filling is not None:
        yield filling.bucket, filling.checksum()


class _Filling:
    """A bucket being filled from its start to its end.

    On CPU it is summed on the way, while what was copied is still in the core's cache: on a machine that
    also decodes, a second pass through memory costs the publish a tenth of its bandwidth.
    """

    def __init__(self, bucket: Tensor) -> None:
        self.bucket = bucket
        self._bytes = bucket.numpy() if bucket.device.type == "cpu" else None
        self._sums: list[np.ndarray] = []
        self._summed = 0

    def put(self, offset: int, source: Tensor) -> None:
        """Copy `source` (uint8) to `offset`, which is never before the end of the piece put last."""
        if self._bytes is None or source.device.type != "cpu":
            self.bucket[offset : offset + source.numel()].copy_(source)
            return
        # By numpy, in one thread: torch's team of them spins for cores that the engine and gloo are using.
        piece = source.numpy()
        for start in range(0, len(piece), _CACHED_BYTES):
            end = min(start + _CACHED_BYTES, len(piece))
            np.copyto(self._bytes[offset + start : offset + end], piece[start:end])
            self._sum_until((offset + end) // BLOCK_BYTES * BLOCK_BYTES)

    def checksum(self) -> int:
        if self._bytes is None:
            return checksum(self.bucket)
        self._sum_until(len(self._bytes))
        return _weigh(np.concatenate(self._sums))

    def _sum_until(self, end: int) -> None:
        assert self._bytes is not None
        if end - self._summed >= _CACHED_BYTES // 2 or end == len(self._bytes):
            self._sums.append(_block_sums(self._bytes[self._summed : end]))
            self._summed = end


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
    if bucket.device.type == "cpu":
        return _weigh(_block_sums(bucket.numpy()))
    return _weigh(bucket.view(torch.int64).view(-1, BLOCK_BYTES // 8).sum(dim=1).cpu().numpy())


def combine(checksums: list[int]) -> int:
    """One checksum of a version, from those of its buckets in order."""
    return _weigh(np.array(checksums, dtype=np.int64))


def _block_sums(words: np.ndarray) -> np.ndarray:
    return words.view(np.int64).reshape(-1, BLOCK_BYTES // 8).sum(axis=1)


def _weigh(sums: np.ndarray) -> int:
    weights = (2 * np.arange(len(sums), dtype=np.uint64) + np.uint64(1)) * _ODD
    return int((sums.view(np.uint64) * weights).sum(dtype=np.uint64).view(np.int64))
