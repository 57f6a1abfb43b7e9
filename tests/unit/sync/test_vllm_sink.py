"""How the sink drives an engine of several ranks, without an engine: in which order, and what stops it."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sync import receiver, vllm_sink
from sync.config import SyncConfig
from sync.control import Control
from sync.errors import LoadFailed, TransferFailed
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec
from sync.sink import StagePlan
from sync.vllm_sink import VllmSink
from sync.wire import Abort

MANIFEST = Manifest.layout([TensorSpec("a", "float32", (3,))], BLOCK_BYTES)


async def in_a_kept_group(left):
    return {}


def plan(accepted=in_a_kept_group):
    return StagePlan(7, 1, "nonce", True, "127.0.0.1", 1, 3, "gloo", "", 5.0, MANIFEST, accepted)


def rank(state, version=7, **more):
    return {"state": state, "version": version, "buckets": 0, "checksum": 9, "left": {}, **more}


class Engine:
    """Two ranks that say in turn what `told` holds, the last again and again; notes what it was asked."""

    errored = False
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1, world_size=2))

    def __init__(self, *told):
        self.told = list(told)
        self.asked: list[object] = []
        self.breaks = False
        self.lives = asyncio.Event()
        self.lives.set()

    async def shutdown_weight_transfer_engine(self):
        self.asked.append("drop")
        await self.lives.wait()

    async def collective_rpc(self, name, args=()):
        if name == "staging_bring":
            self.asked.append(("bring", *args))
            return [None, None]
        assert name == "staging_status"
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]

    async def init_weight_transfer_engine(self, request):
        self.asked.append("begin")

    async def pause_generation(self, mode, clear_cache):
        self.asked.append("pause" if mode == "keep" else mode)
        assert clear_cache == (mode == "abort"), "running requests go on with what they have computed"

    async def start_weight_update(self):
        self.asked.append("start")

    async def update_weights(self, request):
        self.asked.append(("load", request.update_info["version"]))
        if self.breaks:
            raise Exception("rank 1: out of memory")

    async def finish_weight_update(self, version=None):
        self.asked.append(("finish", version))

    async def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests
        self.asked.append("recompute")

    async def resume_generation(self):
        self.asked.append("resume")


def sink(engine, on_update="keep"):
    return VllmSink(cast(Any, engine), on_update)


def load(driven):
    engine: Any = driven._engine
    return asyncio.run(driven.load(7, lambda: engine.asked.append("requests name it")))


def test_a_version_is_staged_when_the_last_rank_has_it():
    engine = Engine(
        [rank("receiving"), rank("receiving")],
        [rank("staged"), rank("receiving")],
        [rank("receiving"), rank("staged")],
        [rank("staged"), rank("staged")],
    )
    accepted = []

    async def note(left):
        accepted.append((left, len(engine.told)))
        return {}

    assert asyncio.run(sink(engine).stage(plan(note))) == 9
    assert accepted == [({}, 3)], "the learner hears of it before the first bucket"
    assert len(engine.told) == 1
    assert engine.asked == ["begin"]


def test_the_ranks_are_told_of_the_others_once_all_of_them_have_said_how_they_are_reached():
    one, two = {"0/1": b"one"}, {"0/2": b"two"}
    engine = Engine(
        [rank("receiving", left=None), rank("receiving", left=None)],
        [rank("receiving", left=one), rank("receiving", left=None)],
        [rank("receiving", left=one), rank("receiving", left=two)],
        [rank("staged"), rank("staged")],
    )

    async def answer(left):
        engine.asked.append(left)
        return {"0/0": b"the learner", **left}

    assert asyncio.run(sink(engine).stage(plan(answer))) == 9
    everybody = {"0/0": b"the learner", **one, **two}
    assert engine.asked == ["begin", {**one, **two}, ("bring", everybody)]


def test_one_rank_that_fails_fails_the_stage():
    engine = Engine(
        [rank("receiving")] * 2, [rank("staged"), rank("failed", cause="transfer", reason="peer gone")]
    )
    with pytest.raises(TransferFailed, match="rank 1: peer gone"):
        asyncio.run(sink(engine).stage(plan()))


@pytest.mark.parametrize(
    ("on_update", "first", "then"),
    [("keep", "pause", []), ("recompute", "pause", ["recompute"]), ("abort", "abort", [])],
)
def test_weights_and_label_change_together_while_nothing_is_sampled(on_update, first, then):
    engine = Engine([rank("staged"), rank("staged")])
    assert load(sink(engine, on_update)) >= 0
    done = ["start", ("load", 7), ("finish", "7"), *then, "requests name it", "resume"]
    assert engine.asked == [first, *done]


@pytest.mark.parametrize("other", [rank("receiving"), rank("staged", version=6), {"state": "idle"}])
def test_a_version_that_one_rank_lacks_is_not_loaded_on_any(other):
    engine = Engine([rank("staged"), other])
    with pytest.raises(LoadFailed, match="rank 1: version 7 is not staged"):
        load(sink(engine))
    assert engine.asked == []


def test_an_engine_of_two_versions_stays_paused_until_a_load_succeeds():
    engine = Engine([rank("staged"), rank("staged")])
    driven = sink(engine)
    engine.breaks = True
    with pytest.raises(LoadFailed, match="out of memory"):
        load(driven)
    assert engine.asked == ["pause", "start", ("load", 7), ("finish", None)], "no label, and no resume"
    engine.breaks = False
    load(driven)
    assert engine.asked[-3:] == [("finish", "7"), "requests name it", "resume"]


def test_an_engine_of_several_replicas_is_refused():
    """A version comes to the ranks of one."""
    engine = Engine()
    engine.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2, world_size=2))
    with pytest.raises(ValueError, match="data_parallel_size is not 1"):
        sink(engine)


@pytest.fixture
def control():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    publisher = Control(address, "run", 5.0)
    publisher.start()
    yield address, publisher
    publisher.close()


@pytest.mark.parametrize("when", ["before it joins", "as a member"])
def test_a_server_whose_engine_hangs_joins_once_the_engine_goes_on(control, monkeypatch, caplog, when):
    monkeypatch.setattr(vllm_sink, "CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(receiver, "RETRY_S", 0.1)
    address, publisher = control
    engine = Engine()

    async def joined():
        while not publisher.members.names():
            assert not member.done(), member.exception()
            await asyncio.sleep(0.02)

    async def dropped(times):
        asked = len(engine.asked)
        while len(engine.asked) < asked + times:
            assert not member.done(), member.exception()
            await asyncio.sleep(0.02)

    async def go():
        if when == "before it joins":
            engine.lives.clear()
            await dropped(3)
            assert publisher.members.names() == []
        else:
            await joined()
            engine.lives.clear()
            with publisher.changed:
                members = publisher.members.all()
                publisher.send(members, Abort(1, "it was silent"))
            await dropped(3)
            with publisher.changed:
                publisher.evict(publisher.members.all(), "it was silent")
        engine.lives.set()
        await joined()

    async def run():
        nonlocal member
        config = SyncConfig(address=address)
        member = asyncio.create_task(receiver.Receiver(config, "run", "server-0", sink(engine)).run())
        try:
            await asyncio.wait_for(go(), 30)
        finally:
            member.cancel()
            await asyncio.wait([member])

    member: Any = None
    asyncio.run(run())
    assert "the engine did not answer within 0.2 s; joining again" in caplog.text
