"""Services behind keys, on real sockets: who is not admitted gets nothing, ends nothing, and is told."""

import asyncio
import logging
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress

import msgpack
import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from buffer import requester, wire
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.keys import ClientKeys, client_keys, make_keys, server_keys
from buffer.prompts import PromptQueue
from buffer.server import BufferServer
from buffer.store import Sources, Store
from learner.apart.client import ApartClient
from learner.apart.server import ApartServer
from learner.apart.wire import REFERENCE, VALUE, Served
from learner.apart.work import Limits
from rollout.scorer.client import ScorerClient
from rollout.scorer.server import ScorerServer
from rollout.scorer.wire import Ids, Welcome
from sync import receiver as receiving
from sync import wire as sync_wire
from sync.config import SyncConfig
from sync.control import Control
from sync.publisher import Publisher
from sync.receiver import Receiver
from sync.stand_in import Behavior, StandInSink

ROWS = [{"prompt": f"p{i}"} for i in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sets of keys: this run's, and somebody else's."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        make_keys(folder / name)
    return str(folder / "ours"), str(folder / "theirs")


@pytest.fixture(params=["unknown-client", "no-keys", "wrong-server", "other-role"])
def intruder(request, folders):
    """What somebody shows who is not to be admitted as a rollout server: by a server of each kind."""
    ours, theirs = folders

    def show(server: str) -> ClientKeys | None:
        good = client_keys(ours, "rollout", server)
        bad = client_keys(theirs, "rollout", server)
        return {
            "unknown-client": ClientKeys(bad.public, bad.secret, good.server),
            "no-keys": None,
            "wrong-server": ClientKeys(good.public, good.secret, bad.server),
            # The buffer itself: it calls nobody.
            "other-role": client_keys(ours, "buffer", server),
        }[request.param]

    return show


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


@asynccontextmanager
async def buffer_at(address, run_dir, keys):
    config = BufferConfig(address=address, groups_per_batch=2)
    sources = Sources(PromptQueue(ROWS, 0, None, False), [], None)
    run_dir.mkdir(exist_ok=True)
    store = Store(run_dir, "run", config, sources, time.monotonic)
    try:
        server = BufferServer(store, run_dir / "buffer.sqlite", "run", config, keys)
    except ValueError:
        store.close()
        raise
    running = asyncio.create_task(server.run())
    try:
        yield server
        assert not running.done(), "it must outlive whatever is sent to it"
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        server.close()
        store.close()


def dealer(context, address, keys):
    made = context.socket(zmq.DEALER)
    if keys is not None:
        keys.show(made)
    made.connect(address)
    return made


@asynccontextmanager
async def raw_dealer(address, keys):
    context = zmq.asyncio.Context()
    made = dealer(context, address, keys)
    try:
        yield made
    finally:
        made.close(linger=0)
        context.term()


def request(verb, run_id="run", **fields):
    header = {"schema": wire.SCHEMA, "id": "x", "role": "rollout", "name": "n", "run_id": run_id}
    return msgpack.packb(header | {"verb": verb} | fields)


def run(work, timeout_s=60):
    return asyncio.run(asyncio.wait_for(work, timeout_s))


def test_the_buffer_hears_nothing_of_who_is_not_admitted(folders, intruder, address, tmp_path, monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.5)
    ours, _ = folders

    async def go():
        keys = client_keys(ours, "learner", "buffer")
        async with (
            buffer_at(address, tmp_path, server_keys(ours, "buffer")) as server,
            BufferClient(address, "learner", "run", "rank-0", keys=keys) as good,
        ):
            await good.published(0)
            before = server.traffic.requests
            async with raw_dealer(address, intruder("buffer")) as raw:
                with suppress(zmq.Again):
                    await raw.send_multipart([request("status")], zmq.NOBLOCK)
                assert not await raw.poll(1000), "an answer"
            stranger = BufferClient(
                address, "rollout", "run", "server-0", deadline_s=1.0, keys=intruder("buffer")
            )
            async with stranger:
                started = time.monotonic()
                with pytest.raises(Unreachable, match=r"no answer to status .*keys\) may not match"):
                    await stranger.status()
                assert time.monotonic() - started < 5
            assert server.traffic.requests == before
            assert (await good.status())["published"] == 0
            assert server.traffic.requests == before + 1

    run(go())


def test_a_client_without_keys_at_a_server_with_none_is_not_suspected(address):
    async def go():
        async with BufferClient(address, "observer", "run", "o", deadline_s=0.5) as lonely:
            with pytest.raises(Unreachable) as told:
                await lonely.status()
            assert "keys" not in str(told.value)

    run(go())


def test_a_key_speaks_for_its_own_role_and_for_its_own_run(folders, address, tmp_path):
    ours, _ = folders

    async def go():
        async with buffer_at(address, tmp_path, server_keys(ours, "buffer")):
            keys = {
                role: client_keys(ours, role, "buffer")
                for role in ("learner", "rollout", "scorer", "reference", "value")
            }
            lies = (
                ("rollout", "learner"),
                ("scorer", "rollout"),
                ("scorer", "learner"),
                ("reference", "learner"),
                ("value", "learner"),
            )
            for role, claimed in lies:
                async with BufferClient(address, claimed, "run", "n", 5.0, keys[role]) as liar:
                    with pytest.raises(BadMessage, match=r"role: expected one of .*observer"):
                        await liar.status()
            for role in keys:
                async with BufferClient(address, "observer", "run", "n", 5.0, keys[role]) as observer:
                    assert (await observer.status())["bad_messages"] == len(lies)
            async with BufferClient(address, "learner", "other", "n", 5.0, keys["learner"]) as other:
                with pytest.raises(WrongRun, match="'other'"):
                    await other.published(7)
            async with BufferClient(address, "learner", "run", "n", 5.0, keys["learner"]) as learner:
                assert (await learner.status())["published"] is None
                await learner.published(0)

    run(go())


class Recorder:
    """A relay that keeps every byte which the client sent."""

    def __init__(self, port):
        self._target = port
        self.sent = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()
        self._pump(client, server, self.sent)

    @staticmethod
    def _pump(source, target, kept):
        with suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                target.sendall(data)
        for end in (source, target):
            end.close()

    def close(self):
        self._listener.close()


def test_a_recorded_stream_that_is_played_again_does_nothing(folders, address, tmp_path):
    ours, _ = folders

    async def go():
        keys = client_keys(ours, "learner", "buffer")
        port = int(address.rpartition(":")[2])
        async with buffer_at(address, tmp_path, server_keys(ours, "buffer")) as server:
            recorder = Recorder(port)
            through = f"tcp://127.0.0.1:{recorder.port}"
            async with BufferClient(through, "learner", "run", "rank-0", keys=keys) as client:
                await client.published(3)
            recorder.close()
            recorded = bytes(recorder.sent)
            assert len(recorded) > 400, "greeting, handshake and message"
            assert b"published" not in recorded, "in the clear"
            before = server.traffic.requests
            for pause_s in (0.0, 0.05):  # at once, and as slowly as the handshake went
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for start in range(0, len(recorded), 64):
                    writer.write(recorded[start : start + 64])
                    with suppress(ConnectionError):
                        await writer.drain()
                    await asyncio.sleep(pause_s)
                with suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 5)  # to the end: it hung up on us
                writer.close()
            assert server.traffic.requests == before
            async with BufferClient(address, "learner", "run", "rank-0", keys=keys) as client:
                assert (await client.status())["published"] == 3

    run(go())


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_behind_keys_any_address_may_be_bound_and_without_none(folders, host, tmp_path):
    ours, _ = folders
    port = free_port()

    async def go():
        with pytest.raises(ValueError, match=r"reaches beyond this machine.*`slipstream keys DIR`") as told:
            async with buffer_at(f"tcp://{host}:{port}", tmp_path / "none", None):
                pass
        assert len(str(told.value).splitlines()) == 1
        async with buffer_at(f"tcp://{host}:{port}", tmp_path / "keys", server_keys(ours, "buffer")):
            keys = client_keys(ours, "learner", "buffer")
            async with BufferClient(f"tcp://127.0.0.1:{port}", "learner", "run", "n", 10.0, keys) as client:
                await client.published(0)

    run(go())
    with pytest.raises(ValueError, match="`slipstream keys DIR`"):
        scorer_at(f"tcp://{host}:{port}", None)


