"""Receiving in the background: one rank's staging memory, and the thread that fills it during decoding.

Used by the worker side of the vLLM plugin. Every method returns at once: what can hang runs on a thread that
is abandoned when it does, never on the engine's.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sync.buckets import checksum, combine
from sync.errors import ChecksumMismatch, SyncError, TransferFailed
from sync.group import BroadcastGroup, Meeting, Seat
from sync.manifest import Manifest
from sync.shared_memory import map_stream, written
from sync.wire import Entries

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Stage:
    """One staging, from PREPARE to its end. After it began only its own thread writes to it."""

    version: int
    manifest: Manifest
    stream: Tensor = field(repr=False)
    """Where the buckets land, side by side. In shared memory: the learner's, once it is mapped."""
    memory: str
    """Path of the learner's shared memory, or empty."""
    group: BroadcastGroup | None
    """None until connected; usable again once staged."""
    meeting: Meeting | None
    """Where the group's ranks meet; None where it is kept."""
    state: Literal["receiving", "staged", "failed"] = "receiving"
    """receiving: also while what has arrived is prepared."""
    buckets: int = 0
    checksum: int = 0
    cause: str = ""
    reason: str = ""


class Stager:
    """One receiving rank.

    The staging memory is as large as the model and on the host. It is kept between versions: fresh pages
    would halve the bandwidth.
    """

    def __init__(
        self,
        device: torch.device,
        on_bucket: Callable[[int], None] = lambda index: None,
        prepare: Callable[[Manifest, Tensor], None] = lambda manifest, stream: None,
    ) -> None:
        """Both are called on the receiving thread.

        Args:
            on_bucket: With the index of each bucket that landed.
            prepare: With a version that arrived whole and unchanged, before it counts as staged. A SyncError
                of it fails the stage. One at a time, and none of a stage that was dropped before; one that is
                dropped in it stays in it.
        """
        self._device = device
        self._on_bucket = on_bucket
        self._prepare = prepare
        self._preparing = threading.Lock()
        self._memory: Tensor | None = None
        self._stage: Stage | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, seat: Seat, fresh: bool, version: int, manifest: Manifest, memory: str = "") -> None:
        """Start to receive a version; whatever was staged or under way is forgotten.

        Args:
            memory: Where the learner shares the stream; empty where it is broadcast.
        """
        before = self._stage
        kept = before.group if before is not None and before.state == "staged" and not fresh else None
        if kept is None:
            self.drop()
        if not memory:
            stream = self._take_memory(manifest.stream_bytes)
        else:
            self._memory = None
            stream = before.stream if kept is not None and before is not None else torch.empty(0)
        stage = Stage(version, manifest, stream, memory, kept, Meeting(seat) if kept is None else None)
        self._stage = stage
        # gloo's buckets land in the staging memory itself, wherever the model is.
        device = self._device if seat.backend == "nccl" else torch.device("cpu")
        thread = threading.Thread(
            target=_receive,
            args=(stage, seat, device, self._on_bucket, self._prepare_if_wanted),
            daemon=True,
            name="slipstream-stage",
        )
        self._threads = [running for running in self._threads if running.is_alive()] + [thread]
        thread.start()

    def close(self, timeout_s: float) -> None:
        """Drop, and wait for threads left in a collective: an interpreter that ends while one comes back
        from there aborts. A worker process of an engine has no need of this: it ends without finalizing.
        """
        self.drop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def drop(self) -> None:
        """Forget what is staged, and the group. A thread still in a collective is left to its own timeout."""
        stage, self._stage = self._stage, None
        if stage is None:
            return
        if stage.state == "receiving":
            self._memory = None  # that thread may yet write into it
        if stage.group is not None:
            stage.group.abort()

    def left(self) -> Entries | None:
        """What this rank left for the others of a group that is being built; None while that is to come."""
        stage = self._stage
        return stage.meeting.left() if stage is not None and stage.meeting is not None else {}

    def bring(self, entries: Entries) -> None:
        """Go on connecting with what every rank left."""
        if self._stage is not None and self._stage.meeting is not None:
            self._stage.meeting.bring(entries)

    def status(self) -> dict[str, object]:
        """Plain values, fit for any RPC."""
        stage = self._stage
        if stage is None:
            return {"state": "idle"}
        return {
            "state": stage.state,
            "version": stage.version,
            "buckets": stage.buckets,
            "checksum": stage.checksum,
            "cause": stage.cause,
            "reason": stage.reason,
            "left": self.left(),
        }

    def staged(self, version: int) -> tuple[Manifest, Tensor]:
        """What is staged, to be loaded. The memory is overwritten by the next `begin`.

        Raises:
            TransferFailed: That version is not staged.
        """
        stage = self._stage
        if stage is None or stage.state != "staged" or stage.version != version:
            raise TransferFailed(f"version {version} is not staged here")
        return stage.manifest, stage.stream

    def _prepare_if_wanted(self, stage: Stage) -> None:
        with self._preparing:  # the thread of a stage that was dropped goes on, beside the next one's
            if self._stage is not stage:  # what it prepared could take the place of what the next one did
                raise TransferFailed(f"version {stage.version} was dropped")
            self._prepare(stage.manifest, stage.stream)

    def _take_memory(self, size_bytes: int) -> Tensor:
        if self._memory is None or self._memory.numel() < size_bytes:
            self._memory = None
            pinned = self._device.type == "cuda"
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:size_bytes]


