"""How ranks meet, who is kept out, and what ends a wait: its own deadline, whoever is missing."""

import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product

import pytest
import torch
from listening import ports_of

from sync.errors import TransferFailed
from sync.group import BroadcastGroup, Connecting, Meeting, Seat
from sync.stand_in import introduce

CPU = torch.device("cpu")
TIMEOUT_S = 1.0


def seat(rank, nonce="nonce", size=2, timeout_s=20.0, backend="gloo"):
    return Seat("127.0.0.1", 1, nonce, rank, size, backend, timeout_s)


def connecting(*seats):
    return [Connecting(own, CPU, lambda: None) for own in seats]


def groups(ranks):
    """The ranks' groups; in the place of one that has none, why."""
    found = []
    for rank in ranks:
        rank.thread.join(20)
        try:
            found.append(rank.result())
        except TransferFailed as failure:
            found.append(failure)
    return found


def together(members):
    """What each rank has after a broadcast of ones."""
    received = [torch.full((4,), float(rank == 0)) for rank in range(len(members))]
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda group, tensor: group.broadcast(tensor), members, received))
    return [tensor.tolist() for tensor in received]


def test_a_rank_that_never_comes_or_never_sends_is_waited_for_until_the_deadline():
    started = time.monotonic()
    alone = seat(1, timeout_s=TIMEOUT_S)
    with pytest.raises(TransferFailed, match="epoch 1: rank 1"):
        BroadcastGroup.connect(alone, CPU, Meeting(alone))
    assert time.monotonic() - started < 5 * TIMEOUT_S

    ranks = connecting(*(seat(rank, timeout_s=3 * TIMEOUT_S) for rank in (0, 1)))
    introduce(*ranks)
    members = groups(ranks)
    assert together(members) == [[1.0] * 4] * 2
    told: list[str] = []

    def wait_for_nobody():
        try:
            members[1].broadcast(torch.zeros(4))
        except TransferFailed as failure:
            told.append(str(failure))

    # In a thread: nothing else could end a call that has no deadline of its own.
    waiting = threading.Thread(target=wait_for_nobody, daemon=True)
    waiting.start()
    waiting.join(10 * TIMEOUT_S)
    assert len(told) == 1
    assert told[0].startswith("epoch 1: broadcast")


def test_connections_grow_with_the_ranks_and_not_with_their_square():
    size = 33
    before = len(os.listdir("/proc/self/fd"))
    ranks = connecting(*(seat(rank, size=size, timeout_s=60.0) for rank in range(size)))
    introduce(*ranks)
    assert together(groups(ranks)) == [[1.0] * 4] * size
    opened = len(os.listdir("/proc/self/fd")) - before
    assert opened < size * 20, f"{opened} files; every rank with every other would be {size * (size - 1)}"


def test_what_a_rank_looks_for_it_waits_for_until_the_deadline():
    """gloo brings a deadline of its own; nccl's group asks the store to wait as long as it likes."""
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        Meeting(seat(1, backend="nccl", timeout_s=TIMEOUT_S)).store.get("0")
    assert TIMEOUT_S <= time.monotonic() - started < 5 * TIMEOUT_S


def test_with_nccl_rank_0_alone_has_something_to_leave():
    first, second = (Meeting(seat(rank, backend="nccl")) for rank in (0, 1))
    assert (first.left(), second.left()) == (None, {})
    first.store.set("0", b"the communicator's id")  # as torch's group does
    assert first.left() == {"0": b"the communicator's id"}
    introduce(first, second)
    assert second.store.get("0") == b"the communicator's id"


def test_nobody_listens_but_gloo_and_that_to_nobody_once_all_are_in():
    before = ports_of(os.getpid())
    ranks = connecting(*(seat(rank, size=3) for rank in range(3)))
    introduce(*ranks)
    members = groups(ranks)
    opened = ports_of(os.getpid()) - before
    assert len(opened) == 3, "a device of each rank"
    for port in opened:
        with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", port), timeout=0.3):
            pass
    assert together(members) == [[1.0] * 4] * 3


@pytest.mark.parametrize("stranger", [0, 1])
def test_who_was_not_told_the_nonce_is_found_out(stranger):
    nonces = ["told", "told"]
    nonces[stranger] = "guessed"
    ranks = connecting(*(seat(rank, nonces[rank]) for rank in (0, 1)))
    introduce(*ranks)
    receiver = groups(ranks)[1]
    assert isinstance(receiver, TransferFailed)
    assert str(receiver) == "epoch 1: rank 1: somebody else is in the learner's place"


ZEROS = bytes(1000)
"""To gloo: here come bytes for a buffer that you do not have."""
HARMLESS = {
    "nothing": [b""],
    "too little": [b"GET"],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "noise": [bytes(reversed(range(256))) * 16],
    "a rank that there is not": [struct.pack("q", 7) + ZEROS],
}
IN_A_RANKS_NAME = {
    "silent": [struct.pack("q", 0), struct.pack("q", 1)],
    "loud": [struct.pack("q", 0) + ZEROS, struct.pack("q", 1) + ZEROS],
}


@contextmanager
def knocked_at(said, timeout_s):
    """Two ranks that have not met yet, and strangers that said each of these things at each one's port."""
    before = ports_of(os.getpid())
    ranks = connecting(seat(0, timeout_s=timeout_s), seat(1, timeout_s=timeout_s))
    for rank in ranks:
        rank.left()
    ports = ports_of(os.getpid()) - before
    assert len(ports) == 2
    with ExitStack() as strangers:
        for port, words in product(ports, said):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            stranger.sendall(words)
        time.sleep(0.1)  # gloo has read it
        yield ranks


@pytest.mark.parametrize("said", HARMLESS.values(), ids=HARMLESS)
def test_who_knocks_at_gloos_port_with_whatever_costs_nothing(said):
    with knocked_at(said, timeout_s=20.0) as ranks:
        introduce(*ranks)
        assert together(groups(ranks)) == [[1.0] * 4] * 2


@pytest.mark.parametrize("said", IN_A_RANKS_NAME.values(), ids=IN_A_RANKS_NAME)
def test_who_takes_a_ranks_place_before_it_comes_costs_one_group(said):
    """It fails at its deadline. No weights were sent yet, and the next one has other ports."""
    with knocked_at(said, TIMEOUT_S) as ranks:
        started = time.monotonic()
        introduce(*ranks)
        assert all(isinstance(group, TransferFailed) for group in groups(ranks))
        assert time.monotonic() - started < 5 * TIMEOUT_S
