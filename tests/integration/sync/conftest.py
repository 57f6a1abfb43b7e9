"""Servers as processes, publishers on free ports, and tiny models, for the sync tests."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from launch.placement import free_port
from sync.buckets import TensorSpec, spec_of
from sync.config import SyncConfig
from sync.publisher import Publisher
from sync.stand_in import Behavior, fingerprint, serve

# Servers are forked from one process that has torch imported already.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["sync.stand_in"])


class Server:
    """A stand-in server's process and what it said."""

    def __init__(self, address: str, name: str, behavior: Behavior) -> None:
        self.name = name
        self.said: list[dict] = []
        self._events, theirs = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=serve, args=(address, name, behavior, theirs))
        self.process.start()
        theirs.close()

    def expect(self, event: str, timeout_s: float = 30.0, **values: object) -> dict:
        """The next event of this kind with these values; whatever comes before is kept in `said`."""
        deadline = time.monotonic() + timeout_s
        while self._events.poll(max(0.0, deadline - time.monotonic())):
            got = json.loads(self._events.recv_bytes())
            self.said.append(got)
            if got["event"] == event and values.items() <= got.items():
                return got
        raise AssertionError(f"{self.name}: no {event} {values}; it said {self.said}")

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._events.close()


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


@pytest.fixture
def start_server(address: str) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(name: str, **behavior: object) -> Server:
        servers.append(Server(address, name, Behavior(**behavior)))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def shared_memory() -> bool:
    """Whether versions lie in shared memory or are sent."""
    return True


@pytest.fixture
def make_publisher(address: str, shared_memory: bool) -> Iterator[Callable[..., Publisher]]:
    publishers: list[Publisher] = []

    def make(**config: float) -> Publisher:
        fields = {"bucket_mib": 1, "transfer_timeout_s": 8.0, "heartbeat_timeout_s": 5.0} | config
        fields["shared_memory"] = shared_memory
        publisher = Publisher(SyncConfig(address=address, **fields), "test", torch.device("cpu"))
        publisher.start()
        publishers.append(publisher)
        return publisher

    yield make
    for publisher in publishers:
        publisher.close()


class Weights:
    """Made-up tensors of some megabytes, other ones for each version."""

    def __init__(self, version: int, megabytes: int = 4) -> None:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {
            f"layer.{index}.weight": torch.randn(512, 512, generator=generator) for index in range(megabytes)
        } | {
            "bias": torch.randn(7, generator=generator).to(torch.bfloat16),
            "scale": torch.tensor(float(version)),
        }

    @property
    def specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    @property
    def sums(self) -> dict[str, int]:
        return {name: fingerprint(tensor) for name, tensor in self.tensors.items()}


@pytest.fixture
def weights() -> type[Weights]:
    return Weights