def test_the_weights_need_keys_beyond_loopback_and_an_interface_of_their_own(folders, address):
    ours, _ = folders
    device = torch.device("cpu")
    with pytest.raises(ValueError, match=r"sync\.address: tcp://192\.0\.2\.1:1 .*`slipstream keys DIR`"):
        Publisher(SyncConfig(address="tcp://192.0.2.1:1"), "run", device)
    for wildcard in ("tcp://*:5702", "tcp://0.0.0.0:5702", "tcp://[::]:5702"):
        with pytest.raises(ValueError, match="a host that servers can reach"):
            Publisher(SyncConfig(address=wildcard), "run", device, server_keys(ours, "learner"))
    # Not refused for being wide, but because this machine does not have it.
    wide = Publisher(SyncConfig(address="tcp://192.0.2.1:1"), "run", device, server_keys(ours, "learner"))
    with pytest.raises(ValueError, match="cannot listen there"):
        wide.start()


def test_a_host_by_its_name_may_be_bound(folders, tmp_path):
    ours, _ = folders
    port = free_port()

    async def go():
        keys = client_keys(ours, "learner", "buffer")
        async with (
            buffer_at(f"tcp://localhost:{port}", tmp_path, server_keys(ours, "buffer")),
            BufferClient(f"tcp://localhost:{port}", "learner", "run", "n", 10.0, keys) as client,
        ):
            await client.published(0)

    run(go())


