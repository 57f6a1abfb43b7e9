"""A rollout server without an engine, as its own process: it logs which groups were acknowledged.

python buffer_rollout.py ADDRESS NAME LOG
"""

import asyncio
import sys

import numpy as np

from buffer.client import BufferClient, RunFinished
from buffer.records import Group, Lease, Trajectory

TOKENS = 64


def made_group(lease: Lease, name: str) -> Group:
    """Contents that the reader can recompute from the prompt."""
    row = int(lease.prompt.prompt_id.rpartition("/")[2])
    mask = np.ones(TOKENS, np.uint8)
    mask[:8] = 0
    trajectories = tuple(
        Trajectory(
            index=i,
            token_ids=np.arange(TOKENS, dtype=np.int32) + 1000 * row + i,
            loss_mask=mask,
            behavior_logprobs=-mask.astype(np.float32),
            versions=mask.astype(np.int32) * np.int32(lease.version),
            reward=float(i),
            reward_parts={},
            finish_reason="stop",
        )
        for i in range(4)
    )
    return Group(f"{name}/{lease.lease_id}", lease.lease_id, lease.prompt.prompt_id, lease.kind, trajectories)


async def serve(address: str, name: str, log: str) -> None:
    held: set[str] = set()

    async def work(lease: Lease) -> None:
        group = made_group(lease, name)
        await asyncio.sleep(0.001 * (hash(lease.lease_id) % 20))
        for _ in range(2):  # the second time a duplicate
            if await client.deliver(group):
                file.write(f"{group.group_id} {group.prompt_id}\n")
                file.flush()
        held.discard(lease.lease_id)

    async def renew() -> None:
        while True:
            await asyncio.sleep(0.5)
            await client.renew(sorted(held))

    with open(log, "a") as file:  # noqa: ASYNC230
        async with BufferClient(address, "rollout", "run", name) as client, asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renew())
            try:
                while True:
                    for lease in await client.lease(8, 5.0):
                        held.add(lease.lease_id)
                        tasks.create_task(work(lease))
            except RunFinished:
                renewing.cancel()


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(serve(*sys.argv[1:4]), 120))
