"""A `WeightSink` over vLLM's AsyncLLM: drives the plugin in its workers from the front process."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgpack
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from sync.errors import BY_CAUSE, EngineLost, LoadFailed, SyncError, TransferFailed
from sync.sink import OnUpdate, StagePlan
from sync.vllm_plugin import BACKEND
from sync.wire import Entries

logger = logging.getLogger(__name__)

T_ = TypeVar("T_")

POLL_S = 0.02
"""Between two looks at how far the workers are; each look costs the engine a fraction of a millisecond."""

LEFT_S = 0.002
"""The same, while a group is built: all its members wait for what the ranks leave, which is soon there."""

ALIVE_S = 0.5
"""How often a call that takes long looks whether the engine lives."""

CALL_TIMEOUT_S = 120.0
"""For a call that the engine answers between two of its steps."""


def engine_options() -> dict[str, Any]:
    """What AsyncEngineArgs needs so that an engine takes published weights."""
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "sync.vllm_plugin.StagingExtension",
    }


class VllmSink:
    """Weights into one AsyncLLM made with `engine_options()`; each of its ranks receives.

    Args:
        engine: The one.
        on_update: What becomes of running requests. Aborted ones end with the finish reason `abort`.
    """

    def __init__(self, engine: AsyncLLM, on_update: OnUpdate = "keep") -> None:
        parallel = engine.vllm_config.parallel_config
        if parallel.data_parallel_size != 1:
            raise ValueError("engine: data_parallel_size is not 1; expected one server for each replica")
        self._engine = engine
        self._world_size: int = parallel.world_size
        self._on_update: OnUpdate = on_update
        self._resumable = True

    @property
    def world_size(self) -> int:
        return self._world_size

    async def stage(self, plan: StagePlan) -> int:
        """As `WeightSink.stage`. Each rank stages on a thread of its own; this looks how far they are."""
        order = {
            "version": plan.version, "epoch": plan.epoch, "nonce": plan.nonce, "fresh": plan.fresh,
            "host": plan.host, "first_rank": plan.first_rank, "group_size": plan.group_size,
            "backend": plan.backend, "memory": plan.memory, "timeout_s": plan.timeout_s,
            "manifest": msgpack.packb(plan.manifest.to_wire()),
        }  # fmt: skip
        request = WeightTransferInitRequest(init_info=order)
        await self._call(self._engine.init_weight_transfer_engine(request), TransferFailed)
        entries = await plan.accepted(await self._left())
        if entries:
            await self._call(self._engine.collective_rpc("staging_bring", args=(entries,)), TransferFailed)
        progress, deadline = -1, 0.0
        while True:
            ranks = await self._status()
            _raise_failure(ranks)
            if all(status["state"] == "staged" for status in ranks):
                return _same_checksum(ranks)
            buckets = sum(int(status["buckets"]) for status in ranks)
            if buckets != progress:
                progress, deadline = buckets, time.monotonic() + 2 * plan.timeout_s
            if time.monotonic() > deadline:  # after the ranks' own, which know more of what went wrong
                raise TransferFailed(f"no bucket arrived within {2 * plan.timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _left(self) -> Entries:
        """What the ranks left for the others of a group that is to be built, once all of them have."""
        while True:
            ranks = await self._status()
            _raise_failure(ranks)
            left = [status["left"] for status in ranks]
            if None not in left:
                return {key: entry for entries in left for key, entry in entries.items()}
            await asyncio.sleep(LEFT_S)

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        """As `WeightSink.load`.

        If the load breaks off half-way the ranks may hold a mixture of two versions. The engine then stays
        paused until another load succeeds: its tokens would carry a version that they are not of.
        """
        for rank, status in enumerate(await self._status()):
            if (status["state"], status.get("version")) != ("staged", version):
                raise LoadFailed(f"rank {rank}: version {version} is not staged: {status}")
        try:
            await self._pause()
            paused = time.perf_counter()
            await self._replace_weights(version)
            if self._on_update == "recompute":
                await self._call(self._engine.reset_prefix_cache(reset_running_requests=True), LoadFailed)
            loaded()
        finally:
            if self._resumable:
                await self._call(self._engine.resume_generation(), LoadFailed)
        return time.perf_counter() - paused

    async def drop(self) -> None:
        await self._call(self._engine.shutdown_weight_transfer_engine(), TransferFailed)

    async def _pause(self) -> None:
        """Returns when the step under way has ended: until then tokens are made."""
        # Aborted requests leave nothing that anybody goes on with; the others' cache must not be cleared.
        abort = self._on_update == "abort"
        pause = self._engine.pause_generation(mode="abort" if abort else "keep", clear_cache=abort)
        await self._call(pause, LoadFailed)

    async def _replace_weights(self, version: int) -> None:
        update = WeightTransferUpdateRequest(update_info={"version": version})
        await self._call(self._engine.start_weight_update(), LoadFailed)
        self._resumable = False
        try:
            await self._call(self._engine.update_weights(update), LoadFailed)
            await self._call(self._engine.finish_weight_update(str(version)), LoadFailed)
        except LoadFailed:
            await self._end_session()
            raise
        self._resumable = True

    async def _end_session(self) -> None:
        """A rank whose update did not fail still has its session open, and would refuse the next one."""
        try:
            await self._call(self._engine.finish_weight_update(), LoadFailed)
        except LoadFailed as error:  # the ranks whose update did fail have none to finish
            logger.debug("sync: %s", error)

    async def _status(self) -> list[dict[str, Any]]:
        return await self._call(self._engine.collective_rpc("staging_status"), TransferFailed)

    async def _call(self, call: Awaitable[T_], failure: type[SyncError]) -> T_:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._while_alive(call)
        except EngineLost:
            raise
        except EngineDeadError as error:
            raise EngineLost(str(error)) from error
        except TimeoutError:
            raise failure(f"the engine did not answer within {CALL_TIMEOUT_S:g} s") from None
        except Exception as error:  # vLLM raises Exception itself for whatever went wrong in a worker
            raise failure(f"the engine: {error}") from error

    async def _while_alive(self, call: Awaitable[T_]) -> T_:
        """The call's result. vLLM leaves calls without an answer when its core dies."""
        work = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([work], timeout=ALIVE_S))[0]:
                if self._engine.errored:
                    raise EngineLost(str(self._engine.dead_error))
            return work.result()
        finally:
            work.cancel()


def _raise_failure(ranks: list[dict[str, Any]]) -> None:
    for rank, status in enumerate(ranks):
        if status["state"] not in ("receiving", "staged"):
            failure = BY_CAUSE.get(str(status.get("cause")), TransferFailed)
            raise failure(f"rank {rank}: {status.get('reason', 'nothing is being staged')}")


def _same_checksum(ranks: list[dict[str, Any]]) -> int:
    (checksum,) = {
        int(status["checksum"]) for status in ranks
    }  # each rank compared its own with the sender's
    return checksum
