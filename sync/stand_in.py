"""An engine's stand-in: a `WeightSink` that stages for real and fingerprints what it would generate with.

For tests of everything around the engine, in this process or, with `serve`, as a server of its own; and a
stand-in for the control channel where ranks are all that a test is about.
"""

import asyncio
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor

from sync.buckets import unpack
from sync.config import SyncConfig
from sync.errors import BY_CAUSE, JoinRefused, ManifestRefused, TransferFailed
from sync.group import LOOK_S, BroadcastGroup, Connecting, Seat
from sync.keys import MemberKeys
from sync.receiver import Receiver
from sync.sink import StagePlan
from sync.stager import Stager
from sync.wire import Entries


def fingerprint(tensor: Tensor) -> int:
    return zlib.crc32(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True, slots=True)
class Behavior:
    """How a stand-in treats what it gets."""

    run_id: str = "test"
    bucket_seconds: float = 0.0
    """Makes a transfer last: time lost on each bucket."""
    load_seconds: float = 0.0
    refuse: str | None = None
    """A tensor name that its model lacks."""
    keys: MemberKeys | None = None


class StandInSink:
    """One rank on CPU. `tell` hears of each staging, first bucket and load."""

    world_size = 1

    def __init__(self, behavior: Behavior, tell: Callable[[dict[str, object]], None]) -> None:
        self._behavior = behavior
        self._tell = tell
        self._stager = Stager(torch.device("cpu"), on_bucket=self._bucket)

    async def stage(self, plan: StagePlan) -> int:
        if self._behavior.refuse in [spec.name for spec in plan.manifest.tensors]:
            raise ManifestRefused(f"{self._behavior.refuse}: not in this server's model")
        seat = Seat(
            plan.host, plan.epoch, plan.nonce, plan.first_rank, plan.group_size, plan.backend, plan.timeout_s,
        )  # fmt: skip
        self._tell(
            {"event": "staging", "version": plan.version, "fresh": plan.fresh, "shared": bool(plan.memory)}
        )
        self._stager.begin(seat, plan.fresh, plan.version, plan.manifest, plan.memory)
        while (left := self._stager.left()) is None:
            self._status()
            await asyncio.sleep(LOOK_S)
        self._stager.bring(await plan.accepted(left))
        status = self._status()
        while status["state"] != "staged":
            await asyncio.sleep(0.01)
            status = self._status()
        return int(str(status["checksum"]))

    def _status(self) -> dict[str, object]:
        """Raises what ended the staging."""
        status = self._stager.status()
        if status["state"] not in ("receiving", "staged"):
            raise BY_CAUSE.get(str(status.get("cause")), TransferFailed)(str(status.get("reason")))
        return status

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        await asyncio.sleep(self._behavior.load_seconds)
        sums = {name: fingerprint(tensor) for name, tensor in unpack(*self._stager.staged(version))}
        self._tell({"event": "loaded", "version": version, "sums": sums})
        loaded()
        return self._behavior.load_seconds

    async def drop(self) -> None:
        self._stager.drop()

    def _bucket(self, index: int) -> None:
        if index == 0:
            self._tell({"event": "first_bucket"})
        time.sleep(self._behavior.bucket_seconds)


class Rank(Protocol):
    """`group.Connecting` and `Stager` are some."""

    def left(self) -> Entries | None: ...

    def bring(self, entries: Entries) -> None: ...


def introduce(*ranks: Rank) -> None:
    """Tell all ranks of a group how each is reached, as the control channel does."""
    entries: Entries = {}
    for rank in ranks:
        while (left := rank.left()) is None:
            time.sleep(LOOK_S)
        entries |= left
    for rank in ranks:
        rank.bring(entries)


def connect(seat: Seat, device: torch.device, *others: Rank) -> BroadcastGroup:
    """The group of a rank that meets `others`, in this process."""
    connecting = Connecting(seat, device, lambda: None)
    introduce(connecting, *others)
    connecting.thread.join()
    return connecting.result()


def serve(address: str, name: str, behavior: Behavior, events: Connection) -> None:
    """A whole server process; what happens to it goes to `events` as JSON."""

    def tell(event: dict[str, object]) -> None:
        events.send_bytes(json.dumps(event).encode())

    async def run() -> None:
        sink = StandInSink(behavior, tell)
        receiver = Receiver(SyncConfig(address=address), behavior.run_id, name, sink, behavior.keys)
        try:
            await receiver.run()
        except JoinRefused as refusal:
            tell({"event": "refused", "reason": str(refusal)})

    torch.set_num_threads(1)
    asyncio.run(run())
