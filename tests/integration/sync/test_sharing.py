"""When versions lie in memory that the learner shares, and that they are sent wherever that cannot be."""

import pytest

from sync import publisher as publishing
from sync.errors import PublishInterrupted
from sync.shared_memory import SharedStream


def publish(publisher, version, weights):
    for _ in range(2):
        try:
            publisher.publish(version, weights.specs, weights.stream())
            break
        except PublishInterrupted:
            continue
    report = publisher.wait_loaded()
    assert not publisher.wants_publish()
    return report


def loads(server, version, weights, shared):
    assert server.expect("staging", version=version, shared=shared)
    assert server.expect("loaded", version=version)["sums"] == weights.sums


@pytest.mark.parametrize("what", ["elsewhere", "no memory"])
def test_servers_elsewhere_or_without_memory_to_share_are_sent_versions(
    what, start_server, make_publisher, weights, monkeypatch
):
    def none(stream_bytes, bucket_bytes):
        raise OSError(24, "Too many open files")

    server, publisher = start_server("a"), make_publisher()
    if what == "elsewhere":
        monkeypatch.setattr(publisher, "_place", "another machine")
    else:
        monkeypatch.setattr(publishing, "SharedStream", none)
    assert publisher.wait_for_members(1, 30)
    publish(publisher, 0, weights(0))
    loads(server, 0, weights(0), shared=False)


def test_a_server_that_cannot_map_the_memory_is_sent_versions_from_then_on(
    start_server, make_publisher, weights, monkeypatch
):
    class Unreachable(SharedStream):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.path = "/proc/1/fd/999999"

    servers, publisher = [start_server("a"), start_server("b")], make_publisher()
    monkeypatch.setattr(publishing, "SharedStream", Unreachable)
    assert publisher.wait_for_members(2, 30)
    for version in (0, 1):
        report = publish(publisher, version, weights(version))
        assert (report.members, report.lost) == (["a", "b"], [])
        for server in servers:
            loads(server, version, weights(version), shared=False)
    assert [e["version"] for e in servers[0].said if e["event"] == "staging" and e["shared"]] == [0]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_learner_that_trains_on_changes_nothing_of_a_version_that_is_out(
    shared_memory, start_server, make_publisher, weights
):
    """What a server reads for a while yet is no view of the weights, which an optimizer writes in place."""
    server, publisher = start_server("a", load_seconds=0.5), make_publisher()
    assert publisher.wait_for_members(1, 30)
    live = weights(0)
    for version in (0, 1):
        sums = live.sums
        publisher.publish(version, live.specs, live.stream())
        for tensor in live.tensors.values():
            tensor.add_(1)
        trained = live.sums
        assert publisher.wait_loaded().members == ["a"]
        assert server.expect("staging", version=version)["shared"] == shared_memory
        assert server.expect("loaded", version=version)["sums"] == sums
        assert live.sums == trained != sums, "nor are the weights a view of the memory"


def test_who_comes_or_is_lost_makes_new_memory_of_another_size_too(start_server, make_publisher, weights):
    """Whoever was lost may still read the old one."""
    first, publisher = start_server("first"), make_publisher()
    assert publisher.wait_for_members(1, 30)
    kept = []
    for version, megabytes, name in ((0, 4, ""), (1, 4, ""), (2, 6, ""), (3, 6, "second")):
        if name:
            start_server(name)
            assert publisher.wait_for_members(2, 30)
        new = weights(version, megabytes)
        publish(publisher, version, new)
        loads(first, version, new, shared=True)
        kept.append(publisher._shared)
    assert kept[0] is kept[1]
    assert len({id(each) for each in kept}) == 3


def test_bytes_that_change_in_the_memory_are_not_loaded(start_server, make_publisher, weights, monkeypatch):
    server, publisher = start_server("a", bucket_seconds=0.2), make_publisher()
    spoilt = []

    class Spoilt(SharedStream):
        def outgoing(self, bucket):
            if not spoilt:
                spoilt.append(True)
                bucket[100] += 1
            return super().outgoing(bucket)

    monkeypatch.setattr(publishing, "SharedStream", Spoilt)
    assert publisher.wait_for_members(1, 30)
    publisher.publish(0, weights(0).specs, weights(0).stream())
    report = publisher.wait_loaded()
    assert report.members == []
    assert "bucket 0 of" in dict(report.lost)["a"]
    assert not [event for event in server.said if event["event"] == "loaded"]
    assert publisher.wait_for_members(1, 30)
    publish(publisher, 0, weights(0))
    loads(server, 0, weights(0), shared=True)
