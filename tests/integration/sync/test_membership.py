"""Publishing to real processes over real gloo and ZeroMQ while they join, die, stall and come back."""

import asyncio
import json
import multiprocessing
import signal
import time

import pytest
import torch
from no_handles import none_left, publish_without_handles

from sync.config import SyncConfig
from sync.errors import LoadFailed, PublishInterrupted
from sync.group import Connecting
from sync.membership import MAX_FAILED_TRANSFERS
from sync.publisher import Publisher
from sync.receiver import Receiver
from sync.sink import StagePlan
from sync.stand_in import Behavior, StandInSink

both_ways = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "sent"])


def publish(publisher, version, weights):
    """As the learner does: again until it went through. Returns (report, the number of interruptions)."""
    interruptions = 0
    while True:
        try:
            publisher.publish(version, weights.specs, weights.stream())
            return publisher.wait_loaded(), interruptions
        except PublishInterrupted:
            interruptions += 1
            assert interruptions < 5


@both_ways
def test_versions_reach_every_server_in_one_kept_group(start_server, make_publisher, weights, shared_memory):
    servers = [start_server("a"), start_server("b")]
    publisher = make_publisher()
    assert publisher.wait_for_members(2, 30)
    assert publisher.wants_publish()
    for version in (0, 1, 2):
        new = weights(version)
        report, _ = publish(publisher, version, new)
        assert report.members == ["a", "b"]
        assert report.lost == []
        assert report.size_bytes >= sum(t.numel() * t.element_size() for t in new.tensors.values())
        for server in servers:
            assert server.expect("staging", version=version, shared=shared_memory)["fresh"] is (version == 0)
            assert server.expect("loaded")["sums"] == new.sums
        assert not publisher.wants_publish()


def test_nobody_there_is_no_error_and_the_iterator_is_run_through(make_publisher, weights):
    publisher = make_publisher()
    new = weights(0)
    seen = []
    report = publisher.publish(0, new.specs, (seen.append(name) or (name, t) for name, t in new.stream()))
    assert report.size_bytes == 0
    assert report.members == []
    assert seen == list(new.tensors)  # other ranks of the learner ran through theirs


@both_ways
def test_late_joiner_gets_the_current_version_and_nobody_else_does(start_server, make_publisher, weights):
    first = start_server("first")
    publisher = make_publisher()
    assert publisher.wait_for_members(1, 30)
    new = weights(3)
    publish(publisher, 3, new)
    first.expect("loaded", version=3)
    late = start_server("late")
    assert publisher.wait_for_members(2, 30)
    assert publisher.wants_publish()
    report, _ = publish(publisher, 3, new)
    assert report.members == ["first", "late"]
    assert late.expect("loaded", version=3)["sums"] == new.sums
    report, _ = publish(publisher, 4, weights(4))
    assert first.expect("loaded")["version"] == 4  # version 3 was not sent to it twice
    assert report.members == ["first", "late"]


@both_ways
@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_server_lost_mid_transfer_costs_only_itself(blow, start_server, make_publisher, weights):
    survivors = [start_server("a", bucket_seconds=0.1), start_server("c", bucket_seconds=0.1)]
    victim = start_server("b", bucket_seconds=0.1)
    publisher = make_publisher()
    assert publisher.wait_for_members(3, 30)
    new = weights(1, megabytes=24)

    def stream():
        for index, pair in enumerate(new.stream()):
            if index == 6:
                victim.expect("first_bucket")
                victim.signal(blow)
            yield pair

    started = time.monotonic()
    with pytest.raises(PublishInterrupted) as interrupted:
        publisher.publish(1, new.specs, stream())
    assert [name for name, _ in interrupted.value.lost] == ["b"]
    report, again = publish(publisher, 1, new)
    assert time.monotonic() - started < 2 * 8.0 + 5.0  # a bucket's deadline, an answer's, and the rest
    assert again == 0
    assert report.members == ["a", "c"]
    for server in survivors:
        assert server.expect("loaded", version=1)["sums"] == new.sums
    # The lost one comes back: a new process, or the same one when it wakes up.
    if blow is signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        back = victim
    else:
        back = start_server("b")
    assert publisher.wait_for_members(3, 30)
    report, _ = publish(publisher, 1, new)
    assert "b" in report.members
    assert back.expect("loaded", version=1)["sums"] == new.sums


