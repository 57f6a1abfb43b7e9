"""How the ranks of a new group find each other, over the control channel, and what disturbs that costs."""

import asyncio
import os
import socket
import struct
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import zmq
import zmq.asyncio
from listening import ports_of

from sync import wire
from sync.buckets import checksum
from sync.config import SyncConfig
from sync.group import Connecting, Seat
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec
from sync.receiver import Receiver
from sync.stager import make_seal
from sync.stand_in import Behavior, StandInSink

CPU = torch.device("cpu")


def refuses(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.3):
        return False
    return True


def test_a_stranger_on_the_host_finds_no_store_and_no_way_into_the_group(
    start_server, make_publisher, weights, address
):
    ours = os.getpid()
    before = ports_of(ours)
    publisher = make_publisher()
    servers = [start_server("a"), start_server("b")]
    assert publisher.wait_for_members(2, 30)
    assert ports_of(ours) - before == {int(address.rpartition(":")[2])}, "the control channel's alone"
    publisher.publish(0, weights(0).specs, weights(0).stream())
    publisher.wait_loaded()
    (of_gloo,) = ports_of(ours) - before - {int(address.rpartition(":")[2])}
    of_servers = [ports_of(server.process.pid) for server in servers]
    assert [len(ports) for ports in of_servers] == [1, 1], "gloo's"
    assert all(refuses(port) for port in {of_gloo}.union(*of_servers))
    publisher.publish(1, weights(1).specs, weights(1).stream())
    assert publisher.wait_loaded().members == ["a", "b"]
    for server in servers:
        assert server.expect("loaded", version=1)["sums"] == weights(1).sums
    assert {of_gloo} == ports_of(ours) - before - {int(address.rpartition(":")[2])}, "the same group"


