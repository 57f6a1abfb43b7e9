"""A version in memory that the learner shares with servers of its machine, instead of sending it to them.

On one machine a broadcast is the kernel copying every byte into a socket and out again, on both sides' cores.
Here the learner packs into memory that the servers' ranks map: that one copy is all. The broadcast group is
there as always, and says of each bucket that it is written, and what it must sum to.

The memory is anonymous: it has no name in any file system, so nothing is left behind by whoever is killed,
and it is opened through the learner's entry in /proc, which the kernel grants to processes of its user only.
"""

import fcntl
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from sync.errors import MemoryNotShared
from sync.manifest import Manifest

_KNOWN = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""A Python that was built for a C library older than glibc 2.27, as uv's and conda's were, knows neither."""
_KEEPS_ITS_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _KNOWN else 0


def place_of_this_process() -> str:
    """What processes have in common that can open each other's memory: the running system, the namespaces of
    processes and users, and the user. Empty where there is no such memory."""
    if not _KNOWN:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "user")]
        return " ".join(map(str, (boot, *namespaces, os.getuid())))
    except OSError:
        return ""


class SharedStream:
    """The learner's side: a whole version's stream, handed to a `BucketSender` bucket by bucket.

    Of one epoch: once a member is lost that may still read it, another is made, and this one is freed by the
    last process that lets go of it.

    Raises:
        OSError: No memory or no file handle to be had.
        ValueError: Nothing is to be shared.
    """

    device = torch.device("cpu")

    def __init__(self, stream_bytes: int, bucket_bytes: int) -> None:
        self._file = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.stream_bytes, self.bucket_bytes = stream_bytes, bucket_bytes
        try:
            os.ftruncate(self._file, stream_bytes)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _KEEPS_ITS_SIZE)
            memory = mmap.mmap(self._file, stream_bytes)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._stream = torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            os.close(self._file)

    def fits(self, manifest: Manifest) -> bool:
        return (self.stream_bytes, self.bucket_bytes) == (manifest.stream_bytes, manifest.bucket_bytes)

    def take(self) -> list[Tensor]:
        """Every bucket's place, in order."""
        return list(self._stream.split(self.bucket_bytes))

    def give_back(self, buffers: list[Tensor]) -> None:
        """Nothing: the next version goes to the same places."""

    def outgoing(self, bucket: Tensor) -> Tensor:
        """What is broadcast of a bucket: that it is written."""
        return written()


def written() -> Tensor:
    """A broadcast that stands for a bucket in shared memory."""
    return torch.zeros(1, dtype=torch.uint8)


def map_stream(path: str, stream_bytes: int) -> Tensor:
    """A server's side: the learner's stream (uint8); what this process writes to it stays its own.

    Raises:
        MemoryNotShared: It cannot be opened, or is not what a `SharedStream` made.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Reading beyond the end of a file that was cut meanwhile would end this process.
            if (
                # A kernel may add a seal of its own, against executing it (vm.memfd_noexec).
                fcntl.fcntl(file, fcntl.F_GET_SEALS) & _KEEPS_ITS_SIZE != _KEEPS_ITS_SIZE
                or os.fstat(file).st_size != stream_bytes
            ):
                raise MemoryNotShared(f"{path}: not {stream_bytes} bytes that a learner shares")
            # Private, so that a stray write of an engine stays in its process, where the next sum finds it.
            memory = mmap.mmap(file, stream_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise MemoryNotShared(f"{path}: {error}") from None
    return torch.frombuffer(memory, dtype=torch.uint8)