@pytest.mark.slow
def test_silent_server_is_evicted_between_publishes(start_server, make_publisher, weights):
    start_server("a")
    sleeper = start_server("b")
    publisher = make_publisher(heartbeat_timeout_s=2.0)
    assert publisher.wait_for_members(2, 30)
    publish(publisher, 0, weights(0))
    sleeper.signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while publisher.members() != ["a"] and time.monotonic() < deadline:
        time.sleep(0.1)
    report, interruptions = publish(publisher, 1, weights(1))
    assert (report.members, interruptions) == (["a"], 0)
    assert [name for name, _ in report.lost] == ["b"]
    sleeper.signal(signal.SIGCONT)
    sleeper.expect("loaded", version=0)
    assert publisher.wait_for_members(2, 15)
    publish(publisher, 1, weights(1))
    sleeper.expect("loaded", version=1)


def test_server_of_another_model_costs_only_itself(start_server, make_publisher, weights):
    good, other = start_server("good"), start_server("other", refuse="bias")
    publisher = make_publisher()
    assert publisher.wait_for_members(2, 30)
    new = weights(0)
    report, _ = publish(publisher, 0, new)
    assert report.members == ["good"]
    assert good.expect("loaded")["sums"] == new.sums
    lost = dict(report.lost)
    assert "bias: not in this server's model" in lost["other"]
    assert not [event for event in other.said if event["event"] == "loaded"]


def test_server_of_another_run_is_turned_away(start_server, make_publisher):
    publisher = make_publisher()
    stranger = start_server("stranger", run_id="another")
    refusal = stranger.expect("refused")
    assert "run_id: 'another': this learner runs 'test'" in refusal["reason"]
    assert publisher.members() == []
    stranger.process.join(10)
    assert stranger.process.exitcode == 0


@both_ways
def test_learner_restart_brings_its_servers_back(start_server, make_publisher, weights):
    server = start_server("a")
    publisher = make_publisher(heartbeat_timeout_s=2.0)
    assert publisher.wait_for_members(1, 30)
    publish(publisher, 5, weights(5))
    publisher.close()
    publisher = make_publisher(heartbeat_timeout_s=2.0)
    assert publisher.wait_for_members(1, 30)
    assert publisher.wants_publish()
    report, _ = publish(publisher, 4, weights(4))
    assert report.members == ["a"]
    assert server.expect("loaded", version=4)["sums"] == weights(4).sums


@both_ways
def test_second_publish_waits_for_the_load_of_the_first(start_server, make_publisher, weights):
    server = start_server("a", load_seconds=1.0)
    publisher = make_publisher()
    assert publisher.wait_for_members(1, 30)
    publisher.publish(0, weights(0).specs, weights(0).stream())
    assert not publisher.wants_publish()  # it is on its way
    publisher.publish(1, weights(1).specs, weights(1).stream())
    report = publisher.wait_loaded()
    assert report.pause_seconds == 1.0
    assert 1.0 <= report.arrival_seconds < 20, "what staging takes behind the last bucket comes to the load"
    server.expect("loaded", version=1)
    order = [(e["event"], e["version"]) for e in server.said if e["event"] in ("staging", "loaded")]
    assert order == [("staging", 0), ("loaded", 0), ("staging", 1), ("loaded", 1)]


@pytest.mark.slow
def test_a_live_server_whose_load_outlasts_the_deadline_costs_only_itself(
    start_server, make_publisher, weights
):
    deadline_s, load_s = 4.0, 20.0
    quick, slow = start_server("quick"), start_server("slow", load_seconds=load_s)
    publisher = make_publisher(transfer_timeout_s=deadline_s)
    assert publisher.wait_for_members(2, 30)
    new = weights(0)
    publisher.publish(0, new.specs, new.stream())
    sent = time.monotonic()
    report = publisher.wait_loaded()
    assert deadline_s <= time.monotonic() - sent < deadline_s + 4
    assert report.members == ["quick"]
    assert report.lost == [("slow", "version 0 not loaded within 4 s")]
    assert quick.expect("loaded", version=0)["sums"] == new.sums
    # It was alive all the time: when it is done it comes back by itself.
    slow.expect("loaded", timeout_s=load_s + 10, version=0)
    assert publisher.wait_for_members(2, 15)


class NeverConnects(StandInSink):
    """Takes the manifest, answers everything, and comes to no group."""

    async def stage(self, plan: StagePlan) -> int:
        await plan.accepted({})
        return await asyncio.get_running_loop().create_future()


