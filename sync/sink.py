"""Where a version goes on the rollout side: the seam between the receiver and an engine. No torch."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sync.manifest import Manifest
from sync.wire import Entries

OnUpdate = Literal["keep", "recompute", "abort"]
"""What becomes of running requests when weights change: they keep their key-value cache, have it computed
again by the new weights, or are aborted."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """All that an engine's ranks need to receive one version.

    Made by the receiver from PREPARE, read by a sink. Rank r of the engine is rank `first_rank + r` of the
    broadcast group. With `fresh` the group is to be built, else that of the stage before is used again. The
    stream is in the learner's `memory`, or is received where that is empty.
    """

    version: int
    epoch: int
    nonce: str = field(repr=False)
    fresh: bool
    host: str
    first_rank: int
    group_size: int
    backend: str
    memory: str
    timeout_s: float
    manifest: Manifest
    accepted: Callable[[Entries], Awaitable[Entries]]
    """Called by the sink once its ranks have taken the manifest and begun to connect, with what they left for
    the others of a group that is to be built. The learner waits for that, so that a refusal costs the other
    servers nothing. Gives back what all ranks left, for each of this engine's."""


class WeightSink(Protocol):
    """An engine that takes weights. Errors are `sync.errors`; `EngineLost` ends the receiver."""

    @property
    def world_size(self) -> int:
        """Ranks that receive."""
        ...

    async def stage(self, plan: StagePlan) -> int:
        """Check the manifest, call `plan.accepted`, then connect, receive and verify every bucket.

        Generation goes on meanwhile. It may be cancelled at any await; `drop` follows then.

        Returns:
            The checksum of all that is staged (`sync.buckets.combine`), the same on every rank.
        """
        ...

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        """Put the staged version into every rank of the engine; generation goes on with it.

        Args:
            loaded: Called when every rank has it and before anything is generated with it: who asks for more
                from then on asks for that version.

        Returns:
            Seconds during which nothing was generated.
        """
        ...

    async def drop(self) -> None:
        """Forget what is staged or being staged, and the group. Returns at once."""
        ...
