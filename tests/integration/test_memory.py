"""What the buffer and a rollout server keep in memory does not grow with the groups that went through them.

The real service, clients and server loop over ZeroMQ, in this process, where every byte that Python holds is
counted. What the process takes beyond that, over millions of trajectories, is in benchmarks/load.py.
"""

import asyncio
import gc
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from recorded_run import recorded_groups

from buffer import settled, starvation
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.prompts import PromptQueue
from buffer.server import BufferServer
from buffer.store import Sources, Store
from rollout.loop import RolloutLoop
from rollout.metrics import Meters
from rollout.recorded import RecordedGroups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

GROUPS_PER_BATCH, IN_HAND = 8, 8
WARM_UP, MEASURED = 60, 320
"""Batches."""
LOOKED_AT = 10
"""Batches behind each of which is looked."""
BYTES_PER_GROUP = 24
"""An integer has 28."""


def all_lies_in_the_buffer(store: Store, meters: Meters) -> bool:
    """As many groups as it has room for, and none on its way there: what is held at such moments is the same,
    but for what stays."""
    return store.room() == store.stock().leased == 0 and meters.groups == store.status()["delivered"]


class Ready:
    async def wait_first_version(self) -> None:
        return


async def through(folder: Path, address: str) -> tuple[int, int]:
    """Groups through all of it; the least bytes that Python held early and late."""
    config = BufferConfig(address=address, groups_per_batch=GROUPS_PER_BATCH, max_staleness=1)
    prompts = PromptQueue([{"prompt": f"p{i}"} for i in range(64)], 0, None, True)
    store = Store(folder, "run", config, Sources(prompts, [], None), time.monotonic)
    store.database.run("PRAGMA synchronous = OFF")  # nobody pulls the plug here
    server = BufferServer(store, folder / "buffer.sqlite", "run", config)
    serving = asyncio.create_task(server.run())
    meters = Meters("server-0")
    version = 0
    groups = RecordedGroups(recorded_groups(4), lambda: version, meters)
    found: list[int] = []
    async with (
        BufferClient(address, "rollout", "run", "server-0") as client,
        BufferClient(address, "learner", "run", "rank-0") as learner,
    ):
        await learner.published(0)
        loop = asyncio.create_task(RolloutLoop(client, Ready(), groups, IN_HAND, 1.0, meters).run())
        for version in range(WARM_UP + MEASURED):
            batch = await learner.batch(version, 0, 1, 30)
            assert batch is not None
            assert len(batch.groups) == GROUPS_PER_BATCH
            del batch
            await learner.published(version + 1)
            await learner.committed(version + 1)
            meters.line()
            if min(abs(version - WARM_UP), abs(version - WARM_UP - MEASURED)) < LOOKED_AT:
                while not all_lies_in_the_buffer(store, meters):  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.001)
                gc.collect()
                found.append(tracemalloc.get_traced_memory()[0])
        await learner.finished(version + 1)
        await loop
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    server.close()
    store.close()
    return min(found[: 2 * LOOKED_AT - 1]), min(found[2 * LOOKED_AT - 1 :])


def test_nothing_is_kept_of_groups_that_are_trained(tmp_path, free_address, monkeypatch):
    # Their newest rows are kept in the database, and looked at: few, so that there are as many early as late.
    monkeypatch.setattr(settled, "KEPT", 100)
    monkeypatch.setattr(starvation, "NEWEST", 100)
    tracemalloc.start()
    try:
        early, late = asyncio.run(through(tmp_path, free_address()))
    finally:
        tracemalloc.stop()
    grown = (late - early) / (MEASURED * GROUPS_PER_BATCH)
    assert grown < BYTES_PER_GROUP, f"{grown:.0f} bytes for each group"
