"""Batches from the buffer to the ranks, and what rank 0 decides while it waits for one.

    buffer ──batch(index, dp_rank, dp_size)──▶ source rank of each model copy ──raw bytes──▶ its other ranks

The asyncio client lives on a thread of its own (`learner/line.py`), so that a slow buffer never holds up a
collective.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from buffer.bounds import Bounds
from buffer.errors import BadMessage, DataExhausted, Refusal
from buffer.fields import pack, unpack
from buffer.groups import decode_group, encode_group
from buffer.records import Batch, Group
from buffer.stacks import ACHIEVED
from learner import collectives, parallel
from learner.line import Line, done_within
from learner.parts import untrained

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.2
"""How often waiting ranks are told that the wait goes on."""
REQUEST_S = 2.0
"""How long one question for a batch stays with the buffer."""

FIRST_WORD_S = 30.0
"""A wait this long is worth a line in the log; the next one after twice the time, and so on."""

SAID = ("published", "frontier", "leased", "stored", "overdue", "eval_leased", "evicted")
"""Of the buffer's status: what a batch may be waiting for."""

OVER_POLL_S = 0.5
"""How often the buffer is asked whether the run is over; it stays a few seconds after that."""


class BatchSource(Protocol):
    """What the learner asks of the buffer; `buffer.client.BufferClient` on the wire."""

    async def batch(self, index: int, dp_rank: int, dp_size: int, timeout_s: float) -> Batch | None: ...
    async def published(self, version: int) -> None: ...
    async def committed(self, index: int) -> None: ...
    async def finished(self, version: int) -> None: ...
    async def status(self) -> dict[str, Any]: ...


class Command(enum.IntEnum):
    """What all ranks do next; decided on global rank 0."""

    WAIT = 0
    TRAIN = 1
    PUBLISH = 2
    STOP = 3
    DONE = 4


class NoBatch(RuntimeError):
    """No batch came within the deadline, or none can ever come."""


BufferLine = Line[BatchSource]