class Sum:
    async def score(self, token_ids):
        return float(token_ids.sum())


def scorer_at(address, keys):
    return ScorerServer(Sum(), None, Welcome("/models/sum", "ours", 8), "run", "helpful", address, keys)


def test_a_scorer_scores_for_nobody_who_is_not_admitted(folders, intruder, address, monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.5)
    ours, _ = folders
    work = Ids("ours", np.array([1, 2], np.int32))

    async def go():
        server = scorer_at(address, server_keys(ours, "scorer"))
        running = asyncio.create_task(server.run())
        async with ScorerClient("helpful", address, "run", "a", 1.0, intruder("scorer")) as stranger:
            with pytest.raises(Unreachable, match=r"scorer helpful .*security\.keys\) may not match"):
                await stranger.score(work)
        assert server.metrics()["requests"] == 0
        keys = client_keys(ours, "rollout", "scorer")
        async with ScorerClient("helpful", address, "run", "b", 10.0, keys) as good:
            assert await good.score(work) == 3.0
        running.cancel()
        await asyncio.wait([running])
        server.close()

    run(go())


@pytest.mark.parametrize(("role", "kind"), [("reference", REFERENCE), ("value", VALUE)])
def test_a_job_computes_for_nobody_but_the_learner(role, kind, folders, intruder, address, monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.5)
    ours, _ = folders
    served = Served(kind, "run", "weights", Limits(8, 8))

    async def go():
        server = ApartServer(served, "its.address", address, server_keys(ours, role))
        running = asyncio.create_task(server.run())
        for keys in (intruder(role), client_keys(ours, "rollout", role)):
            async with ApartClient(kind, address, "run", "weights", "a", 1.0, keys) as stranger:
                with pytest.raises(Unreachable, match=rf"{kind.name} at .*security\.keys\) may not match"):
                    await stranger.hello()
        assert server.metrics()["requests"] == 0
        keys = client_keys(ours, "learner", role)
        async with ApartClient(kind, address, "run", "weights", "b", 10.0, keys) as good:
            await good.hello()
        running.cancel()
        await asyncio.wait([running])
        server.close()

    run(go())
    for host in ("192.0.2.1", "0.0.0.0", "*"):
        with pytest.raises(ValueError, match=r"its\.address: .* needs keys"):
            ApartServer(served, "its.address", f"tcp://{host}:5704", None)


def test_the_publisher_takes_no_member_who_is_not_admitted(folders, intruder, address, monkeypatch, caplog):
    monkeypatch.setattr(receiving, "PATIENCE_S", 0.5)
    caplog.set_level(logging.INFO)
    ours, _ = folders
    control = Control(address, "run", 5.0, server_keys(ours, "learner"))
    control.start()

    async def go():
        config, sink = SyncConfig(address=address), StandInSink(Behavior(), print)
        good = Receiver(config, "run", "good", sink, client_keys(ours, "rollout", "learner"))
        bad = Receiver(config, "run", "bad", sink, intruder("learner"))
        running = [asyncio.create_task(one.run()) for one in (good, bad)]
        async with raw_dealer(address, intruder("learner")) as raw:
            with suppress(zmq.Again):
                join = sync_wire.Join(sync_wire.SCHEMA, "run", "raw", 1, "")
                await raw.send(sync_wire.encode(join), zmq.NOBLOCK)
            assert not await raw.poll(2000), "an answer"
        names = control.members.names()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        return names

    try:
        assert run(go()) == ["good"]
    finally:
        control.close()
    told = [r.getMessage() for r in caplog.records if r.name == "sync.receiver"]
    assert any("the keys of the two sides (security.keys) may not match" in text for text in told)
    assert not any("bad joined" in r.getMessage() for r in caplog.records)


def test_a_member_of_another_run_is_refused_behind_keys_too(folders, address):
    ours, _ = folders
    control = Control(address, "run", 5.0, server_keys(ours, "learner"))
    control.start()

    async def go():
        sink, keys = StandInSink(Behavior(), print), client_keys(ours, "rollout", "learner")
        with pytest.raises(receiving.JoinRefused, match="run_id: 'other'"):
            await Receiver(SyncConfig(address=address), "other", "a", sink, keys).run()
        assert control.members.names() == []

    try:
        run(go())
    finally:
        control.close()


def test_no_thread_and_no_socket_stays_behind(folders, address, tmp_path):
    ours, _ = folders
    before = threading.active_count()

    async def go():
        async with buffer_at(address, tmp_path, server_keys(ours, "buffer")):
            keys = client_keys(ours, "learner", "buffer")
            async with BufferClient(address, "learner", "run", "n", 10.0, keys) as client:
                await client.published(0)

    run(go())
    assert threading.active_count() == before
