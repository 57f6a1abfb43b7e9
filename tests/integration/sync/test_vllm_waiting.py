"""Processes of vLLM that wait for a message leave the core to others, and miss none."""

import threading
import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from sync.vllm_waiting import sleep_instead_of_spinning


@pytest.fixture
def queue(monkeypatch):
    """Its two ends, in one process."""
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # put back afterwards
    sleep_instead_of_spinning()
    writer = MessageQueue(n_reader=1, n_local_reader=1, local_reader_ranks=[0])
    reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    return writer, reader


def test_a_reader_that_has_just_read_waits_without_taking_a_core(queue, monkeypatch):
    writer, reader = queue
    writer.enqueue("first")
    assert reader.dequeue(timeout=5) == "first"
    looks = 0
    wait = SpinCondition.wait

    def counted(*arguments, **options):
        nonlocal looks
        looks += 1
        wait(*arguments, **options)

    monkeypatch.setattr(SpinCondition, "wait", counted)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.6)
    assert looks <= 60  # less and less often; one a millisecond would be 600, spinning thousands


def test_no_message_is_late_however_close_they_follow_each_other(queue):
    """An announcement close behind another is dropped: who waited for that alone would wait for seconds."""
    writer, reader = queue
    latencies = []

    def read():
        for _ in range(2000):
            sent = reader.dequeue(timeout=10)
            latencies.append(time.monotonic() - sent)

    reading = threading.Thread(target=read)
    reading.start()
    for number in range(2000):
        writer.enqueue(time.monotonic())
        time.sleep((number % 7) * 2e-4)
    reading.join()
    assert len(latencies) == 2000
    assert max(latencies) < 1.0
