"""Running services while thousands of messages of no sense come in: a good client notices nothing."""

import asyncio
import math
import random
import socket
import threading
import time
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from counting import COUNTS, SHARES, TOTAL
from seeds import ARRAYS, CONTROL_TREES, META, REQUESTS

from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.groups import encode_group
from buffer.prompts import PromptQueue
from buffer.records import Group, Lease, Trajectory
from buffer.server import BufferServer
from buffer.store import Sources, Store
from sync import wire as sync_wire
from sync.config import SyncConfig
from sync.control import Control
from sync.receiver import Receiver
from sync.stand_in import Behavior, StandInSink

SHARES |= {"live_buffer": 200, "live_control": 200}
MESSAGES = max(2000, TOTAL // 5)
COMPLETIONS = 3
EVAL_ROWS = 2
EVALUATED = [{"prompt": f"e{i}"} for i in range(EVAL_ROWS)]
DEADLINE_S = 60.0
"""Of each of the good client's calls, which raises past it."""


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def rubbish(rng: random.Random, good: list[dict], frames: list[bytes]) -> list[bytes]:
    """One multipart message: a header that is often near to a good one, and from none to five frames."""
    header = dict(rng.choice(good))
    for _ in range(rng.randrange(3)):
        key = rng.choice([*header, "odd"])
        values = [None, -1, 2**40, 1e308, float("nan"), "", "x" * 600, [], {}, [[[]]], b"\0", True]
        header[key] = rng.choice(values)
    raw = bytearray(msgpack.packb(header))
    for _ in range(rng.choice([0, 0, 1, 3])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    first = rng.choice(
        [bytes(raw)] * 6 + [b"", b"\x91" * 1015 + b"\xc0", rng.randbytes(50), bytes(raw[: len(raw) // 2])]
    )
    more = [bytes(rng.choice([*frames, b"", rng.randbytes(40)])) for _ in range(rng.choice([0, 0, 1, 2, 5]))]
    return [first, *more]


UNTAKEN = {
    "reward": [1e308, -1e200, 1e31, math.nan, math.inf, None, "1", True],
    "reward_parts": [{"a": 1e308}, {"a": -math.inf}, {"a\0": 1.0}, {b"a": 1.0}, [], {"a": {}}],
    "metadata": [{b"k": 1}, {"a": {b"k": 1}}, {"a": [[{"b": {b"\xff": 1}}]]}, {1: 1}, "text"],
}
"""Of a trajectory: none of these may get into a store, whose evaluations and priorities are made of them."""
DELIVER = msgpack.packb(next(header for header in REQUESTS if header["verb"] == "deliver"))


def bad_group(rng: random.Random, lease: Lease) -> list[bytes]:
    """A delivery for what is lent, in which all is good but for one thing or a few."""
    meta, arrays = encode_group(group_of(lease))
    fields = msgpack.unpackb(meta) | {"group_id": f"bad-{rng.random()}"}
    if rng.randrange(4) == 0:  # too much for a float when added up
        for trajectory in fields["trajectories"]:
            trajectory["reward"] = rng.choice([-1.7e308, 1.7e308])
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice([*UNTAKEN])
        rng.choice(fields["trajectories"])[key] = rng.choice(UNTAKEN[key])
    return [DELIVER, msgpack.packb(fields), bytes(arrays)]


def group_of(lease: Lease) -> Group:
    mask = np.array([0, 1, 1, 1], np.uint8)
    labels, logprobs = mask * np.int32(lease.version), mask * np.float32(-0.5)
    ids = np.arange(4, dtype=np.int32)
    made = [Trajectory(i, ids, mask, logprobs, labels, float(i), {}, "stop") for i in range(COMPLETIONS)]
    return Group(f"g-{lease.lease_id}", lease.lease_id, lease.prompt.prompt_id, lease.kind, tuple(made))


@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_the_buffer_serves_on(tmp_path, policy):
    address = free_address()
    # What the rubbish asks for now and then is granted: it may take leases, but no version nor the run's end.
    asked = [h for h in REQUESTS if h["verb"] not in ("finished", "published", "committed")]

    async def spoil(number: int) -> None:
        rng = random.Random(number)
        context = zmq.asyncio.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        for sent in range(MESSAGES // 8):
            group = bad_group(rng, rng.choice(lent)) if lent and rng.randrange(4) == 0 else None
            await raw.send_multipart(group or rubbish(rng, asked, [META, bytes(ARRAYS)]))
            COUNTS["live_buffer"] += 1
            if sent % 50 == 0:
                await asyncio.sleep(0.01)
                while await raw.poll(0):
                    await raw.recv_multipart()
        raw.close(linger=1000)
        context.term()

    async def work(client: BufferClient, learner: BufferClient) -> int:
        """Batches that were made of what the client delivered, each behind an evaluation."""
        index = 0
        while index < 2 or not all(task.done() for task in spoiling):
            lent[:] = await client.lease(2, 0.5)
            await asyncio.sleep(0.02)  # for the rubbish to come first
            for lease in lent:
                assert await client.deliver(group_of(lease))
            batch = await learner.batch(index, 0, 1, 0.5)
            if batch is not None:
                index += 1
                await learner.published(index)
        return index

    async def go():
        # The leases that rubbish is granted run out and come back to the good client.
        config = BufferConfig(
            address=address, groups_per_batch=2, lease_timeout_s=1.0, max_message_mib=1, policy=policy
        )
        prompts = PromptQueue([{"prompt": f"p{i}"} for i in range(64)], 0, None, False)
        store = Store(tmp_path, "run", config, Sources(prompts, EVALUATED, 1), time.monotonic)
        server = BufferServer(store, tmp_path / "buffer.sqlite", "run", config)
        running = asyncio.create_task(server.run())
        client = BufferClient(address, "rollout", "run", "good", DEADLINE_S)
        learner = BufferClient(address, "learner", "run", "rank-0", DEADLINE_S)
        async with client, learner:
            await learner.published(0)
            spoiling.extend(asyncio.create_task(spoil(n)) for n in range(4))
            working = asyncio.create_task(work(client, learner))
            await asyncio.wait([working, running], return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running.exception()
            batches = working.result()
            status = await learner.status()
        assert not running.done()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        server.close()
        store.close()
        return batches, status

    spoiling: list[asyncio.Task] = []
    lent: list[Lease] = []
    """To the good client."""
    batches, status = asyncio.run(asyncio.wait_for(go(), 250))
    assert batches >= 2, "served on, to the end"
    assert status["bad_messages"] > MESSAGES / 8, "the rubbish came as far as the reader"
    scored = status["evaluations"]
    assert len(scored) >= 2
    assert all(score["completions"] == COMPLETIONS * EVAL_ROWS for score in scored.values()), (
        "made of the good groups"
    )


def test_the_publisher_keeps_its_members():
    address = free_address()
    # Good and bad share this process and its lock: how long the good one may be silent is tried elsewhere.
    control = Control(address, "run", DEADLINE_S)
    control.start()
    evicted: list[str] = []

    def spoil(number: int) -> None:
        rng = random.Random(number)
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        # As it may well do on loopback: leave and join under names of its own, but for the good one's.
        good = CONTROL_TREES
        for sent in range(MESSAGES // 4):
            raw.send_multipart(rubbish(rng, good, [sync_wire.encode(sync_wire.Beat())]))
            COUNTS["live_control"] += 1
            if sent % 50 == 0:
                time.sleep(0.01)
                while raw.poll(0):
                    raw.recv_multipart()
        raw.close(linger=1000)
        context.term()

    async def go():
        sink = StandInSink(Behavior(), print)
        member = asyncio.create_task(Receiver(SyncConfig(address=address), "run", "good", sink).run())
        while "good" not in control.members.names():  # noqa: ASYNC110 - the publisher's thread has no event
            await asyncio.sleep(0.02)
        threads = [threading.Thread(target=spoil, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with control.changed:
                evicted.extend(name for name, _ in control.members.take_lost())
            assert not member.done()
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # a beat
        assert control._thread.is_alive()
        with control.changed:
            names, sums = control.members.names(), control.tally.sums()
        member.cancel()
        await asyncio.wait([member])
        assert set(sums) == set(sync_wire.COUNTED)
        assert all(0 <= total < math.inf for total in sums.values())
        return names

    try:
        assert "good" in asyncio.run(asyncio.wait_for(go(), 250))
    finally:
        control.close()
    assert "good" not in evicted