class PatientGroups(Publisher):
    """Its groups have a later deadline of their own, as those of nccl have."""

    def _connect(self, size: int) -> Connecting:
        shorter, self._timeout_s = self._timeout_s, 20.0
        try:
            return super()._connect(size)
        finally:
            self._timeout_s = shorter


@pytest.mark.slow
def test_a_group_that_is_not_connected_in_time_is_given_up(address, weights):
    """By the publisher's own deadline. The group's own is in tests/unit/sync/test_group.py."""
    config = SyncConfig(
        address=address, bucket_mib=1, transfer_timeout_s=2.0, heartbeat_timeout_s=5.0, shared_memory=False
    )
    publisher = PatientGroups(config, "test", torch.device("cpu"))
    publisher.start()
    receiver = Receiver(config, "test", "absent", NeverConnects(Behavior(), lambda event: None))

    async def scenario():
        serving = asyncio.create_task(receiver.run())
        assert await asyncio.to_thread(publisher.wait_for_members, 1, 30)
        started, new = time.monotonic(), weights(0)
        report = await asyncio.to_thread(publisher.publish, 0, new.specs, new.stream())
        seconds = time.monotonic() - started
        serving.cancel()
        await asyncio.wait([serving])
        return report, seconds

    try:
        report, seconds = asyncio.run(scenario())
    finally:
        publisher.close()
        for thread in publisher._threads:  # of the groups, which nobody comes to
            thread.join(25)
    assert (report.members, report.size_bytes) == ([], 0)
    assert report.lost == [("absent", "transfers to it keep failing (timed out)")]
    deadlines_s = MAX_FAILED_TRANSFERS * config.transfer_timeout_s
    assert deadlines_s <= seconds < deadlines_s + 6


def test_a_version_counts_once_it_is_loaded_and_not_when_its_load_failed(make_publisher, address, weights):
    """What the receiver says is what requests and tokens are labelled with."""
    publisher = make_publisher()
    before = []

    class Sink(StandInSink):
        async def load(self, version: int, loaded) -> float:
            before.append((version, receiver.version))
            if version == 1:
                raise LoadFailed("out of memory")
            return await super().load(version, loaded)

    receiver = Receiver(SyncConfig(address=address), "test", "a", Sink(Behavior(), lambda event: None))

    async def scenario():
        running = asyncio.create_task(receiver.run())
        after = []
        for version in range(3):
            assert await asyncio.to_thread(publisher.wait_for_members, 1, 30)
            report, _ = await asyncio.to_thread(publish, publisher, version, weights(version))
            after.append((report.members, receiver.version))
        running.cancel()
        await asyncio.wait([running])
        return after

    assert asyncio.run(scenario()) == [(["a"], 0), ([], 0), (["a"], 2)]
    assert before == [(0, None), (1, 0), (2, 0)]


def test_what_servers_count_is_summed_whoever_comes_goes_or_starts_again(make_publisher, address):
    publisher = make_publisher(heartbeat_timeout_s=2.0)

    async def wasted(tokens: int) -> None:
        async with asyncio.timeout(10):
            while publisher.counted()["wasted_tokens"] != tokens:  # noqa: ASYNC110 - its thread has no event
                await asyncio.sleep(0.05)

    async def scenario():
        counts = {name: {"wasted_tokens": 100, "waiting_s/leases": 8.0} for name in "ab"}

        def serve(name: str) -> "asyncio.Task[None]":
            sink = StandInSink(Behavior(), lambda event: None)
            config = SyncConfig(address=address)
            receiver = Receiver(config, "test", name, sink, counted=lambda: dict(counts[name]))
            return asyncio.create_task(receiver.run())

        async def gone(server: "asyncio.Task[None]") -> None:
            server.cancel()
            await asyncio.wait([server])

        one, other = serve("a"), serve("b")
        assert await asyncio.to_thread(publisher.wait_for_members, 2, 30)
        await asyncio.sleep(0.2)  # their first words
        assert set(publisher.counted().values()) == {0}, "of before the learner came"
        counts["a"]["wasted_tokens"] += 5
        counts["b"]["wasted_tokens"] += 7
        await wasted(12)
        counts["a"]["wasted_tokens"] += 1
        await gone(one)
        await wasted(13)  # its last word
        counts["a"] = {"wasted_tokens": 0, "waiting_s/leases": 0.0}  # another process
        one = serve("a")
        assert await asyncio.to_thread(publisher.wait_for_members, 2, 30)
        await asyncio.sleep(0.2)
        counts["a"]["wasted_tokens"] += 20
        counts["a"]["waiting_s/leases"] += 1.5
        await wasted(33)
        assert publisher.counted()["waiting_s/leases"] == 1.5
        await gone(one)
        await gone(other)

    asyncio.run(scenario())


