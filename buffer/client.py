"""How rollout servers and the learner reach the buffer: the transport seam, and its ZeroMQ side.

`RolloutBuffer` and `LearnerBuffer` say what the two need; `BufferClient` speaks to the service over ZeroMQ,
and `buffer/memory.py` has the same over a store in this process.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from buffer import groups, wire
from buffer.errors import BadMessage, Unreachable
from buffer.errors import BatchForgotten as BatchForgotten
from buffer.errors import DataExhausted as DataExhausted
from buffer.errors import RunFinished as RunFinished
from buffer.fields import flag, integer, mapping, texts
from buffer.keys import ClientKeys
from buffer.records import Batch, GivenUp, Group, Lease
from buffer.requester import Answer, Requester, new_id
from buffer.wire import Request

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""A long poll is asked for in pieces this long."""
GRACE_S = 2.0
"""A poll's answer may come this much after its time is over."""
FOR_EVER = math.inf
"""The deadline of a run's services: without the buffer they can only wait for it."""


class RolloutBuffer(Protocol):
    """What a rollout server needs of the buffer."""

    async def start(self) -> None: ...
    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]: ...
    async def withdraw(self) -> list[Lease]: ...
    async def renew(self, lease_ids: Sequence[str]) -> set[str]: ...
    async def deliver(self, group: Group) -> bool: ...
    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> GivenUp | None: ...


class LearnerBuffer(Protocol):
    """What the learner needs of the buffer; `ObservedBuffer` tells it the frontier."""

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None: ...
    async def published(self, version: int) -> None: ...
    async def committed(self, index: int) -> None: ...
    async def finished(self, version: int) -> None: ...


class ObservedBuffer(Protocol):
    async def status(self) -> dict[str, Any]: ...


