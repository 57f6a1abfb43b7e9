"""How the time to publish grows with the members: the real publisher, over real gloo, to stand-in engines.

All members of a count live in one process, each with its own connection to the publisher, its own rank of
the broadcast group and its own staging memory; each compares checksums and fingerprints every tensor that it
loads.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.placement import free_port
from sync.buckets import spec_of
from sync.config import SyncConfig
from sync.errors import PublishInterrupted
from sync.publisher import Publisher
from sync.receiver import Receiver
from sync.stand_in import Behavior, StandInSink

RUN = "load"
MIB = 2
REPEATS = 5
TIMEOUT_S = 120.0


def measure_members(counts: list[int]) -> dict[str, Any]:
    return {"model_mib": MIB, "members": {str(count): _measure(count) for count in counts}}


def _measure(count: int) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    config = SyncConfig(
        address=address,
        bucket_mib=1,
        transfer_timeout_s=TIMEOUT_S,
        heartbeat_timeout_s=TIMEOUT_S,
        shared_memory=False,
    )
    publisher = Publisher(config, RUN, torch.device("cpu"))
    publisher.start()
    started = time.monotonic()
    members = subprocess.Popen([sys.executable, __file__, json.dumps([address, count])])
    try:
        if not publisher.wait_for_members(count, TIMEOUT_S):
            raise RuntimeError(f"{len(publisher.members())} of {count} members joined in {TIMEOUT_S} s")
        joined_s = time.monotonic() - started
        times = [publish(publisher, version, count) for version in range(1 + REPEATS)]
        process = seen(members.pid)
    finally:
        members.kill()
        members.wait()
        publisher.close()
    later = [statistics.median(t[part] for t in times[1:]) for part in ("sent_s", "loaded_s")]
    return {
        "start_and_join_s": round(joined_s, 2),
        "first": {part: round(seconds, 3) for part, seconds in times[0].items()},
        "next": {"sent_s": round(later[0], 3), "loaded_s": round(later[1], 3)},
        "process_of_the_members": process,
    }  # fmt: skip


def seen(pid: int) -> dict[str, float]:
    """A process's resident memory, threads and open files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return {
        "rss_mib": round(int(facts["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(facts["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def publish(publisher: Publisher, version: int, count: int) -> dict[str, float]:
    """Seconds until the last bucket was sent, and until every member had loaded; the first has the group to
    build."""
    weights = {f"layer.{i}": torch.full((1 << 18,), float(version)) for i in range(MIB)}
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from weights.items()

    started = time.monotonic()
    try:
        publisher.publish(version, specs, stream())
    except PublishInterrupted as lost:
        raise RuntimeError(f"members were lost: {lost}") from lost
    sent = time.monotonic()
    report = publisher.wait_loaded()
    if len(report.members) != count:
        raise RuntimeError(f"{len(report.members)} of {count} members loaded version {version}")
    return {"sent_s": sent - started, "loaded_s": time.monotonic() - started}


async def hold(address: str, count: int) -> None:
    """So many members, until killed."""
    sinks = [StandInSink(Behavior(run_id=RUN), lambda _: None) for _ in range(count)]
    config = SyncConfig(address=address)
    await asyncio.gather(*(Receiver(config, RUN, f"member-{i}", sink).run() for i, sink in enumerate(sinks)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(hold(*json.loads(sys.argv[1])))
