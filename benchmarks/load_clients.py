"""The clients of `load.py`: simulated rollout servers, and the learner's readers, each group in a process.

A server is the real loop and the real client of a rollout server around groups that were made once; it takes
as many leases as it may hold, renews them, and delivers. The readers are the data-parallel ranks of one
learner: rank 0 waits for a batch, the others then fetch their shards of it, rank 0 tells of the new version
and, now and then, of a checkpoint.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop

from buffer.client import BufferClient
from buffer.records import Group, Lease, Trajectory
from rollout.loop import RolloutLoop
from rollout.metrics import Meters

T = TypeVar("T")

RUN = "load"
TOKENS, PROMPT_TOKENS = 64, 16
IN_HAND = 8
"""Leases that a server holds at most."""
RENEW_S = 5.0
METERS_S = 2.0
BATCHES_PER_CHECKPOINT = 4
PATIENCE_S = 120.0

MASK = (np.arange(TOKENS) >= PROMPT_TOKENS).astype(np.uint8)
TOKEN_IDS = np.arange(TOKENS, dtype=np.int32)
LOGPROBS = np.where(MASK > 0, -0.7, 0.0).astype(np.float32)
TEXT = "x" * 200


class Timed:
    """A client whose calls are timed."""

    def __init__(self, client: BufferClient, seconds: dict[str, list[float]]) -> None:
        self._client = client
        self._seconds = seconds

    async def start(self) -> None:
        await self._client.start()

    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]:
        return await timed(self._client.lease(max_groups, timeout_s), self._seconds["lease"])

    async def withdraw(self) -> list[Lease]:
        return await self._client.withdraw()

    async def renew(self, lease_ids: Any) -> set[str]:
        return await timed(self._client.renew(lease_ids), self._seconds["renew"])

    async def deliver(self, group: Group) -> bool:
        return await timed(self._client.deliver(group), self._seconds["deliver"])

    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> Any:
        return await self._client.give_up(lease_id, reason, requeue)


async def timed(call: Coroutine[Any, Any, T], seconds: list[float]) -> T:
    started = time.perf_counter()
    answer = await call
    seconds.append(time.perf_counter() - started)
    return answer


class Made:
    """Where engine and rewards are: a group at once, labelled with the lease's version."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self.silent: list[str] = []
        """Nobody ever is."""

    async def answered(self) -> None:
        return

    async def ready(self) -> None:
        return

    async def run(self, lease: Lease) -> Group:
        versions = MASK.astype(np.int32) * np.int32(lease.version)
        trajectories = tuple(
            Trajectory(
                index, TOKEN_IDS, MASK, LOGPROBS, versions, float(index % 2), {"correct": float(index % 2)},
                "stop", metadata={"text": TEXT},
            )
            for index in range(self._group_size)
        )  # fmt: skip
        return Group(f"g-{lease.lease_id}", lease.lease_id, lease.prompt.prompt_id, lease.kind, trajectories)


class Ready:
    async def wait_first_version(self) -> None:
        return


async def produce(address: str, out: Path, names: Iterable[str], group_size: int) -> None:
    """Serve until the run is over."""
    seconds: dict[str, list[float]] = defaultdict(list)
    meters = {name: Meters(name) for name in names}

    async def serve(name: str, own: Meters) -> None:
        async with BufferClient(address, "rollout", RUN, name) as client:
            await RolloutLoop(Timed(client, seconds), Ready(), Made(group_size), IN_HAND, RENEW_S, own).run()

    async def drain() -> None:
        while True:
            await asyncio.sleep(METERS_S)
            for own in meters.values():
                own.line()

    draining = asyncio.create_task(drain())
    await asyncio.gather(*(serve(name, own) for name, own in meters.items()))
    draining.cancel()
    out.write_text(json.dumps(seconds))


async def read(address: str, folder: Path, plan: dict[str, Any]) -> None:
    """Batches until `total` trajectories or `seconds` are over; then slowly, for `slow_s`; then the end."""
    size, staleness = plan["readers"], plan["max_staleness"]
    waits: list[float] = []
    shards: list[float] = []
    trained: set[str] = set()
    told: dict[str, Any] = {"batch": shards, "first": waits, "phases": [], "trajectories": 0}
    index = 0
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(BufferClient(address, "learner", RUN, f"rank-{rank}"))
            for rank in range(size)
        ]
        await ranks[0].published(0)

        async def take() -> None:
            nonlocal index
            first = await timed(ranks[0].batch(index, 0, size, PATIENCE_S), waits)
            others = (
                timed(ranks[rank].batch(index, rank, size, PATIENCE_S), shards) for rank in range(1, size)
            )
            for shard in (first, *await asyncio.gather(*others)):
                assert shard is not None, f"batch {index} did not come within {PATIENCE_S} s"
                for group in shard.groups:
                    assert index - group.oldest_version <= staleness, "too old"
                    assert group.prompt_id not in trained, f"{group.prompt_id} is trained twice"
                    trained.add(group.prompt_id)
                    told["trajectories"] += len(group.trajectories)
            index += 1
            await ranks[0].published(index)
            if index % BATCHES_PER_CHECKPOINT == 0:
                await ranks[0].committed(index - BATCHES_PER_CHECKPOINT)

        for phase, seconds, pause_s in (
            ("flow", plan["seconds"], 0.0),
            ("slow", plan["slow_s"], plan["pause_s"]),
        ):
            began, end = time.time(), time.monotonic() + seconds
            while time.monotonic() < end and (phase == "slow" or told["trajectories"] < plan["total"]):
                await take()
                await asyncio.sleep(pause_s)
            told["phases"].append([phase, began, time.time(), told["trajectories"]])
        await ranks[0].finished(index)
    (folder / "read.json").write_text(json.dumps({**told, "versions": index}))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if "names" in job:
        work = produce(job["address"], Path(job["out"]), job["names"], job["group_size"])
    else:
        work = read(job["address"], Path(job["folder"]), job["plan"])
    uvloop.run(work)