def make_seal(version: int, sums: list[int], device: torch.device) -> Tensor:
    """The last broadcast of a version, int64: version, number of buckets, each bucket's checksum."""
    return torch.tensor([version, len(sums), *sums], dtype=torch.int64, device=device)


def _receive(
    stage: Stage,
    seat: Seat,
    device: torch.device,
    on_bucket: Callable[[int], None],
    prepare: Callable[[Stage], None],
) -> None:
    _use_every_core()
    try:
        with _stream_of_its_own(device):
            if stage.group is None:
                assert stage.meeting is not None, "no group and nowhere to meet"
                if stage.memory:
                    stage.stream = map_stream(stage.memory, stage.manifest.stream_bytes)
                stage.group = BroadcastGroup.connect(seat, device, stage.meeting)
            sums = _fill(stage, stage.group, device, on_bucket)
            _compare(stage, stage.group, sums, device)
        prepare(stage)
    except SyncError as error:
        stage.cause, stage.reason, stage.state = error.cause, str(error), "failed"
    else:
        stage.checksum, stage.state = combine(sums), "staged"


def _fill(
    stage: Stage, group: BroadcastGroup, device: torch.device, on_bucket: Callable[[int], None]
) -> list[int]:
    """Receive every bucket; each is summed on a second thread while the next one lands."""
    sums: list[Future[int]] = []
    landing = _landing(stage.manifest, device) if not stage.memory else None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="slipstream-sum") as pool:
        for index in range(stage.manifest.num_buckets):
            start, end = stage.manifest.bucket(index)
            bucket = stage.stream[start:end]
            if stage.memory:
                group.broadcast(written())
            elif landing is None:
                group.broadcast(bucket)
            else:
                group.broadcast(landing[: end - start])
                bucket.copy_(landing[: end - start])
            sums.append(pool.submit(checksum, bucket))
            stage.buckets = index + 1
            on_bucket(index)
    return [future.result() for future in sums]


def _stream_of_its_own(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU neither decoding nor what arrives is to wait for the other's turn."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _landing(manifest: Manifest, device: torch.device) -> Tensor | None:
    """A GPU's bucket to receive into: the whole version would not fit beside model and cache."""
    if device.type == "cpu" or not manifest.num_buckets:
        return None
    return torch.empty(min(manifest.bucket_bytes, manifest.stream_bytes), dtype=torch.uint8, device=device)


def _compare(stage: Stage, group: BroadcastGroup, sums: list[int], device: torch.device) -> None:
    seal = make_seal(0, [0] * len(sums), device)
    group.broadcast(seal)
    version, buckets, *sent = seal.tolist()
    if (version, buckets) != (stage.version, len(sums)):
        here = f"version {stage.version} in {len(sums)} buckets"
        raise ChecksumMismatch(f"sealed as version {version} in {buckets} buckets, expected {here}")
    for index, (got, expected) in enumerate(zip(sums, sent, strict=True)):
        if got != expected:
            raise ChecksumMismatch(f"version {version}: bucket {index} of {buckets} arrived changed")


def _use_every_core() -> None:
    """An engine's worker is bound to cores; its threads inherit that and would share one with decoding."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
