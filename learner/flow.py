"""A training job in a few verbs. The main loop is written in them (`learner/loop.py`), and so is one's own.

Every verb is collective: all ranks call the same ones in the same order.
"""

from collections.abc import Iterator

from buffer.records import Batch
from buffer.stacks import Stillness
from learner.checkpoint import Checkpoints
from learner.config import LearnerExperiment
from learner.feed import Command, Feed
from learner.metrics import StepReport
from learner.optimizer import Trainable
from learner.publishing import Publishing
from learner.reporting import Reporter
from learner.schedule import CheckpointSchedule
from learner.step import Updater
from learner.stop import StopFlag


class LoopMistake(ValueError):
    """A loop of the user's calls the verbs in an order that trains nothing anybody gets."""


class Flow:
    """Of one process, for as long as it trains. Made by `learner/service.py`."""

    def __init__(
        self,
        experiment: LearnerExperiment,
        trainable: Trainable,
        updater: Updater,
        feed: Feed,
        publishing: Publishing,
        checkpoints: Checkpoints,
        reporter: Reporter,
        stop: StopFlag,
        version: int,
    ) -> None:
        """Args:
        version: Where the run starts or resumes.
        """
        self.experiment = experiment
        self._start = version
        self.version = version
        """Of the policy as it is published; batch `version` is the next one."""
        self.trainable = trainable
        self.updater = updater
        self._feed = feed
        self._publishing = publishing
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._stop = stop
        self._schedule = CheckpointSchedule(experiment.learner.checkpoint)
        self._stillness = Stillness(experiment.logging.stalled_s)
        self._saved = version
        self._unpublished = False
        """Whether something was trained since the last version."""
        self._frontier = 0
        self.interrupted = False
        """Whether the batches ended because of a signal."""
        self.data_ended = False
        """Whether they ended because `data.epochs` of the data are used up."""

    @property
    def steps(self) -> int:
        """Policy versions to make."""
        return self.experiment.learner.steps

    def open(self) -> None:
        """Bring the policy to the servers, unless they hold a later one: of the batches that the buffer
        assembled before a restart, this trains again what its checkpoint lacks."""
        self._stillness.see("opening")
        e = self.experiment
        frontier = self._feed.frontier(e.buffer.max_staleness, e.rollout.sampling.temperature)
        if frontier is None:
            self.interrupted = True
            return
        self._frontier = frontier
        self._feed.committed(self._checkpoints.safe_step())
        if self.version >= self._frontier:
            self._send()

    def batches(self) -> Iterator[Batch]:
        """This rank's shard of each next batch, until `learner.steps` versions are made, the data is used up,
        or a signal comes.

        Raises:
            NoBatch: None came for `learner.batch_timeout_s`.
            LoopMistake: The batch before was not published, or more than once.
        """
        while self.version < self.steps and not self.interrupted:
            self._stillness.see(self.version)
            with self._reporter.timed("wait_batch"):
                command, shard = self._feed.next(self.version, self._wanted)
            if command in (Command.STOP, Command.DONE):
                self.interrupted, self.data_ended = command is Command.STOP, command is Command.DONE
                return
            if shard is None:
                self._publishing.publish(self.version)
                continue
            yield shard
            self._check_published(shard.index)

    def _check_published(self, index: int) -> None:
        times = self.version - index
        if times != 1:
            found = f"published batch {index} {times} times" if times else f"did not publish batch {index}"
            raise LoopMistake(
                f"{self._loop} {found} before it asked for the next one; expected one flow.publish() for "
                "each batch of flow.batches() (docs/custom.md)"
            )

    @property
    def _loop(self) -> str:
        return f"learner.loop={self.experiment.learner.loop}"

    def check_returned(self) -> None:
        """Whether a loop that returned has made something of what it was there for.

        Raises:
            LoopMistake: It trained on its last batch without publishing it, or published nothing at all.
        """
        if self.interrupted:
            return
        if self._unpublished:
            raise LoopMistake(
                f"{self._loop} returned after it trained on batch {self.version} and before it published it; "
                "expected one flow.publish() for each batch of flow.batches() (docs/custom.md)"
            )
        if self.version == self._start < self.steps and not self.data_ended:
            raise LoopMistake(
                f"{self._loop} returned after version {self.version} of {self.steps} without making another; "
                "expected it to go through flow.batches() (docs/custom.md)"
            )

    def update(self, batch: Batch) -> StepReport:
        """Train on the batch as `learner.algorithm` says: `learner.updates_per_batch` optimizer steps.

        It may be called several times for a batch, or with another one made of it: with other rewards, or
        with fewer groups, down to none on some ranks.

        Raises:
            ValueError: A reward or logprob that is not finite, or a malformed trajectory, with its place.
        """
        report = self.updater.update(batch)
        self._unpublished = True
        return report

    def publish(self) -> None:
        """Make the next version of what was trained, and send it to every server; they load it in the
        background, while this trains on."""
        self.version += 1
        self._unpublished = False
        if self.version >= self._frontier:
            with self._reporter.timed("wait_loaded"):
                self._publishing.settle()
            self._send()

    def save_due(self) -> bool:
        """Whether `learner.checkpoint` wants one of this version."""
        return self._schedule.is_due(self.version, last=self.version == self.steps)

    def save(self) -> None:
        """Checkpoint, and let the buffer forget what no resume can ask for any more."""
        with self._reporter.timed("checkpoint"):
            updater = self.updater
            self._checkpoints.save(self.version, self.trainable, updater.position(), updater.value_state)
            self._feed.committed(self._checkpoints.safe_step())
            self._saved = self.version
            self._schedule.saved()

    def report(self, batch: Batch, report: StepReport, **numbers: float) -> None:
        """Write the step's line of metrics, with more numbers of one's own."""
        self._reporter.write(self.version, batch, report, self._publishing.last, numbers)

    def abandon(self) -> None:
        """The batches ended within one: what was trained of it is of no version."""
        self.interrupted = True

    def close(self) -> None:
        """See to it that a checkpoint holds the last version, unless the weights are another already."""
        self._stillness.see("closing")
        if self._saved != self.version and not self._unpublished:
            self.save()
        self._stillness.end()

    def finish(self) -> bool:
        """Tell the buffer that the last version is out, and stay for servers that join during its evaluation.

        Consumes: nothing.
        Waits for: the buffer's word that the run is over.
        Unblocked by: the last evaluation, a server that joins, a signal, or `learner.batch_timeout_s`.

        Returns:
            Whether the run is over; not after a signal.
        """
        self._publishing.settle()
        over = self._feed.finished(self.version)
        while (command := self._feed.over(over, self._wanted)) is Command.PUBLISH:
            self._publishing.publish(self.version)
        self._publishing.settle()
        return command is not Command.STOP

    def _send(self) -> None:
        """Publish; the first time there may be nobody yet, and a signal may come meanwhile."""
        first = self._publishing.is_first
        with self._reporter.timed("first_publish" if first else "publish"):
            if first and not self._publishing.await_member(lambda: self._stop.is_set):
                self.interrupted = True
            else:
                self._publishing.publish(self.version)

    def _wanted(self) -> Command:
        """What goes before waiting, on rank 0."""
        if self._stop.is_set:
            return Command.STOP
        return Command.PUBLISH if self._publishing.wanted() else Command.WAIT