class Feed:
    """Hands every rank its shard, and every rank the same command. All but `finished` is collective."""

    def __init__(
        self,
        line: BufferLine | None,
        timeout_s: float,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
    ) -> None:
        """Args:
        line: On source ranks (the first of each model copy); None elsewhere.
        timeout_s: No batch for this long, in which nothing is achieved either, is an error.
        bounds: Of groups. The buffer keeps to them too, where it has the model's folder.
        """
        self._line = line
        self._timeout_s = timeout_s
        self._bounds = bounds
        self._denied_s = 0.0
        """For how long the buffer has said that it is not there yet, while nothing was achieved. Its silence
        does not count, which ends nobody, nor does time in which this process was stopped."""
        self._achieved: tuple[object, ...] = ()
        self._told: Future[dict[str, Any]] | None = None
        self._wasted = self._wasted_before = 0
        """Tokens by the buffer's count: as far as it has told, and at the last call of `wasted`."""

    def next(self, index: int, wanted: Callable[[], Command]) -> tuple[Command, Batch | None]:
        """Wait for the shard of batch `index` (TRAIN), or for something else to do.

        Args:
            index: Of the batch.
            wanted: Asked on global rank 0 while it waits: WAIT, or a command that goes first.

        Returns:
            The command, DONE when the data is used up; the shard with TRAIN only.

        Raises:
            NoBatch: Nothing within the deadline.
        """
        asked = self._ask(index) if parallel.rank() == 0 else None
        command = self._wait(asked, wanted, f"no batch {index}")
        if command is Command.TRAIN:
            self._ask_wasted()
            return self._shard(index, asked, wanted)
        if asked is not None:
            asked.cancel()
        return command, None

    def frontier(self, max_staleness: int, temperature: float) -> int | None:
        """Batches that the buffer has assembled so far; None when the job is to stop before it answers.

        Args:
            max_staleness: By which this job's corrections were chosen and checked.
            temperature: That its logprobs are at.

        Raises:
            ValueError: The buffer keeps to others.
        """
        status = self._tell("status", lambda buffer: buffer.status())
        mine = {"buffer.max_staleness": max_staleness, "rollout.sampling.temperature": temperature}
        for key, value in mine.items():
            theirs = value if status is None else status[key.rpartition(".")[2]]
            if theirs != value:
                raise ValueError(
                    f"{key}={value} here, and the buffer was started with {theirs}; start both with the same"
                )
        self._wasted = self._wasted_before = 0 if status is None else int(status["wasted_tokens"])
        known = -1 if status is None else int(status["frontier"])
        told = collectives.broadcast_numbers([known])[0]
        return None if told < 0 else told

    def wasted(self) -> int:
        """Tokens since the last call, or since `frontier`, of groups that the buffer has for no batch; on
        global rank 0, and as far as it has told."""
        if self._told is not None and self._told.done():
            if not self._told.cancelled() and self._told.exception() is None:
                self._wasted = int(self._told.result()["wasted_tokens"])
            self._told = None
        wasted, self._wasted_before = self._wasted - self._wasted_before, self._wasted
        return wasted

    def _ask_wasted(self) -> None:
        """Nobody waits for the answer: it is for the row of the step that begins."""
        if parallel.rank() == 0 and self._line is not None and self._told is None:
            self._told = self._line.ask(lambda buffer: buffer.status())

    def committed(self, index: int) -> None:
        """Let the buffer forget the batches below `index`."""
        what = f"batches below {index} are in a checkpoint"
        self._tell(what, lambda buffer: buffer.committed(index))

    def _tell(self, what: str, question: Callable[[BatchSource], Coroutine[Any, Any, T]]) -> T | None:
        """The answer on global rank 0; None elsewhere, and when the job is to stop before it comes."""
        telling = None
        if parallel.rank() == 0 and self._line is not None:
            telling = self._line.telling(what, question)
        collectives.wait_on_first(lambda: telling is None or telling.over_within(TICK_S))
        return None if telling is None else telling.answer()

    def finished(self, version: int) -> "Future[None] | None":
        """Start telling the buffer that the last version is out; done when its last evaluation is."""
        if parallel.rank() != 0 or self._line is None:
            return None

        async def question(buffer: BatchSource) -> None:
            await buffer.finished(version)
            while not (status := await buffer.status())["over"]:
                self._denied(status, OVER_POLL_S)
                await asyncio.sleep(OVER_POLL_S)

        return self._line.ask(question)

    def over(self, finished: "Future[None] | None", wanted: Callable[[], Command]) -> Command:
        """Wait for the end that `finished` tells of (TRAIN or DONE), or for something else to do."""
        return self._wait(finished, wanted, "no end of the last evaluation")

    def _wait(self, asked: "Future[Any] | None", wanted: Callable[[], Command], what: str) -> Command:
        """What global rank 0 decides, on all ranks; `asked` is what it waits for, TRAIN once there."""
        started, word_s, self._denied_s = time.monotonic(), FIRST_WORD_S, 0.0
        while True:
            command = Command.WAIT if asked is None else self._decide(asked, wanted, what)
            if asked is not None and time.monotonic() - started > word_s and command is Command.WAIT:
                logger.info("%s for %.0f s: %s", what, word_s, self._diagnosis())
                word_s *= 2
            # The others are told of every tick, so that a long wait never looks like a dead rank 0.
            command = Command(collectives.broadcast_numbers([command])[0])
            if command is not Command.WAIT:
                return command

    def _decide(self, asked: "Future[Any]", wanted: Callable[[], Command], what: str) -> Command:
        command = wanted()
        if command is not Command.WAIT:
            return command
        if done_within(asked, TICK_S):
            error = asked.exception()
            if isinstance(error, DataExhausted):
                logger.info("the data is used up: %s", error)
                return Command.DONE
            _raise_as_no_batch(error, what)
            return Command.TRAIN
        if self._denied_s > self._timeout_s:
            limit = f"{self._timeout_s:.0f} s (learner.batch_timeout_s)"
            raise NoBatch(f"{what} for {limit}: {self._diagnosis()}")
        return Command.WAIT

    def _diagnosis(self) -> str:
        assert self._line is not None
        status = self._line.ask(lambda buffer: buffer.status())
        if not done_within(status, 5.0) or status.exception() is not None:
            return "the buffer does not answer; is it running at buffer.address?"
        told = status.result()
        facts = ", ".join(f"{key} {told[key]}" for key in SAID if key in told)
        return f"rollout servers: {', '.join(told.get('servers', [])) or 'none'}; the buffer says {facts}"

    def _ask(self, index: int) -> "Future[Batch]":
        assert self._line is not None

        async def question(buffer: BatchSource) -> Batch:
            while True:
                asked_at = time.monotonic()
                batch = await buffer.batch(index, parallel.dp_rank(), parallel.dp_size(), REQUEST_S)
                if batch is not None:
                    return batch
                denied_s = min(time.monotonic() - asked_at, REQUEST_S)
                self._denied(await buffer.status(), denied_s)

        return self._line.ask(question)

    def _denied(self, status: dict[str, Any], seconds: float) -> None:
        """A batch of long completions, or an evaluation, may well take longer than servers that are gone."""
        achieved = tuple(status.get(key) for key in ACHIEVED)
        self._denied_s = self._denied_s + seconds if achieved == self._achieved else 0.0
        self._achieved = achieved

    def _shard(
        self, index: int, asked: "Future[Batch] | None", wanted: Callable[[], Command]
    ) -> tuple[Command, Batch | None]:
        """TRAIN with this rank's shard, or STOP: of a batch that not all ranks have nothing is trained."""
        frames = future = None
        if self._line is not None:
            # The batch is assembled by now: rank 0 has its shard of it.
            future = asked or self._ask(index)
        started, word_s = time.monotonic(), FIRST_WORD_S
        # Nobody goes on alone: who waited in training for a rank that has no shard yet would wait too long
        # where the buffer is gone meanwhile.
        while True:
            lacks = future is not None and not done_within(future, TICK_S)
            stops = parallel.rank() == 0 and wanted() is Command.STOP
            lacking, stopping = collectives.max_over_world([lacks, stops])
            if not lacking:
                break
            if stopping:
                if future is not None:
                    future.cancel()
                return Command.STOP, None
            if self._denied_s > self._timeout_s:
                raise NoBatch(f"rank {parallel.rank()}: its shard of batch {index} did not come")
            if time.monotonic() - started > word_s:
                if lacks:
                    logger.info("no shard of batch %d for %.0f s: %s", index, word_s, self._diagnosis())
                word_s *= 2
        if future is not None:
            _raise_as_no_batch(future.exception(), f"no batch {index}")
            batch = future.result()
            if parallel.tp_size() * parallel.pp_size() == 1:
                return Command.TRAIN, trainable(batch, self._bounds)
            frames = encode_batch(batch)
        source, group = parallel.model_parallel_source(), parallel.model_parallel_group()
        batch = decode_batch(collectives.broadcast_frames(frames, source, group))
        return Command.TRAIN, trainable(batch, self._bounds)