@contextmanager
def raw_member(address: str, name: str):
    """A member of the run that says what the test has it say."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.setsockopt(zmq.LINGER, 500)
        member.connect(address)
        member.send(wire.encode(wire.Join(wire.SCHEMA, "test", name, 1, "")))
        yield member


def heard(member: zmq.Socket, kind: type) -> wire.Message:
    """The next message of a kind."""
    deadline = time.monotonic() + 20
    while member.poll(int(1000 * max(0.0, deadline - time.monotonic()))):
        message = wire.decode(member.recv())
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__}")


async def publish_beside(publisher, version, weights, answers):
    """The report of a publish, and its seconds, while `answers` runs beside it."""

    def publish():
        started = time.monotonic()
        publisher.publish(version, weights.specs, weights.stream())
        held = time.monotonic() - started
        return publisher.wait_loaded(), held

    publishing = asyncio.create_task(asyncio.to_thread(publish))
    await asyncio.to_thread(answers)
    return await publishing


@pytest.mark.slow
@pytest.mark.parametrize("last_word", ["JOIN", "READY"])
def test_a_member_that_dies_before_the_ranks_have_met_costs_only_itself(
    last_word, start_server, make_publisher, weights, address
):
    timeout_s = 3.0
    survivor = start_server("a")
    publisher = make_publisher(transfer_timeout_s=timeout_s, heartbeat_timeout_s=60.0)
    with raw_member(address, "b") as member:
        heard(member, wire.Welcome)
        assert publisher.wait_for_members(2, 30)

        def answers():
            order = heard(member, wire.Prepare)
            if last_word == "READY":
                gone = Connecting(seat_of(order), CPU, lambda: None)
                member.send(wire.encode(wire.Ready(order.attempt, gone.left())))
            member.close()

        report, held = asyncio.run(publish_beside(publisher, 0, weights(0), answers))
    assert report.members == ["a"]
    assert [name for name, _ in report.lost] == ["b"]
    assert survivor.expect("loaded", version=0)["sums"] == weights(0).sums
    assert held < 2 * timeout_s + 4, "the deadline of one phase, that of an answer to ABORT, and the rest"


def seat_of(order: wire.Prepare) -> Seat:
    return Seat(
        "127.0.0.1", order.epoch, order.nonce, order.first_rank, order.group_size, order.backend,
        order.timeout_s,
    )  # fmt: skip


ENTRY = struct.pack("=Q2sQ136x", 2, b"vm", 136)
"""As gloo makes them."""


@pytest.mark.parametrize(
    "left", [{"0/0": ENTRY}, {"0/2": ENTRY, "0/3": ENTRY}, {"0/2": b"here"}, {"0/2": b"\xff" * 154}]
)
def test_a_member_that_says_of_its_ranks_what_cannot_be_costs_only_itself(
    left, start_server, make_publisher, weights, address
):
    good = start_server("a")
    publisher = make_publisher()
    assert publisher.wait_for_members(1, 30)
    with raw_member(address, "b") as member:
        heard(member, wire.Welcome)

        def answers():
            member.send(wire.encode(wire.Ready(heard(member, wire.Prepare).attempt, left)))
            assert "said of its ranks" in heard(member, wire.Evict).reason

        report, _ = asyncio.run(publish_beside(publisher, 0, weights(0), answers))
    assert (report.members, report.lost) == (
        ["a"],
        [("b", "what it said of its ranks was not as it should be")],
    )
    assert good.expect("loaded", version=0)["sums"] == weights(0).sums


def test_what_is_said_of_another_attempt_or_by_no_member_changes_nothing(
    start_server, make_publisher, weights, address, caplog
):
    good = start_server("a")
    publisher = make_publisher()
    assert publisher.wait_for_members(1, 30)
    bad = {"0/1": b"a stranger's"}
    with raw_member(address, "b") as member, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        heard(member, wire.Welcome)
        stranger.connect(address)
        for attempt in (1, 2):
            stranger.send(wire.encode(wire.Ready(attempt, bad)))
            assert "not a member" in heard(stranger, wire.Evict).reason
        member.send(wire.encode(wire.Ready(1, bad)))  # before it was asked
        member.send(wire.encode(wire.Meet(1, bad)))
        assert heard(member, wire.Refuse).reason == "Meet is not for the publisher"

        def answers():
            attempt = heard(member, wire.Prepare).attempt
            member.send(wire.encode(wire.Ready(attempt + 1, bad)))
            member.send(wire.encode(wire.Failed(attempt, "load", "enough")))
            member.send(wire.encode(wire.Ready(attempt, bad)))  # too late

        report, _ = asyncio.run(publish_beside(publisher, 0, weights(0), answers))
    assert (report.members, report.lost) == (["a"], [("b", "load: enough")])
    assert good.expect("loaded", version=0)["sums"] == weights(0).sums
    told = [r.getMessage() for r in caplog.records if "refused of b" in r.getMessage()]
    assert told == [
        "sync: refused of b: READY of attempt 1: it is idle in attempt 0",
        "sync: refused of b: READY of attempt 3: it is asked in attempt 2",
    ]


MANIFEST = Manifest.layout([TensorSpec("weight", "float32", (4,))], BLOCK_BYTES)


def test_a_server_meets_whom_the_learner_names_for_its_attempt_and_nobody_else(address, caplog):
    async def scenario():
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as learner:
            learner.bind(address)
            loaded: list[dict] = []
            sink = StandInSink(Behavior(), loaded.append)
            serving = asyncio.create_task(Receiver(SyncConfig(address=address), "test", "a", sink).run())

            async def expect(kind):
                while True:
                    identity, raw = await learner.recv_multipart()
                    if isinstance(message := wire.decode(raw), kind):
                        return identity, message

            identity, _ = await expect(wire.Join)

            async def say(message):
                await learner.send_multipart([identity, wire.encode(message)])

            await say(wire.Welcome(wire.SCHEMA, 20.0))
            order = wire.Prepare(7, 0, 3, "nonce", True, 1, 2, "gloo", "", 20.0, MANIFEST)
            await say(wire.Meet(7, {"0/0": b"before it is asked"}))
            await say(order)
            _, ready = await expect(wire.Ready)
            assert (ready.attempt, list(ready.entries)) == (7, ["0/1"])
            connecting = Connecting(Seat("127.0.0.1", 3, "nonce", 0, 2, "gloo", 20.0), CPU, lambda: None)
            everybody = connecting.left() | ready.entries
            await say(wire.Meet(6, {"0/0": b"of another attempt"}))
            await say(wire.Meet(7, everybody))
            await say(wire.Meet(7, {"0/0": b"once more"}))
            connecting.bring(everybody)
            await asyncio.to_thread(connecting.thread.join)
            bucket = torch.arange(MANIFEST.stream_bytes, dtype=torch.uint8)
            await asyncio.to_thread(connecting.result().broadcast, bucket)
            await asyncio.to_thread(connecting.result().broadcast, make_seal(0, [checksum(bucket)], CPU))
            _, done = await expect(wire.Loaded)
            serving.cancel()
            await asyncio.wait([serving])
            return done

    done = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (done.attempt, done.version) == (7, 0)
    told = [r.getMessage() for r in caplog.records if "refused MEET" in r.getMessage()]
    assert told == [
        f"sync: refused MEET of attempt {attempt}: nobody here waits for it" for attempt in (7, 6, 7)
    ]