def test_learner_that_fails_mid_export_leaves_nobody_waiting(start_server, make_publisher, weights):
    server = start_server("a")
    publisher = make_publisher()
    assert publisher.wait_for_members(1, 30)
    new = weights(0)

    def breaking():
        yield from list(new.stream())[:3]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(0, new.specs, breaking())
    with pytest.raises(ValueError, match="in the manifest, but not yielded"):
        publisher.publish(0, new.specs, iter(list(new.stream())[:2]))
    report, _ = publish(publisher, 0, new)
    assert report.members == ["a"]
    assert server.expect("loaded")["sums"] == new.sums


def test_a_second_server_of_one_name_waits_until_the_first_is_gone(start_server, make_publisher, weights):
    first = start_server("a")
    publisher = make_publisher(heartbeat_timeout_s=2.0)
    assert publisher.wait_for_members(1, 30)
    second = start_server("a")
    new = weights(0)
    for _ in range(10):
        publish(publisher, 0, new)
        time.sleep(0.3)
    assert first.expect("loaded", version=0)["sums"] == new.sums
    assert len([e for e in first.said if e["event"] == "loaded"]) == 1, "it was never turned out"
    first.signal(signal.SIGKILL)
    deadline = time.monotonic() + 15
    while not publisher.wants_publish() and time.monotonic() < deadline:
        time.sleep(0.1)
    report, _ = publish(publisher, 0, new)
    assert report.members == ["a"]
    assert second.expect("loaded", version=0)["sums"] == new.sums


def test_a_server_that_cannot_take_versions_asks_less_and_less_often_and_says_so_once(
    address, make_publisher, weights, caplog
):
    publisher, new = make_publisher(), weights(0)
    sink = StandInSink(Behavior(refuse="bias"), print)
    receiver = Receiver(SyncConfig(address=address), "test", "other", sink)

    async def turned_out(times: int) -> list[float]:
        """When it was."""
        serving, at = asyncio.create_task(receiver.run()), list[float]()
        async with asyncio.timeout(60):
            while len(at) < times:
                if publisher.wants_publish():
                    report, _ = await asyncio.to_thread(publish, publisher, 0, new)
                    at += [time.monotonic()] * len(report.lost)
                await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.wait([serving])
        return at

    first, second, third = asyncio.run(turned_out(3))
    assert second - first > 1.5, "two seconds, less what the first report took"
    assert third - second > 3.5, "four"
    told = [r.message for r in caplog.records if r.name == "sync.receiver" and r.levelname == "WARNING"]
    assert [text for text in told if "could not be taken" in text] == told[:1]
    assert len(told) == 2


def test_a_learner_without_file_handles_blames_nobody(address, start_server):
    servers = [start_server("one"), start_server("other")]
    # In a process of its own: in the tests' one, others' files are closed at any moment, and make room.
    context = multiprocessing.get_context("forkserver")
    events, theirs = context.Pipe(duplex=False)
    learner = context.Process(target=publish_without_handles, args=(address, len(servers), theirs))
    learner.start()
    theirs.close()
    assert events.poll(60), "it said nothing"
    *without, with_some = json.loads(events.recv_bytes())
    learner.join()
    events.close()
    assert without == [{"members": [], "lost": []}] * 3
    assert with_some == {"members": ["one", "other"], "lost": []}
    for server in servers:
        server.expect("loaded", version=0)


def test_a_server_without_file_handles_costs_only_itself(start_server, make_publisher, weights):
    """It says so itself: nobody else is blamed for a group that was never connected."""
    well, short = start_server("well"), start_server("short")
    publisher = make_publisher()
    assert publisher.wait_for_members(2, 30)
    with none_left(short.process.pid):
        report, interruptions = publish(publisher, 1, weights(1))
        assert (report.members, interruptions) == (["well"], 0)
        assert well.expect("loaded", version=1)["sums"] == weights(1).sums
        ((name, reason),) = report.lost
        assert name == "short"
        assert "file handles" in reason
        report, _ = publish(publisher, 2, weights(2))
        assert report.members == ["well"]
    deadline = time.monotonic() + 40
    while "short" not in report.members and time.monotonic() < deadline:
        report, _ = publish(publisher, 2, weights(2))
        time.sleep(0.2)
    assert short.expect("loaded", version=2)["sums"] == weights(2).sums
