"""The learner's main loop, the same on every rank."""

import logging
import signal
import time
from dataclasses import dataclass
from typing import Any

from learner.checkpoint import Checkpoints
from learner.config import LearnerExperiment
from learner.feed import Command, Feed
from learner.optimizer import Trainable
from learner.publishing import Publishing
from learner.reporting import Reporter
from learner.step import Updater

logger = logging.getLogger(__name__)

FORCE_AFTER_S = 3.0
"""A terminal's Ctrl-C reaches a rank twice at once, by itself and by torchrun; only a later one is meant."""


@dataclass(slots=True)
class Parts:
    """What the loop names; made by `learner/service.py`."""

    experiment: LearnerExperiment
    trainable: Trainable
    updater: Updater
    feed: Feed
    publishing: Publishing
    checkpoints: Checkpoints
    reporter: Reporter
    stop: "StopFlag"
    version: int
    """Where the run starts or resumes."""
    frontier: int
    """Batches below this were trained before the restart; the servers hold that version already."""

    def wanted(self) -> Command:
        """What goes before waiting, on rank 0."""
        if self.stop.is_set:
            return Command.STOP
        return Command.PUBLISH if self.publishing.wanted() else Command.WAIT


def train(parts: Parts) -> Command:
    """Make policy versions until there are `learner.steps` of them.

    Consumes: batch i of the buffer at version i, and makes version i + 1 of it.
    Waits for: that batch; the servers' LOADED of the version before the last.
    Unblocked by: rollout servers that deliver groups, a server that joins (it gets the current version), a
        signal, or `learner.batch_timeout_s`.

    Returns:
        STOP after a signal, otherwise DONE. A checkpoint holds the last version either way.
    """
    steps, version, saved = parts.experiment.learner.steps, parts.version, parts.version
    if version >= parts.frontier:
        with parts.reporter.timed("first_publish"):
            parts.publishing.publish(version)
    command = Command.DONE
    while version < steps:
        with parts.reporter.timed("wait_batch"):
            command, shard = parts.feed.next(version, parts.wanted)
        if command in (Command.STOP, Command.DONE):
            break
        if shard is None:
            parts.publishing.publish(version)
            continue
        report = parts.updater.update(shard)
        version += 1
        if version >= parts.frontier:
            with parts.reporter.timed("wait_loaded"):
                parts.publishing.settle()
            with parts.reporter.timed("publish"):
                parts.publishing.publish(version)
        if version % parts.experiment.learner.checkpoint.every == 0 or version == steps:
            with parts.reporter.timed("checkpoint"):
                saved = save(parts, version)
        parts.reporter.write(version, shard, report, parts.publishing.last)
    if saved != version:
        save(parts, version)
    parts.version = version
    return Command.STOP if command is Command.STOP else Command.DONE


def save(parts: Parts, version: int) -> int:
    """Checkpoint, and let the buffer forget what no resume can ask for any more."""
    updater = parts.updater
    parts.checkpoints.save(version, parts.trainable, updater.position(), updater.value_trainable)
    parts.feed.committed(parts.checkpoints.safe_step())
    return version


def finish(parts: Parts) -> None:
    """Tell the buffer that the last version is out, and stay for servers that join during its evaluation.

    Consumes: nothing.
    Waits for: the buffer's word that the run is over.
    Unblocked by: the last evaluation, a server that joins, a signal, or `learner.batch_timeout_s`.
    """
    parts.publishing.settle()
    over = parts.feed.finished(parts.version)
    while parts.feed.over(over, parts.wanted) is Command.PUBLISH:
        parts.publishing.publish(parts.version)
    parts.publishing.settle()


class StopFlag:
    """Set by the first SIGINT or SIGTERM; another one, some seconds later, ends the process at once."""

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def is_set(self) -> bool:
        return self._since is not None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.info("%s: stopping after this step, with a checkpoint", signal.Signals(number).name)
        elif now - self._since > FORCE_AFTER_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
