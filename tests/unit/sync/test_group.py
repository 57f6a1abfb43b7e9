"""What ends a wait in the broadcast group: its own deadline, whoever is missing."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sync.errors import TransferFailed
from sync.group import BroadcastGroup, Seat, listen

CPU = torch.device("cpu")
TIMEOUT_S = 1.0


def seat(port, rank, nonce="nonce", size=2, timeout_s=TIMEOUT_S):
    return Seat("127.0.0.1", port, 1, nonce, rank, size, "gloo", timeout_s)


def test_a_rank_that_never_comes_or_never_sends_is_waited_for_until_the_deadline():
    store, port = listen("127.0.0.1", TIMEOUT_S)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="epoch 1: rank 1"):
        BroadcastGroup.connect(seat(port, 1), CPU)
    assert time.monotonic() - started < 5 * TIMEOUT_S
    del store

    store, port = listen("127.0.0.1", TIMEOUT_S)
    groups: dict[int, BroadcastGroup] = {}

    def connect(rank):
        groups[rank] = BroadcastGroup.connect(seat(port, rank), CPU)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    received = torch.zeros(4)
    sending = threading.Thread(target=groups[0].broadcast, args=(torch.ones(4),), daemon=True)
    sending.start()
    groups[1].broadcast(received)
    sending.join(10)
    assert received.tolist() == [1.0] * 4
    told: list[str] = []

    def wait_for_nobody():
        try:
            groups[1].broadcast(received)
        except TransferFailed as failure:
            told.append(str(failure))

    # In a thread: nothing else could end a call that has no deadline of its own.
    waiting = threading.Thread(target=wait_for_nobody, daemon=True)
    waiting.start()
    waiting.join(10 * TIMEOUT_S)
    assert len(told) == 1
    assert told[0].startswith("epoch 1: broadcast")
    del store


def test_connections_grow_with_the_ranks_and_not_with_their_square():
    size = 33
    store, port = listen("127.0.0.1", 30.0)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(size) as pool:
        seats = [seat(port, rank, size=size, timeout_s=30.0) for rank in range(size)]
        groups = list(pool.map(lambda own: BroadcastGroup.connect(own, CPU), seats))
        received = [torch.full((4,), float(rank == 0)) for rank in range(size)]
        list(pool.map(lambda group, tensor: group.broadcast(tensor), groups, received))
    assert all(tensor.tolist() == [1.0] * 4 for tensor in received)
    opened = len(os.listdir("/proc/self/fd")) - before
    assert opened < size * 20, f"{opened} files; every rank with every other would be {size * (size - 1)}"
    del store
