"""The rules of membership, with no socket and no clock."""

import struct

import pytest

from sync.membership import MAX_FAILED_TRANSFERS, Membership
from sync.wire import Failed, Loaded, Ready

ENTRY = struct.pack("=Q2sQ136x", 2, b"vm", 136)
"""As gloo makes them."""


def joined(*names: str) -> Membership:
    members = Membership()
    for name in names:
        members.join(name.encode(), name, 1, now=0.0)
    return members


def member(members: Membership, name: str):
    found = members.get(name.encode())
    assert found is not None
    return found


def load(members: Membership, name: str, attempt: int, version: int) -> None:
    members.asked([member(members, name)], attempt)
    members.loaded(member(members, name), Loaded(attempt, version, 0, 0.0, 0.0, 0.0))


def test_a_member_lacks_a_version_until_it_says_otherwise_and_not_while_it_gets_it():
    members = joined("a", "b")
    assert len(members.lacking(1)) == 2
    members.asked([member(members, "a")], attempt=1)
    assert [m.name for m in members.lacking(1)] == ["b"]
    load(members, "a", 1, 1)
    assert [m.name for m in members.lacking(1)] == ["b"]
    assert len(members.lacking(2)) == 2


def test_when_a_member_said_that_it_loaded_stays_told_while_more_is_heard_of_it():
    members = joined("a")
    a = member(members, "a")
    a.heard_at = 7.0
    load(members, "a", 1, 1)
    a.heard_at = 9.0
    assert a.loaded_at == 7.0


def test_rejoining_forgets_what_the_member_held_and_replaces_its_former_self():
    members = joined("a")
    load(members, "a", 1, 7)
    replaced = members.join(b"other", "a", 1, now=1.0)
    assert [m.identity for m in replaced] == [b"a"]
    assert [m.identity for m in members.lacking(7)] == [b"other"]
    assert members.take_lost() == [("a", "another server of this name joined")]
    assert members.take_lost() == []


def test_answers_to_a_past_attempt_change_nothing():
    members = joined("a")
    a = member(members, "a")
    members.asked([a], attempt=2)
    assert members.ready(a, Ready(1, {"0/1": b"old"})) == "READY of attempt 1: it is asked in attempt 2"
    members.dropped(a, 1)
    members.loaded(a, Loaded(1, 5, 0, 0.0, 0.0, 0.0))
    assert members.failed(a, Failed(1, "load", "old")) is None
    assert (a.phase, a.version, a.entries) == ("asked", None, {})


def test_what_a_members_ranks_left_counts_once_and_for_its_attempt_alone():
    members = joined("a")
    a = member(members, "a")
    members.asked([a], attempt=1)
    assert members.ready(a, Ready(1, {"0/1": ENTRY})) is None
    assert members.ready(a, Ready(1, {"0/1": b"again"})) == "READY of attempt 1: it is ready in attempt 1"
    assert members.introduce(1, {"0/0": b"rank 0"}) == ({"0/0": b"rank 0", "0/1": ENTRY}, [])
    members.asked([a], attempt=2)
    assert members.introduce(2, {}) == ({}, [])


def test_a_member_introduces_no_more_ranks_than_it_has_and_none_of_another():
    members = joined("a", "b", "c")
    a, b, c = (member(members, name) for name in "abc")
    members.asked([a, b, c], attempt=1)
    members.ready(a, Ready(1, {"0/1": ENTRY}))
    members.ready(b, Ready(1, {"0/0": ENTRY}))
    members.ready(c, Ready(1, {"0/3": ENTRY, "0/4": ENTRY}))
    assert members.introduce(1, {"0/0": b"rank 0"}) == ({"0/0": b"rank 0", "0/1": ENTRY}, [b, c])


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"here",
        bytes(154),
        ENTRY[:-1],
        ENTRY + b"0",
        b"\xff" * 154,
        struct.pack("=Q2sQ135x", 2, b"vm", 135),
    ],
)
def test_what_gloo_would_read_beyond_its_end_is_brought_to_nobody(entry):
    members = joined("a")
    a = member(members, "a")
    members.asked([a], attempt=1)
    members.ready(a, Ready(1, {"0/1": entry}))
    assert members.introduce(1, {}) == ({}, [a])


def test_only_a_failure_that_is_the_members_own_evicts_it():
    members = joined("a")
    a = member(members, "a")
    members.asked([a], attempt=1)
    assert members.failed(a, Failed(1, "transfer", "connection closed by peer")) is None
    assert members.failed(a, Failed(1, "checksum", "bucket 2")) == "checksum: bucket 2"
    assert members.failed(a, Failed(1, "handles", "none left")) == "handles: none left"


def test_only_those_are_suspected_of_whom_it_can_be_known():
    members = joined("a", "b", "c")
    a, b, c = (member(members, name) for name in "abc")
    members.asked([a, b, c], attempt=1)
    for each in (a, b, c):
        members.dropped(each, 1)
    assert members.suspects(1, 3) == [a, b, c], "nobody said what was wrong"
    members.asked([a, b, c], attempt=2)
    assert members.failed(b, Failed(2, "transfer", "connection refused")) is None
    for each in (a, b, c):
        members.dropped(each, 2)
    assert members.suspects(2, 3) == [b]
    members.evict(c, "silent")
    assert members.suspects(2, 3) == [], "the one that is out was it"


def test_transfers_that_keep_failing_evict_in_the_end_but_success_clears_the_count():
    members = joined("a")
    a = member(members, "a")
    for _ in range(MAX_FAILED_TRANSFERS - 1):
        assert not members.count_failed_transfer(a)
    load(members, "a", 1, 1)
    for _ in range(MAX_FAILED_TRANSFERS - 1):
        assert not members.count_failed_transfer(a)
    assert members.count_failed_transfer(a)


def test_silence_is_measured_from_the_last_word():
    members = joined("a", "b")
    member(members, "b").heard_at = 20.0
    assert [m.name for m in members.silent(now=31.0, timeout_s=30.0)] == ["a"]
