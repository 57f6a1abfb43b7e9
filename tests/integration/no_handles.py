"""A process, this one or another, that may open no file any more."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from sync.buckets import spec_of
from sync.config import SyncConfig
from sync.publisher import Publisher


@contextmanager
def none_left(process: int) -> Iterator[None]:
    """Lower a living process's limit to the files that it has open."""
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    folder = f"/proc/{process}/fd"
    # Listed first: the list of this process's own holds the handle that the listing took.
    opened = {int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}
    first_free = next(number for number in range(len(opened) + 1) if number not in opened)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)


def publish_without_handles(address: str, members: int, events: Connection) -> None:
    """A learner's process: three publishes for which no file can be opened, then one for which they can."""
    tensor = torch.ones(7)
    publisher = Publisher(SyncConfig(address=address), "test", torch.device("cpu"))
    publisher.start()
    try:
        publisher.wait_for_members(members, 30)
        told = []

        def publish() -> None:
            publisher.publish(0, [spec_of("bias", tensor)], iter([("bias", tensor)]))
            report = publisher.wait_loaded()
            told.append({"members": report.members, "lost": report.lost})

        with none_left(os.getpid()):
            for _ in range(3):
                publish()
        publish()
        events.send_bytes(json.dumps(told).encode())
    finally:
        publisher.close()