def _raise_as_no_batch(error: BaseException | None, what: str) -> None:
    if isinstance(error, Refusal):
        raise NoBatch(f"{what}: the buffer refuses it: {error}") from error
    if error is not None:
        raise error


def trainable(batch: Batch, bounds: Bounds) -> Batch:
    """The batch, with no token to train in groups that would end this job. The buffer gives the same batch
    after every restart, so that nothing else would ever get past one that it took."""
    return replace(batch, groups=tuple(_within(group, bounds) for group in batch.groups))


def _within(group: Group, bounds: Bounds) -> Group:
    try:
        bounds.check(group)
    except BadMessage as fault:
        logger.warning("nothing of group %r is trained: %s", group.group_id, fault)
        return replace(group, trajectories=tuple(untrained(t) for t in group.trajectories))
    return group


def encode_batch(batch: Batch) -> list[bytes | memoryview]:
    frames: list[bytes | memoryview] = [pack({"index": batch.index, "shares": batch.shares})]
    for group in batch.groups:
        frames.extend(encode_group(group))
    return frames


def decode_batch(frames: list[bytes]) -> Batch:
    header = unpack(frames[0], "batch")
    groups: list[Group] = [
        decode_group(meta, arrays) for meta, arrays in zip(frames[1::2], frames[2::2], strict=True)
    ]
    return Batch(header["index"], tuple(groups), header["shares"])
