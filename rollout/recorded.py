"""A rollout server without an engine: it answers every lease at once with a recorded group.

What measures the learner alone. It joins the learner as any server does and receives every version, of which
it keeps nothing.
"""

import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from buffer.records import Group, Lease
from rollout.metrics import Meters
from sync.stand_in import Behavior, StandInSink


class RecordedGroups:
    """Stands where the engine and the group runner are.

    Args:
        groups: Given out round and round.
        version: Now loaded; what the tokens are labelled with.
        meters: Told of the tokens.
    """

    def __init__(self, groups: Sequence[Group], version: Callable[[], int | None], meters: Meters) -> None:
        self._groups = itertools.cycle(groups)
        self._version = version
        self._meters = meters

    @property
    def silent(self) -> list[str]:
        return []  # there is nobody to ask

    async def answered(self) -> None:
        return

    async def ready(self) -> None:
        return

    async def run(self, lease: Lease) -> Group:
        version = self._version()
        assert version is not None, "asked before the first version"
        group = next(self._groups)
        self._meters.completions += len(group.trajectories)
        self._meters.tokens += sum(int(t.loss_mask.sum()) for t in group.trajectories)
        relabelled = [replace(t, versions=t.loss_mask.astype("i4") * version) for t in group.trajectories]
        return Group(uuid.uuid4().hex, lease.lease_id, lease.prompt.prompt_id, lease.kind, tuple(relabelled))


class ReceivingSink(StandInSink):
    """Receives and checks every version, and forgets it."""

    def __init__(self, transfer_timeout_s: float) -> None:
        super().__init__(Behavior(), lambda _: None)
        self._longest_s = transfer_timeout_s + 1

    def close(self) -> None:
        """Wait for what is being received: an interpreter that ends while a thread comes back from a
        collective aborts. That is when the learner has dropped this server, or at the transfer's timeout."""
        self._stager.close(self._longest_s)

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        loaded()
        return 0.0
