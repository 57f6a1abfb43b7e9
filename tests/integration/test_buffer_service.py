"""The real service and the real client over ZeroMQ: what is refused, what is waited for, how it ends."""

import asyncio
import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from no_handles import none_left

from buffer import client as client_module
from buffer import requester, wire
from buffer.client import BufferClient, RunFinished
from buffer.database import PAGE_SIZE
from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.handles import LOOK_S
from buffer.records import Group, Lease, Trajectory
from buffer.service import REPORT_S


@pytest.fixture
def service(tmp_path):
    """Starts the buffer on a free port; returns its address, process and a starter of another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(20)))
    config = tmp_path / "run.yaml"
    buffer = {"address": address, "groups_per_batch": 2, "lease_timeout_s": 1.5, "max_message_mib": 1}
    data = {"train": {"kind": "jsonl", "path": str(rows)}, "shuffle": False}
    config.write_text(
        json.dumps({"name": "run", "run_dir": str(tmp_path / "run"), "data": data, "buffer": buffer})
    )
    started = []

    def start(*overrides: str, umask: int = -1):
        command = [sys.executable, "-m", "buffer", str(config), *overrides]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, umask=umask))
        return started[-1]

    yield address, start, tmp_path / "run"
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def made_group(lease: Lease, tokens: int = 8) -> Group:
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    trajectory = Trajectory(
        index=0,
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=-mask.astype(np.float32),
        versions=mask * np.int32(lease.version),
        reward=1.0,
        reward_parts={},
        finish_reason="stop",
    )
    return Group(f"g-{lease.lease_id}", lease.lease_id, lease.prompt.prompt_id, lease.kind, (trajectory,))


def both(address):
    return BufferClient(address, "rollout", "run", "server-0"), BufferClient(
        address, "learner", "run", "rank-0"
    )


def test_a_client_may_come_first_and_polls_wait_for_what_unblocks_them(service):
    address, start, _ = service

    async def run():
        rollout, learner = both(address)
        async with rollout, learner:
            waiting = asyncio.create_task(rollout.lease(2, 20.0))
            await asyncio.sleep(0.3)
            start()
            assert await learner.batch(0, 0, 1, 0.2) is None
            await learner.published(0)
            leases = await waiting
            assert len(leases) == 2
            batch = asyncio.create_task(learner.batch(0, 0, 1, 20.0))
            for lease in leases:
                assert await rollout.deliver(made_group(lease))
            began = time.monotonic()
            assert [g.lease_id for g in (await batch).groups] == [x.lease_id for x in leases]
            assert time.monotonic() - began < 10.0, "woken by the delivery, not by the end of its 20 s"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_server_that_is_started_again_waits_for_no_lease_of_its_former_life(service):
    address, start, _ = service

    async def run():
        process = start("buffer.lease_timeout_s=600")
        former, learner = both(address)
        async with former, learner:
            await learner.published(0)
            lost = await former.lease(20, 5.0)
        process.kill()
        start("buffer.lease_timeout_s=600")
        async with BufferClient(address, "rollout", "run", "server-0") as server:
            await server.status()  # it is up: the next answer is its own, not the end of a wait for it
            assert await server.lease(1, 0.5) == [], "they have all the room"
            waiting = asyncio.create_task(server.lease(20, 20.0))
            await asyncio.sleep(0.3)
            began = time.monotonic()
            await server.start()
            found = await waiting
            assert time.monotonic() - began < 10.0
            assert {x.prompt.prompt_id for x in found} == {x.prompt.prompt_id for x in lost}

    asyncio.run(asyncio.wait_for(run(), 60))


def test_that_it_was_started_counts_once_however_often_it_is_said(service):
    """A request over a bad wire may come twice, and what it says be no longer true."""
    address, start, _ = service

    async def run():
        start()
        server, learner = both(address)
        async with server, learner:
            await learner.published(0)
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(address)
            request = wire.encode_request(wire.Request("one", "rollout", "server-0", "run", "start", {}))

            async def say():
                await socket.send(request)
                return await socket.recv_multipart()

            await say()
            leases = await server.lease(2, 5.0)
            await say()
            assert await server.renew([x.lease_id for x in leases]) == set()
            context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_full_disk_ends_it_in_a_line_and_what_it_acknowledged_is_kept(service):
    """Full for it alone, by a limit of the size of its files."""
    address, start, run_dir = service
    process = start()
    acknowledged = []

    async def fill():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            leases = await rollout.lease(6, 20.0)
            room = 700_000 + max(file.stat().st_size for file in run_dir.glob("buffer.sqlite*"))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
            ended = asyncio.create_task(asyncio.to_thread(process.wait, 30))
            for lease in leases:
                delivering = asyncio.ensure_future(rollout.deliver(made_group(lease, tokens=20_000)))
                await asyncio.wait((delivering, ended), return_when=asyncio.FIRST_COMPLETED)
                if not delivering.done():
                    delivering.cancel()
                    return
                acknowledged.append(lease.prompt.prompt_id)

    asyncio.run(asyncio.wait_for(fill(), 60))
    _, told = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 0 < len(acknowledged) < 6
    (line,) = (line for line in told.splitlines() if "what was acknowledged is kept" in line)
    assert f"{run_dir}: disk I/O error" in line
    assert "Traceback" not in told
    start()

    async def stored():
        async with BufferClient(address, "observer", "run", "here") as observer:
            return (await observer.status())["stored"]

    # The one that was not acknowledged may have come to the disk all the same.
    assert asyncio.run(asyncio.wait_for(stored(), 60)) - len(acknowledged) in (0, 1)


def test_it_runs_on_uvloop(service):
    address, start, _ = service
    process = start()

    async def run():
        async with BufferClient(address, "observer", "run", "here") as observer:
            await observer.status()

    asyncio.run(asyncio.wait_for(run(), 60))
    process.send_signal(signal.SIGUSR2)  # the stacks of its threads; uvloop waits in C, asyncio in selectors
    process.terminate()
    _, told = process.communicate(timeout=20)
    assert "/uvloop/__init__.py" in told
    assert "/selectors.py" not in told


def test_a_silent_server_loses_its_leases_to_another(service):
    address, start, _ = service
    start("buffer.lease_timeout_s=4")

    async def run():
        rollout, learner = both(address)
        async with rollout, learner, BufferClient(address, "rollout", "run", "server-1") as other:
            await learner.published(0)
            lost = await rollout.lease(6, 5.0)
            assert await other.lease(6, 0.2) == []
            again = await other.lease(6, 10.0)
            assert {x.prompt.prompt_id for x in again} == {x.prompt.prompt_id for x in lost}
            ids = [x.lease_id for x in lost]
            assert await rollout.renew(ids) == set(ids)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_stopped_server_is_granted_too_late_is_its_to_hand_back(service):
    address, start, _ = service
    start("buffer.lease_timeout_s=60")

    async def run():
        rollout, learner = both(address)
        async with rollout, learner, BufferClient(address, "rollout", "run", "server-1") as other:
            await learner.published(0)
            held = await rollout.lease(6, 5.0)
            asking = asyncio.create_task(rollout.lease(6, 20.0))
            await asyncio.sleep(0.3)
            asking.cancel()
            await asyncio.wait([asking])
            for lease in held:
                await rollout.give_up(lease.lease_id, "server_stopped", requeue=True)
            for lease in await rollout.withdraw():
                await rollout.give_up(lease.lease_id, "server_stopped", requeue=True)
            assert await rollout.withdraw() == []
            again = await other.lease(6, 5.0)
            assert {x.prompt.prompt_id for x in again} == {x.prompt.prompt_id for x in held}, "all, at once"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_prompts_that_all_fail_end_the_service_with_one_line_and_a_restart_goes_on(service):
    """The data goes round for ever, and so would a reward function that always raises."""
    address, start, _ = service
    first = start()

    async def fail_all():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            while True:
                for lease in await rollout.lease(6, 5.0):
                    await rollout.give_up(lease.lease_id, "reward_raised", True)

    async def run():
        failing = asyncio.create_task(fail_all())
        try:
            assert await asyncio.to_thread(first.wait, 50) == 1
        finally:
            failing.cancel()
        last = first.communicate()[1].splitlines()[-1]
        assert re.match(
            r"the last \d+ prompts were all given up \(reward_raised \d+ in the whole run\)", last
        )
        start()
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            leases = await rollout.lease(2, 20.0)  # as many as the leases that the first life left open allow
            assert leases
            assert all([await rollout.deliver(made_group(lease)) for lease in leases])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_bad_messages_are_answered_counted_and_end_nothing(service):
    address, start, _ = service
    start()

    async def run():
        context = zmq.asyncio.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        rollout, learner = both(address)
        try:
            async with rollout, learner:
                await learner.published(0)
                (lease,) = await rollout.lease(1, 5.0)
                header = {"schema": wire.SCHEMA, "id": "x", "role": "rollout", "name": "n", "run_id": "run"}
                for frames, field in [
                    ([b"\xc1noise"], "header"),
                    ([b""], "header"),
                    (
                        [msgpack.packb({**header, "verb": "lease", "max_groups": -1, "wait_s": 0})],
                        "max_groups",
                    ),
                    ([msgpack.packb({**header, "verb": "published", "version": 9})], "verb"),
                    ([msgpack.packb({**header, "verb": "deliver"})], "frames"),
                    ([msgpack.packb({**header, "verb": "deliver"}), b"\x80", b""], "lengths"),
                ]:
                    await raw.send_multipart(frames)
                    (answer,) = await asyncio.wait_for(raw.recv_multipart(), 10)
                    _, reply = wire.ENVELOPE.open_reply(answer)
                    with pytest.raises(BadMessage, match=field):
                        wire.ENVELOPE.raise_if_refused(reply)
                assert (await rollout.status())["bad_messages"] == 6
                assert await rollout.deliver(made_group(lease))
        finally:
            raw.close(linger=0)
            context.term()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_group_that_the_model_cannot_take_is_refused(service, tmp_path):
    """Once it is in a batch it is in that batch for good, and would end every learner."""
    address, start, _ = service
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    start(f"model.path={tmp_path}", "model.max_length=9")

    async def run():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            (lease,) = await rollout.lease(1, 5.0)
            for tokens, told in ((9, "token_ids: expected 0 to 7"), (10, "model.max_length is 9")):
                with pytest.raises(BadMessage, match=told):
                    await rollout.deliver(made_group(lease, tokens))
            assert await rollout.deliver(made_group(lease))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_oversize_another_run_and_silence_are_told(service):
    address, start, _ = service
    start()

    async def run():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            (lease,) = await rollout.lease(1, 5.0)
            with pytest.raises(BadMessage, match="max_message_mib"):
                await rollout.deliver(made_group(lease, tokens=200_000))
            assert await rollout.deliver(made_group(lease))
        async with BufferClient(address, "rollout", "other", "server-0") as stranger:
            with pytest.raises(WrongRun, match="'other'"):
                await stranger.lease(1, 1.0)
        async with BufferClient("tcp://127.0.0.1:9", "learner", "run", "rank-0", deadline_s=0.5) as lonely:
            with pytest.raises(Unreachable, match="no answer to published"):
                await lonely.published(0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_whatever_the_umask_nobody_else_may_change_what_it_writes(service):
    address, start, run_dir = service
    process = start(umask=0)

    async def go():
        async with BufferClient(address, "learner", "run", "rank-0") as client:
            await client.published(0)

    asyncio.run(asyncio.wait_for(go(), 30))
    process.terminate()
    process.wait(10)
    made = {path: path.stat().st_mode & 0o777 for path in (run_dir, *run_dir.rglob("*"))}
    assert run_dir / "buffer.sqlite" in made
    assert {mode & 0o022 for mode in made.values()} == {0}, made


def test_a_store_that_is_damaged_while_it_is_used_is_one_clear_line(service):
    address, start, run_dir = service
    process = start()

    async def go():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            await rollout.lease(2, 5.0)
            process.terminate()
            process.wait(10)
            store = run_dir / "buffer.sqlite"
            with store.open("r+b") as file:
                for page in range(4, store.stat().st_size // PAGE_SIZE):
                    file.seek(page * PAGE_SIZE)
                    file.write(b"\xff" * 64)
            again = start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rollout.lease(2, 5.0), 5.0)
            return again

    process = asyncio.run(asyncio.wait_for(go(), 60))
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in told
    assert f"{run_dir / 'buffer.sqlite'}: database disk image is malformed: it is damaged" in told


def test_a_second_buffer_a_taken_port_and_a_wide_bind_are_one_clear_line(service, tmp_path):
    address, start, run_dir = service
    start()

    async def up():
        async with BufferClient(address, "observer", "run", "test") as client:
            await client.status()

    asyncio.run(asyncio.wait_for(up(), 30))
    for overrides, line in [
        ((), f"{run_dir}: in use by another buffer"),
        ((f"run_dir={tmp_path}/elsewhere",), f"buffer.address: {address} is taken"),
        (
            (f"run_dir={tmp_path}/wide", "buffer.address=tcp://0.0.0.0:5799"),
            "buffer.address: tcp://0.0.0.0:5799 reaches",
        ),
    ]:
        process = start(*overrides)
        _, told = process.communicate(timeout=30)
        assert process.returncode == 1
        assert line in told
        assert len([said for said in told.splitlines() if " INFO " not in said]) == 1


def test_without_file_handles_it_serves_who_is_there_says_so_once_and_takes_others_later(service):
    """From its first answer on: whatever it opens or imports later than that would end it here."""
    address, start, _ = service
    process = start("buffer.lease_timeout_s=60")

    async def run():
        rollout, learner = both(address)
        async with rollout, learner, AsyncExitStack() as stack:
            await learner.published(0)
            with none_left(process.pid):
                for _ in range(2):
                    (lease,) = await rollout.lease(1, 5.0)
                    assert await rollout.deliver(made_group(lease))
                assert await learner.batch(0, 0, 1, 5.0) is not None
                await learner.published(1)
                later = await stack.enter_async_context(BufferClient(address, "observer", "run", "later"))
                waiting = asyncio.create_task(later.status())
                await asyncio.sleep(REPORT_S + 1)
                assert not waiting.done()
            assert (await waiting)["frontier"] == 1
            await asyncio.sleep(2 * LOOK_S)

    asyncio.run(asyncio.wait_for(run(), 60))
    process.terminate()
    _, told = process.communicate(timeout=10)
    assert told.count("out of file handles: this process may have") == 1
    assert told.count("there are file handles again") == 1
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(service, number):
    address, start, run_dir = service
    process = start()

    async def run():
        async with BufferClient(address, "learner", "run", "rank-0") as client:
            await client.published(0)

    asyncio.run(asyncio.wait_for(run(), 30))
    process.send_signal(number)
    assert process.wait(10) == 0
    assert json.loads((run_dir / "metrics" / "buffer.jsonl").read_text().splitlines()[-1])["published"] == 0


def test_it_ends_by_itself_once_every_server_was_told(service):
    address, start, _ = service
    process = start()

    async def run():
        rollout, learner = both(address)
        async with rollout, learner:
            await learner.published(0)
            await rollout.lease(1, 5.0)
            await learner.finished(0)
            with pytest.raises(RunFinished):
                await rollout.lease(1, 5.0)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert process.wait(15) == 0


@contextlib.asynccontextmanager
async def slow_line(to, bytes_per_second):
    """A port before the address `to`, answers at so many bytes a second; and a list of how many came."""
    host, _, port = to.removeprefix("tcp://").rpartition(":")
    carried = []

    async def carry(reader, writer, slow):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(8192):
                if slow:
                    carried.append(len(data))
                    await asyncio.sleep(len(data) / bytes_per_second)
                writer.write(data)
                await writer.drain()
            writer.close()

    async def connect(reader, writer):
        back, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, there, False), carry(back, writer, True))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", carried
    finally:
        server.close()


def test_a_shard_on_a_slow_line_is_sent_once_however_often_it_is_waited_for(service, monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.2)
    monkeypatch.setattr(client_module, "GRACE_S", 0.2)
    monkeypatch.setattr(requester, "TELL_S", 0.2)
    address, start, _ = service
    start()

    async def go():
        async with AsyncExitStack() as opened:
            slow, carried = await opened.enter_async_context(slow_line(address, bytes_per_second=100_000))
            rollout, learner = [await opened.enter_async_context(client) for client in both(address)]
            distant = await opened.enter_async_context(BufferClient(slow, "learner", "run", "rank-1"))
            await learner.published(0)
            for lease in await rollout.lease(2, 10):
                assert await rollout.deliver(made_group(lease, tokens=10_000))
            waits = 1
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(TimeoutError):
                        batch = await asyncio.wait_for(distant.batch(0, 0, 1, 0.2), 0.4)
                        break
                    waits += 1
            return batch, waits, sum(carried), (await learner.status())["groups_out"]

    batch, waits, carried, sent = asyncio.run(go())
    assert len(batch.groups) == sent == 2
    assert waits > 3, "it took several times as long as one question for it"
    assert carried < 1.2 * 2 * 10_000 * 13, "13 bytes a token"
