"""The buffer in this process: the client's calls over a store in memory, for tests of what talks to it."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from buffer import assembly, groups
from buffer.config import BufferConfig
from buffer.prompts import PromptQueue, Row
from buffer.records import Batch, GivenUp, Group, Lease
from buffer.store import Sources, Store

T = TypeVar("T")

LOOK_S = 0.01
"""Between two looks of a waiting poll."""


class MemoryBuffer:
    """Rollout's, learner's and observer's side at once. Groups go through the wire's bytes, as they do for
    real."""

    def __init__(
        self,
        rows: list[Row],
        config: BufferConfig,
        *,
        seed: int = 1,
        epochs: int | None = None,
        shuffle: bool = False,
        eval_rows: Sequence[Row] = (),
        eval_every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sources = Sources(PromptQueue(rows, seed, epochs, shuffle), list(eval_rows), eval_every, seed)
        self.store = Store(None, "memory", config, sources, clock)

    async def start(self) -> None:
        self._do(lambda: self.store.start("memory"))

    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]:
        request_id = uuid.uuid4().hex
        return await self._poll(timeout_s, lambda: self.store.lease("memory", request_id, max_groups))

    async def withdraw(self) -> list[Lease]:
        return []  # a call that is cancelled asks for nothing any more

    async def renew(self, lease_ids: Sequence[str]) -> set[str]:
        return self._do(lambda: self.store.renew(list(lease_ids)))

    async def deliver(self, group: Group) -> bool:
        meta, arrays = groups.encode_group(group)
        return self._do(lambda: self.store.deliver(groups.decode_delivery(meta, arrays)))

    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> GivenUp | None:
        return self._do(lambda: self.store.give_up(lease_id, reason, requeue))

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None:
        found = await self._poll(timeout_s, lambda: self.store.batch(index))
        if found is None:
            return None
        frames = assembly.payloads(self.store.database.connection, found.shard(dp_rank, dp_size))
        delivered = tuple(groups.decode_group(*pair) for pair in zip(frames[::2], frames[1::2], strict=True))
        return Batch(index, delivered, found.shares)

    async def published(self, version: int) -> None:
        self._do(lambda: self.store.published(version))

    async def committed(self, index: int) -> None:
        self._do(lambda: self.store.committed(index))

    async def finished(self, version: int) -> None:
        self._do(lambda: self.store.finish(version))

    async def status(self) -> dict[str, Any]:
        return self._do(self.store.status)

    def _do(self, call: Callable[[], T]) -> T:
        with self.store.transaction():
            self.store.expire()
            return call()

    async def _poll(self, timeout_s: float, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._do(call)
            if found or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(LOOK_S)