class BufferClient:
    """One connection to the buffer, for one role. Calls may run side by side; all of one event loop.

    Every request is repeated, under the same id, until it is answered or its own deadline is over, and at
    once when the connection comes back: a buffer that was killed and restarted costs time only. A call
    raises `Unreachable` after `deadline_s` without an answer, but for `lease`, which comes back empty at its
    own timeout; whoever waits says in its log for whom, and for how long.
    """

    def __init__(
        self,
        address: str,
        role: Literal["rollout", "learner", "observer"],
        run_id: str,
        name: str,
        deadline_s: float = 600.0,
        keys: ClientKeys | None = None,
    ) -> None:
        self._requester = Requester("buffer", address, wire.ENVELOPE.open_reply, logger, keys)
        self._role = role
        self._run_id = run_id
        self._name = name
        self._deadline_s = deadline_s
        self._abandoned: list[tuple[int, str]] = []
        self._left: list[asyncio.Task[Answer | None]] = []
        """Requests for leases whose call was cancelled."""
        self._asked: dict[tuple[int, int, int], asyncio.Task[Answer]] = {}
        """For shards that may be on their way, by batch, rank and ranks."""
        self._max_message_bytes: int | None = None

    async def __aenter__(self) -> Self:
        await self._requester.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pending = [*self._asked.values(), *self._left]
        for asked in pending:
            asked.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._requester.__aexit__(kind, error, trace)

    # Rollout

    async def start(self) -> None:
        """Say that this server holds nothing: what one of its name was lent in another life goes back to the
        queue at once."""
        await self._call("start", {})

    async def lease(self, max_groups: int, timeout_s: float) -> list[Lease]:
        """Prompts to work on, at most `max_groups`; [] when none can be granted within `timeout_s`.

        With 0 groups it only waits for the end of the run.

        Raises:
            RunFinished: The run is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # An earlier call whose answer never came may have been granted something: asking again under its
            # id brings that, instead of leaving it to run out.
            request_id = self._adopt(max_groups) or new_id()
            wait_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            fields = {"max_groups": max_groups, "wait_s": wait_s}
            asked = asyncio.create_task(self._poll("lease", fields, request_id, deadline))
            try:
                answer = await asyncio.shield(asked)
            except asyncio.CancelledError:
                if max_groups:
                    self._left.append(asked)
                else:
                    asked.cancel()
                raise
            if answer is None:
                self._abandoned.append((max_groups, request_id))
                return []
            leases = wire.decode_leases(answer[0])
            if leases or time.monotonic() >= deadline:
                return leases

    async def withdraw(self) -> list[Lease]:
        """What calls of `lease` that were cancelled are granted all the same: to be handed back.

        The buffer waits on their requests for up to `POLL_S`, and does not learn that nobody asks any more.
        """
        found: list[Lease] = []
        while self._left:
            answer = await self._left.pop()
            if answer is not None:
                found += wire.decode_leases(answer[0])
        return found

    def _adopt(self, max_groups: int) -> str | None:
        """An abandoned request that asked for no more than that."""
        for entry in self._abandoned:
            if entry[0] <= max_groups:
                self._abandoned.remove(entry)
                return entry[1]
        return None

    async def renew(self, lease_ids: Sequence[str]) -> set[str]:
        """Keep leases alive; returns those that are not ours any more, whose work is to be cancelled."""
        reply, _ = await self._call("renew", {"lease_ids": list(lease_ids)})
        return set(texts(reply, "lost"))

    async def deliver(self, group: Group) -> bool:
        """Hand a group over; True once it is on disk, False if it is not needed: a duplicate, or done by
        others.

        Raises:
            BadMessage: The group breaks the schema; the text names the field.
        """
        meta, arrays = groups.encode_group(group)
        if self._max_message_bytes is None:
            hello, _ = await self._call("hello", {})
            self._max_message_bytes = integer(hello, "max_message_bytes", high=1 << 62)
        size = max(len(meta), arrays.nbytes)
        if size > self._max_message_bytes:
            raise BadMessage(
                f"group {group.group_id}: {size} bytes; buffer.max_message_mib allows "
                f"{self._max_message_bytes}"
            )
        reply, _ = await self._call("deliver", {}, [meta, arrays])
        return flag(reply, "stored")

    async def give_up(self, lease_id: str, reason: str, requeue: bool) -> GivenUp | None:
        """Return a lease whose group failed; `reason` is counted, `requeue` puts the prompt back.

        Returns:
            What became of the prompt; None if the lease was not ours any more.
        """
        reply, _ = await self._call("give_up", {"lease_id": lease_id, "reason": reason, "requeue": requeue})
        return wire.decode_given_up(reply)

    # Learner

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None:
        """One rank's shard of batch `index`; None when the buffer says for `timeout_s` that it is not there.

        One that is on its way when a call is cancelled is not asked for again: the next call waits for the
        same, however slow the line.

        Raises:
            DataExhausted: No full batch can ever come.
            BatchForgotten: A checkpoint with its effect was confirmed.
        """
        deadline = time.monotonic() + timeout_s
        shard = index, dp_rank, dp_size
        while True:
            asked = self._asked.get(shard) or self._ask_for(shard, deadline)
            await asyncio.wait([asked])
            self._asked.pop(shard, None)
            reply, frames = asked.result()
            if flag(reply, "ready"):
                return _batch(reply, frames)
            if time.monotonic() >= deadline:
                return None

    def _ask_for(self, shard: tuple[int, int, int], deadline: float) -> "asyncio.Task[Answer]":
        wait_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
        index, dp_rank, dp_size = shard
        fields = {"index": index, "dp_rank": dp_rank, "dp_size": dp_size, "wait_s": wait_s}
        self._asked[shard] = asyncio.create_task(self._call("batch", fields, wait_s=wait_s))
        return self._asked[shard]

    async def published(self, version: int) -> None:
        """Every live server holds `version`."""
        await self._call("published", {"version": version})

    async def committed(self, index: int) -> None:
        """A checkpoint holding the effect of every batch below `index` is on disk."""
        await self._call("committed", {"index": index})

    async def finished(self, version: int) -> None:
        """The last step was made and its version published."""
        await self._call("finished", {"version": version})

    async def status(self) -> dict[str, Any]:
        """The buffer's numbers."""
        reply, _ = await self._call("status", {})
        return mapping(reply, "status")

    # Requests

    async def _poll(
        self, verb: str, fields: dict[str, Any], request_id: str, deadline: float
    ) -> Answer | None:
        """A request that may go unanswered until its deadline: None then."""
        started = time.monotonic()
        try:
            until = deadline + GRACE_S
            return await self._call(
                verb, fields, request_id=request_id, deadline=until, wait_s=fields["wait_s"]
            )
        except Unreachable:
            self._requester.tell_silence(verb, started)
            return None

    async def _call(
        self,
        verb: str,
        fields: dict[str, Any],
        frames: Sequence[groups.Frame] = (),
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        """Send until answered. Raises what the buffer refused with, or `Unreachable`."""
        request = Request(request_id or new_id(), self._role, self._name, self._run_id, verb, fields)
        message = [wire.encode_request(request), *frames]
        until = time.monotonic() + self._deadline_s if deadline is None else deadline
        answer = await self._requester.ask(request.request_id, message, verb, until, wait_s + GRACE_S)
        wire.ENVELOPE.raise_if_refused(answer[0])
        return answer


def _batch(reply: dict[str, Any], frames: list[memoryview]) -> Batch:
    if len(frames) % 2:
        raise BadMessage(f"frames: expected meta and arrays of each group, got {len(frames)} frames")
    taken = tuple(
        groups.decode_group(meta, arrays) for meta, arrays in zip(frames[::2], frames[1::2], strict=True)
    )
    if len(taken) != integer(reply, "groups"):
        raise BadMessage(f"groups: expected {reply['groups']}, got {len(taken)}")
    shares = mapping(reply, "shares")
    return Batch(integer(reply, "index"), taken, {name: integer(shares, name) for name in shares})
