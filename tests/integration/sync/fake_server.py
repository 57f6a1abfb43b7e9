"""A rollout server without an engine, run as a process of its own: real ZeroMQ, real gloo, real staging.

Prints one JSON line for everything that happens to it. `--delay` makes a transfer last, so that a test can kill
or stop the process in the middle of one.
"""

import argparse
import asyncio
import json
import time
import zlib

import torch

from sync import stager as staging
from sync.buckets import unpack
from sync.config import SyncConfig
from sync.errors import BY_CAUSE, JoinRefused, ManifestRefused, TransferFailed
from sync.group import BroadcastGroup, Seat
from sync.receiver import Receiver
from sync.sink import StagePlan


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


class SlowGroup:
    """Makes the transfer last: a bucket is only asked for `delay_s` after the one before."""

    def __init__(self, group: BroadcastGroup, delay_s: float) -> None:
        self._group, self._delay_s, self.seat = group, delay_s, group.seat
        self._told = False

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor)
        if not self._told:
            self._told = True
            tell(event="first_bucket")
        time.sleep(self._delay_s)

    def abort(self) -> None:
        self._group.abort()


class FakeSink:
    world_size = 1

    def __init__(self, delay_s: float, refuse: str | None, load_seconds: float) -> None:
        self._stager = staging.Stager(torch.device("cpu"))
        self._refuse = refuse
        self._load_seconds = load_seconds
        if delay_s:
            connect = BroadcastGroup.connect
            slow = classmethod(lambda cls, *args: SlowGroup(connect(*args), delay_s))
            staging.BroadcastGroup = type("Slow", (), {"connect": slow})

    async def stage(self, plan: StagePlan) -> int:
        names = [spec.name for spec in plan.manifest.tensors]
        if self._refuse in names:
            raise ManifestRefused(f"{self._refuse}: not in this server's model")
        seat = Seat(
            plan.host, plan.port, plan.epoch, plan.first_rank, plan.group_size, plan.backend, plan.timeout_s
        )
        self._stager.begin(seat, plan.fresh, plan.version, plan.manifest)
        tell(event="staging", version=plan.version, epoch=plan.epoch, fresh=plan.fresh)
        status = self._stager.status()
        while status["state"] == "receiving":
            await asyncio.sleep(0.01)
            status = self._stager.status()
        if status["state"] != "staged":
            raise BY_CAUSE.get(str(status.get("cause")), TransferFailed)(str(status.get("reason")))
        return int(str(status["checksum"]))

    async def load(self, version: int) -> float:
        await asyncio.sleep(self._load_seconds)
        manifest, stream = self._stager.staged(version)
        sums = {
            name: zlib.crc32(t.reshape(-1).view(torch.uint8).numpy()) for name, t in unpack(manifest, stream)
        }
        tell(event="loaded", version=version, sums=sums)
        return self._load_seconds

    async def drop(self) -> None:
        self._stager.drop()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("--run-id", default="test")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds between two buckets")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--refuse", help="a tensor name that this server's model lacks")
    args = parser.parse_args()
    sink = FakeSink(args.delay, args.refuse, args.load_seconds)
    receiver = Receiver(SyncConfig(address=args.address), args.run_id, args.name, sink)
    try:
        await receiver.run()
    except JoinRefused as refusal:
        tell(event="refused", reason=str(refusal))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
