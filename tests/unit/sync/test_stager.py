"""What becomes of the thread that receives when its stage is dropped, or its process ends."""

import subprocess
import sys
import threading
import time

import torch

from sync.buckets import checksum
from sync.group import Seat
from sync.manifest import Manifest, TensorSpec
from sync.stager import Stager, make_seal
from sync.stand_in import connect

CPU = torch.device("cpu")

RECEIVES_AT_ITS_END = """
import threading, time, torch
from sync.group import Seat
from sync.manifest import Manifest, TensorSpec
from sync.stager import Stager
from sync.stand_in import connect

seat = lambda rank: Seat("127.0.0.1", 1, "nonce", rank, 2, "gloo", 2.0)
stager = Stager(torch.device("cpu"))
manifest = Manifest.layout([TensorSpec("weight", "float32", (4,))], 1 << 20)
stager.begin(seat(1), True, 1, manifest)
sender = connect(seat(0), torch.device("cpu"), stager)  # sends nothing; gone when the modules are
time.sleep(0.3)
assert [t.name for t in threading.enumerate() if t is not threading.main_thread()] == ["slipstream-stage"]
stager.close(5.0)
"""


def test_a_process_that_ends_in_the_middle_of_receiving_ends_well():
    command = [sys.executable, "-c", RECEIVES_AT_ITS_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_dropped_before_it_could_be_prepared_never_is():
    """It would be prepared in the place of the one that is loaded next, and under that one's version."""
    manifest = Manifest.layout([TensorSpec("weight", "float32", (4,))], 1 << 20)
    prepared, begun, ends = [], threading.Event(), threading.Event()

    def prepare(_, stream):
        prepared.append(int(stream[0]))
        begun.set()
        ends.wait(10)

    def seat(version, rank):
        return Seat("127.0.0.1", version, f"nonce-{version}", rank, 2, "gloo", 10.0)

    def send(version):
        stager.begin(seat(version, 1), True, version, manifest)
        sender = connect(seat(version, 0), CPU, stager)
        bucket = torch.full((manifest.stream_bytes,), version, dtype=torch.uint8)
        sender.broadcast(bucket)
        sender.broadcast(make_seal(version, [checksum(bucket)], CPU))
        return sender

    stager = Stager(CPU, prepare=prepare)
    senders = [send(1)]
    assert begun.wait(10)
    senders += [send(2), send(3)]
    time.sleep(0.3)  # all of them have arrived
    ends.set()
    deadline = time.monotonic() + 10
    while stager.status()["state"] == "receiving" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (stager.status()["version"], stager.status()["state"]) == (3, "staged")
    stager.close(10)
    assert prepared == [1, 3]
    del senders
