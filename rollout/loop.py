"""The rollout server's main loop: leases in, groups out, as many at a time as the server has room for."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from buffer.client import RolloutBuffer
from buffer.errors import BadMessage, RunFinished
from buffer.records import GivenUp, Group, Lease
from buffer.rendering import PromptRefused
from rollout.engine import CompletionFailed
from rollout.metrics import Meters

logger = logging.getLogger(__name__)

LEASE_POLL_S = 20.0
HAND_BACK_S = 5.0
SILENT = "server_silent"
"""Why a lease goes back that was granted while engine or scorer left this server without an answer."""


class Weights(Protocol):
    async def wait_first_version(self) -> object: ...


class Runner(Protocol):
    """`rollout.groups.GroupRunner`, but where groups are recorded ones."""

    @property
    def silent(self) -> list[str]: ...
    async def answered(self) -> None: ...
    async def ready(self) -> None: ...
    async def run(self, lease: Lease) -> Group: ...


class RolloutLoop:
    """Works on up to `max_groups` leases at a time, each in a task of its own.

    Args:
        buffer: Lends the prompts and takes the groups.
        weights: Tells when there is something to sample with.
        runner: Makes the group of a lease.
        max_groups: Groups in hand at a time.
        renew_period_s: Well below the buffer's lease timeout.
        meters: Told of every group.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        weights: Weights,
        runner: Runner,
        max_groups: int,
        renew_period_s: float,
        meters: Meters,
    ) -> None:
        self._buffer = buffer
        self._weights = weights
        self._runner = runner
        self._max_groups = max_groups
        self._renew_period_s = renew_period_s
        self._meters = meters
        self._held: dict[str, asyncio.Task[None]] = {}
        self._delivering: set[str] = set()
        self._freed = asyncio.Event()
        self._finished = False

    async def run(self) -> None:
        """Until the run is over.

        Consumes: leases, training and evaluation alike.
        Waits for: the first policy version, and the scorers of reward models; then room for a group, and an
            engine and scorers that answer; then the buffer to grant a lease.
        Unblocked by: the learner's publish and the scorers' answers, or the end of the run; a group that was
            delivered or given up; the learner's progress, which lets the buffer grant more.
        """
        await self._unless_run_ends(self._arrived())
        self._meters.wait_for("leases")
        if not self._finished:
            await self._buffer.start()
        async with asyncio.TaskGroup() as tasks, self._leases_kept(tasks):
            while not self._finished:
                room = await self._room()
                for lease in await self._take(room):
                    self._held[lease.lease_id] = tasks.create_task(self._work(lease))

    async def _unless_run_ends(self, arrival: Coroutine[Any, Any, None]) -> None:
        """Wait for what no group can be made without; a run that ends meanwhile does not need this server."""
        arrived = asyncio.create_task(arrival)
        ended = asyncio.create_task(self._run_ended())
        try:
            done, _ = await asyncio.wait([arrived, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
            ended.cancel()
            await asyncio.wait([arrived, ended])
        for task in done:
            task.result()

    async def _arrived(self) -> None:
        await self._weights.wait_first_version()
        self._meters.wait_for("scorers")
        await self._runner.ready()

    async def _run_ended(self) -> None:
        while not self._finished:
            await self._take(0)  # no lease; but the buffer knows of this server, and tells it of the end

    async def _room(self) -> int:
        """How many more groups fit; waits until it is at least one, and something may come of it."""
        while (room := self._max_groups - len(self._held)) <= 0:
            self._freed.clear()
            await self._freed.wait()
        if silent := self._runner.silent:
            logger.warning("waiting for %s: no lease is taken until it answers", " and ".join(silent))
            await self._unless_run_ends(self._runner.answered())
            if not self._finished:
                logger.info("%s answered", " and ".join(silent))
        return room

    async def _take(self, room: int) -> list[Lease]:
        try:
            leases = await self._buffer.lease(room, LEASE_POLL_S)
            if room and self._runner.silent:
                for lease in leases:
                    await self._buffer.give_up(lease.lease_id, SILENT, requeue=True)
                return []
        except RunFinished:
            self._finished = True
            return []
        return leases

    async def _work(self, lease: Lease) -> None:
        """One lease from start to end. A group that fails is given up by name; nothing of it is trained."""
        started = self._meters.group_started()
        try:
            group = await self._runner.run(lease)
            self._delivering.add(lease.lease_id)
            kept = await self._buffer.deliver(group)
            self._meters.delivered(group, kept, started)
        except PromptRefused as refused:
            await self._give_up(lease, refused.rule, str(refused), requeue=False)
        except CompletionFailed as failure:
            await self._give_up(lease, failure.kind, str(failure), requeue=True)
        except BadMessage as refusal:  # such as a group that is larger than the buffer takes
            await self._give_up(lease, "refused_by_buffer", str(refusal), requeue=False)
        finally:
            self._meters.group_ended()
            self._delivering.discard(lease.lease_id)
        self._let_go(lease.lease_id)  # whatever else came of it leaves the lease ours, to be handed back

    async def _give_up(self, lease: Lease, reason: str, detail: str, requeue: bool) -> None:
        self._meters.failures[reason] += 1
        outcome = None
        try:
            outcome = await self._buffer.give_up(lease.lease_id, reason, requeue)
        finally:  # also when the buffer does not answer
            logger.warning("gave up prompt %s%s: %s", lease.prompt.prompt_id, _told(outcome), detail)

    def _let_go(self, lease_id: str) -> None:
        del self._held[lease_id]
        self._freed.set()

    @contextlib.asynccontextmanager
    async def _leases_kept(self, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Renew what is held; at the end cancel it and, unless the run is over, hand it back."""
        renewals = tasks.create_task(self._renew())
        try:
            yield
        finally:
            renewals.cancel()
            for task in self._held.values():
                task.cancel()
            await asyncio.gather(*self._held.values(), return_exceptions=True)
            if not self._finished:
                await self._hand_back(list(self._held))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_period_s)
            if not self._held:
                continue
            lost = await self._buffer.renew(list(self._held))
            lost = [i for i in lost if i in self._held and i not in self._delivering]
            for lease_id in lost:
                self._held[lease_id].cancel()
                self._let_go(lease_id)
            if lost:
                # Why is the buffer's to say: they ran out, or the training is over.
                self._meters.failures["lease_lost"] += len(lost)
                logger.info("the buffer took %d leases back: their groups are cancelled", len(lost))

    async def _hand_back(self, lease_ids: list[str]) -> None:
        """Let other servers have the prompts at once; a buffer that is gone will time the leases out.

        What is handed back makes room, and the buffer may grant it to what this server was asking for last.
        """
        try:
            async with asyncio.timeout(HAND_BACK_S):
                for lease_id in lease_ids:
                    await self._buffer.give_up(lease_id, "server_stopped", requeue=True)
                for lease in await self._buffer.withdraw():
                    await self._buffer.give_up(lease.lease_id, "server_stopped", requeue=True)
        except RunFinished:
            pass
        except TimeoutError:
            if lease_ids:
                logger.warning("the buffer did not answer: %d leases will time out", len(lease_ids))


def _told(outcome: GivenUp | None) -> str:
    if outcome is None:
        return ""
    if not outcome.tries:
        return ", queued again"
    if not outcome.queued:
        return f", dropped after {outcome.tries} tries" if outcome.tries == outcome.most else ", dropped"
    return f", try {outcome.tries} of {outcome.most}, queued again"
