"""How vLLM's processes wait for each other on a machine whose cores also compute.

An engine's core and its workers hand messages over in shared memory. Whoever waits for the next one asks for
it again and again for a second before it goes to sleep: right beside a GPU, where a core has nothing else to
do. On CPU it takes a core from decoding, from the learner and from what carries a version's weights.
"""

import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

FIRST_SLEEP_MS, LONGEST_SLEEP_MS = 1, 50
"""From one look at the memory to the next, where vLLM would spin. Every message is announced on a socket, and
ends the sleep. But an announcement that follows another within a millisecond may be dropped (its queue holds
one, and ZeroMQ looks no more often whether that is taken): a reader that waited for it alone would sleep for
seconds. So it looks every millisecond at first, and then the less often the longer nothing came."""
SHARE = 4
"""A sleep is at most this part of the time since the last message, so that one that was not announced is late
by no more than that."""


def sleep_instead_of_spinning() -> None:
    """In this process, from now on. Another call changes nothing."""
    SpinCondition.wait = _wait


def _wait(self: Any, timeout_ms: int | None = None) -> None:
    """In the place of `SpinCondition.wait`: back when a message is announced, or to look again."""
    waited_s = time.monotonic() - self.last_read
    if waited_s <= self.busy_loop_s:
        sleep_ms = min(LONGEST_SLEEP_MS, max(FIRST_SLEEP_MS, int(1000 * waited_s / SHARE)))
        timeout_ms = sleep_ms if timeout_ms is None else min(timeout_ms, sleep_ms)
    events = dict(self.poller.poll(timeout=timeout_ms))
    if self.local_notify_socket in events:
        self.local_notify_socket.recv(copy=False)
