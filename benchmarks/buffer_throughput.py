"""How many trajectories a second go into the buffer and out again, each durable before its acknowledgement.

The real service in its own process, over loopback TCP, with SQLite on this machine's disk. Producer processes
lease prompts, encode groups and deliver them; reader processes are data-parallel ranks that take every batch,
decode it and check its tokens; rank 0 publishes each version and confirms checkpoints, so that groups are
deleted again. In and out are measured together, over the same window, after a warm-up. Nothing is generated:
the token arrays are made once.

    python benchmarks/buffer_throughput.py [--seconds 20] [--producers 2] [--readers 1]
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from buffer.client import BufferClient
from buffer.records import Group, Lease, Trajectory

GROUP_SIZE = 8
TOKENS = 1024
PROMPT_TOKENS = 128
GROUPS_PER_BATCH = 64
MAX_STALENESS = 8
LEASES_PER_PRODUCER = 96
BATCHES_PER_CHECKPOINT = 4
WARM_UP_S = 8.0
"""Until the window of max_staleness batches is full: from then on as much goes in as comes out."""
RESULT = Path(__file__).parent / "results" / "buffer_throughput.json"


def made_group(lease: Lease) -> Group:
    """A group of plausible contents, labelled with the lease's version."""
    mask = np.zeros(TOKENS, np.uint8)
    mask[PROMPT_TOKENS:] = 1
    trajectories = tuple(
        Trajectory(
            index=i,
            token_ids=TOKEN_IDS,
            loss_mask=mask,
            behavior_logprobs=LOGPROBS,
            versions=mask.astype(np.int32) * np.int32(lease.version),
            reward=float(i % 2),
            reward_parts={"correct": float(i % 2), "format": 1.0},
            finish_reason="stop",
            metadata={"text": TEXT},
        )
        for i in range(GROUP_SIZE)
    )
    return Group(f"g-{lease.lease_id}", lease.lease_id, lease.prompt.prompt_id, lease.kind, trajectories)


TOKEN_IDS = np.arange(TOKENS, dtype=np.int32)
LOGPROBS = np.where(np.arange(TOKENS) >= PROMPT_TOKENS, -0.7, 0.0).astype(np.float32)
TEXT = "x" * 2000


async def produce(address: str, name: str) -> None:
    """Lease and deliver for ever."""
    async with BufferClient(address, "rollout", "bench", name) as client:
        free = asyncio.Semaphore(LEASES_PER_PRODUCER)

        async def work(lease: Lease) -> None:
            try:
                assert await client.deliver(made_group(lease))
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            while True:
                await free.acquire()
                count = 1
                while count < LEASES_PER_PRODUCER and not free.locked():
                    await free.acquire()
                    count += 1
                leases = await client.lease(count, 5.0)
                for lease in leases:
                    tasks.create_task(work(lease))
                for _ in range(count - len(leases)):
                    free.release()


async def read(address: str, rank: int, size: int) -> None:
    """Take every batch for ever, as one rank of `size`."""
    async with BufferClient(address, "learner", "bench", f"rank-{rank}") as client:
        if rank == 0:
            await client.published(0)
        index = 0
        coming = asyncio.create_task(client.batch(index, rank, size, 60.0))
        while True:
            batch = await coming
            assert batch is not None, f"batch {index} did not come within a minute"
            index += 1
            coming = asyncio.create_task(client.batch(index, rank, size, 60.0))
            if rank == 0:
                await client.published(index)
                if index % BATCHES_PER_CHECKPOINT == 0:
                    await client.committed(index - BATCHES_PER_CHECKPOINT)
            for group in batch.groups:
                for trajectory in group.trajectories:
                    assert trajectory.token_ids[-1] == TOKENS - 1


async def measure(address: str, seconds: float) -> dict[str, Any]:
    async with BufferClient(address, "observer", "bench", "measure") as client:
        await asyncio.sleep(WARM_UP_S)
        before, began = await client.status(), time.perf_counter()
        await asyncio.sleep(seconds)
        after, ended = await client.status(), time.perf_counter()
    lasted = ended - began
    change = {
        k: after[k] - before[k] for k in ("groups_in", "groups_out", "bytes_in", "bytes_out", "transactions")
    }
    return {
        "trajectories_in_per_s": round(change["groups_in"] * GROUP_SIZE / lasted, 1),
        "trajectories_out_per_s": round(change["groups_out"] * GROUP_SIZE / lasted, 1),
        "mib_in_per_s": round(change["bytes_in"] / lasted / 2**20, 1),
        "mib_out_per_s": round(change["bytes_out"] / lasted / 2**20, 1),
        "commits_per_s": round(change["transactions"] / lasted, 1),
        "groups_per_commit": round(change["groups_in"] / max(1, change["transactions"]), 2),
        "evicted": after["evicted"] - before["evicted"],
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(lasted, 2),
    }


def machine() -> str:
    model = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "?",
    )
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores of {model}, {system}"


def spawn(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, __file__, *arguments])


def benchmark(seconds: float, producers: int, readers: int, address: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-", dir=RESULT.parent) as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"What is {i} + 1?"}) + "\n" for i in range(10_000)))
        config = Path(folder) / "bench.yaml"
        buffer = {"address": address, "groups_per_batch": GROUPS_PER_BATCH, "max_staleness": MAX_STALENESS}
        data = {"train": {"kind": "jsonl", "path": str(rows)}}
        config.write_text(
            json.dumps({"name": "bench", "run_dir": f"{folder}/run", "data": data, "buffer": buffer})
        )
        processes = [subprocess.Popen([sys.executable, "-m", "buffer", str(config), "logging.level=WARNING"])]
        try:
            processes += [spawn("--produce", f"server-{i}", "--address", address) for i in range(producers)]
            processes += [spawn("--read", f"{i}/{readers}", "--address", address) for i in range(readers)]
            result = asyncio.run(measure(address, seconds))
            result["database_mib"] = round((Path(folder) / "run" / "buffer.sqlite").stat().st_size / 2**20, 1)
            result["log_mib"] = round((Path(folder) / "run" / "buffer.sqlite-wal").stat().st_size / 2**20, 1)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.wait(20)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--address", default="tcp://127.0.0.1:5791")
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        asyncio.run(produce(options.address, options.produce))
    elif options.read:
        rank, size = options.read.split("/")
        asyncio.run(read(options.address, int(rank), int(size)))
    else:
        measured = benchmark(options.seconds, options.producers, options.readers, options.address)
        setting = {
            "group_size": GROUP_SIZE,
            "tokens_per_trajectory": TOKENS,
            "groups_per_batch": GROUPS_PER_BATCH,
            "producers": options.producers,
            "readers": options.readers,
            "durability": "SQLite WAL, synchronous=FULL, acknowledged after the commit",
        }
        line = {"machine": machine(), "setting": setting, "measured": measured}
        RESULT.write_text(json.dumps(line, indent=2) + "\n")
        sys.stdout.write(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
