"""Offline stages as a program, run by torchrun or alone: several runs, one after the other.

    python offline_jobs.py JOBS

`JOBS` is a JSON list of {config, log, kill_at}: each runs as `python -m learner.offline config` would; at the
step before `kill_at` a rank kills itself with SIGKILL.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from buffer.experiment import load
from learner.offline.config import OfflineExperiment


def run(job: dict[str, Any]) -> None:
    from learner.offline import feed, service

    if "RANK" in os.environ:
        _join_world(job["config"])
    handler = logging.FileHandler(f"{job['log']}-{os.environ.get('RANK', '0')}.txt")
    logging.getLogger().addHandler(handler)
    taken = feed.ExampleFeed.next
    if job["kill_at"]:
        feed.ExampleFeed.next = _killing(taken, job["kill_at"])
    service.serve(load(job["config"], [], OfflineExperiment))
    feed.ExampleFeed.next = taken
    logging.getLogger().removeHandler(handler)


def _killing(taken: Any, step: int) -> Any:
    calls = iter(range(1, step + 1))

    def next_or_die(self: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return taken(self)

    return next_or_die


def _join_world(name: str) -> None:
    """Start the processes' group under a name of its own: they start one for every run."""
    import torch.distributed as dist

    of = os.environ
    store = dist.TCPStore(of["MASTER_ADDR"], int(of["MASTER_PORT"]), is_master=False)
    world = {"rank": int(of["RANK"]), "world_size": int(of["WORLD_SIZE"])}
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), **world)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)


if __name__ == "__main__":
    main()
