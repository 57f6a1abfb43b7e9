"""Servers as processes, publishers on free ports, and tiny models, for the sync tests."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sync.buckets import TensorSpec, spec_of
from sync.config import SyncConfig
from sync.publisher import Publisher

SERVER = Path(__file__).with_name("fake_server.py")


class Server:
    """A fake rollout server's process and what it said."""

    def __init__(self, address: str, name: str, *options: str) -> None:
        command = [sys.executable, str(SERVER), address, name, *options]
        self.name = name
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.events: list[dict] = []
        self._lines: queue.Queue[dict] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def expect(self, event: str, timeout_s: float = 30.0, **values: object) -> dict:
        """The next event of this kind with these values; whatever comes before is kept in `events`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                got = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name}: no {event} {values}; it said {self.events}") from None
            self.events.append(got)
            if got["event"] == event and values.items() <= got.items():
                return got

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def start_server(address: str) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(name: str, *options: str) -> Server:
        servers.append(Server(address, name, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def make_publisher(address: str) -> Iterator[Callable[..., Publisher]]:
    publishers: list[Publisher] = []

    def make(**config: float) -> Publisher:
        fields = {"bucket_mib": 1, "transfer_timeout_s": 8.0, "heartbeat_timeout_s": 5.0} | config
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
        return {
            name: zlib.crc32(t.contiguous().reshape(-1).view(torch.uint8).numpy())
            for name, t in self.tensors.items()
        }


@pytest.fixture
def weights() -> type[Weights]:
    return Weights
