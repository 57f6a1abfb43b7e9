"""Memory that a learner shares: who may map it, what they see, and that nothing is left of it."""

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sync.errors import MemoryNotShared
from sync.shared_memory import SharedStream, map_stream, place_of_this_process

SIZE, BUCKET = 5 << 12, 2 << 12
SPAWN = multiprocessing.get_context("spawn")


def read_in_turn(path, orders):
    """Another process: tells the sum of what it maps, whenever it is asked."""
    stream = map_stream(path, SIZE)
    while orders.recv():
        total = int(stream.long().sum())
        stream[0] = 9  # its own
        orders.send((total, place_of_this_process()))


def test_another_process_sees_what_is_written_and_writes_to_itself_only():
    shared = SharedStream(SIZE, BUCKET)
    buckets = shared.take()
    assert [len(b) for b in buckets] == [BUCKET, BUCKET, SIZE - 2 * BUCKET]
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=read_in_turn, args=(shared.path, theirs))
    reader.start()
    for value in (1, 3):
        for bucket in buckets:
            bucket.fill_(value)
        ours.send(True)
        total, place = ours.recv()
        assert place == place_of_this_process() != ""
        if value == 1:
            assert total == SIZE
        else:  # the page that the reader wrote to does not follow any more, as the sums of buckets show
            assert total == 3 * (SIZE - 4096) + 9 + 4095
    assert buckets[0][0] == 3
    ours.send(False)
    reader.join()


def test_it_is_freed_with_its_last_user_and_leaves_no_handle():
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    shared = SharedStream(SIZE, BUCKET)
    stream = map_stream(shared.path, SIZE)
    shared.take()[2].fill_(7)
    del shared
    gc.collect()
    assert stream[-1] == 7, "who reads it keeps it"
    del stream
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert "slipstream-weights" not in Path("/proc/self/maps").read_text()


def test_what_is_no_shared_stream_is_not_mapped(tmp_path):
    shared = SharedStream(SIZE, BUCKET)
    with pytest.raises(MemoryNotShared, match=f"not {SIZE + 1} bytes"):
        map_stream(shared.path, SIZE + 1)
    with pytest.raises(MemoryNotShared, match="No such file"):
        map_stream("/proc/self/fd/9999", SIZE)
    plain = tmp_path / "weights"
    plain.write_bytes(bytes(SIZE))
    with plain.open() as file, pytest.raises(MemoryNotShared):
        map_stream(f"/proc/self/fd/{file.fileno()}", SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(int(shared.path.rpartition("/")[2]), 0)  # which would kill whoever reads on
    assert torch.equal(map_stream(shared.path, SIZE), torch.zeros(SIZE, dtype=torch.uint8))


WITHOUT_IT = """
import fcntl, os
del os.memfd_create
for name in [name for name in vars(fcntl) if "SEAL" in name]:
    delattr(fcntl, name)
import torch
from sync.config import SyncConfig
from sync.publisher import Publisher
from sync.receiver import place_of_this_process

assert place_of_this_process() == "", "nothing is shared with it"
publisher = Publisher(SyncConfig(address="tcp://127.0.0.1:5999"), "run", torch.device("cpu"))
assert publisher._share([], None) is None
"""


def test_a_python_that_has_no_such_memory_shares_nothing_and_works():
    """As one built against an old C library."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_IT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_kernel_that_seals_more_than_was_asked_for_is_no_obstacle(monkeypatch):
    no_exec_seal = 8  # MFD_NOEXEC_SEAL, what sysctl vm.memfd_noexec=1 makes the default
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: create(name, flags | no_exec_seal))
    shared = SharedStream(SIZE, BUCKET)
    shared.take()[0].fill_(3)
    assert map_stream(shared.path, SIZE)[0] == 3
