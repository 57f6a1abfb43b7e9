"""What becomes of the thread that receives when its process ends."""

import subprocess
import sys

RECEIVES_AT_ITS_END = """
import threading, time, torch
from sync.group import BroadcastGroup, Seat, listen
from sync.manifest import Manifest, TensorSpec
from sync.stager import Stager

store, port = listen("127.0.0.1", 2.0)
seat = lambda rank: Seat("127.0.0.1", port, 1, "nonce", rank, 2, "gloo", 2.0)
stager = Stager(torch.device("cpu"))
manifest = Manifest.layout([TensorSpec("weight", "float32", (4,))], 1 << 20)
stager.begin(seat(1), True, 1, manifest)
sender = BroadcastGroup.connect(seat(0), torch.device("cpu"))  # sends nothing; gone when the modules are
time.sleep(0.3)
assert [t.name for t in threading.enumerate() if t is not threading.main_thread()] == ["slipstream-stage"]
stager.close(5.0)
"""


def test_a_process_that_ends_in_the_middle_of_receiving_ends_well():
    command = [sys.executable, "-c", RECEIVES_AT_ITS_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
