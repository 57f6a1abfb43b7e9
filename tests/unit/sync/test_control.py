"""The publisher's thread of control messages."""

import socket
import threading
import time

import msgpack
import pytest
import zmq

from sync.control import Control
from sync.errors import TransferFailed
from sync.membership import Member
from sync.wire import Beat, Refuse, decode


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_who_waits_for_a_member_is_freed_when_the_publisher_closes():
    control = Control("tcp://127.0.0.1:*", "run", 10)
    control.start()
    freed = []

    def wait():
        with pytest.raises(TransferFailed, match="closed"):
            control.wait(lambda: False, 60)
        freed.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    closed = time.monotonic()
    control.close()
    waiting.join(20)
    assert freed
    assert freed[0] - closed < 10


def test_its_thread_may_end_before_close_has_told_it_to():
    control = Control("tcp://127.0.0.1:*", "run", 10)
    control.start()
    control.close()
    control.send([Member(b"m", "server-0", 1, time.monotonic())], Beat())


def test_a_fault_of_its_thread_is_told_to_whoever_waits_and_whoever_would_publish(monkeypatch):
    """Rather than training on with nobody to hear of it."""
    control = Control("tcp://127.0.0.1:*", "run", 0.5)
    monkeypatch.setattr(control, "_beat", lambda: 1 // 0)
    began = time.monotonic()
    control.start()
    with pytest.raises(RuntimeError, match=r"control channel of sync has stopped: .*division"):
        control.wait(lambda: False, 60)
    assert time.monotonic() - began < 10
    with pytest.raises(RuntimeError, match="has stopped"):
        control.check()
    control.close()


def test_what_a_stranger_sends_is_one_line_of_the_log(caplog):
    port, context = free_port(), zmq.Context()
    control = Control(f"tcp://127.0.0.1:{port}", "run", 10)
    control.start()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{port}")
    try:
        stranger.send(msgpack.packb({"kind": "BEAT", "counts": {"tokens": "1\nWARNING all is lost"}}))
        assert stranger.poll(10_000)
        assert isinstance(decode(stranger.recv()), Refuse)
    finally:
        stranger.close(linger=0)
        context.term()
        control.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("sync: refused a message: counts: tokens: 1\\nWARNING all is lost")
