"""The learner's side: takes members in, and brings each version to all of them.

Only the learner's global rank 0 has a Publisher; its methods are called from one thread, the one that trains.
Listening, heartbeats and collectives run on threads of their own, and every wait here has a deadline.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sync.addresses import host_of, require_loopback
from sync.buckets import combine, pack
from sync.config import SyncConfig
from sync.control import Control
from sync.errors import OutOfHandles, PublishInterrupted, TransferFailed
from sync.group import BroadcastGroup, Connecting, Seat
from sync.keys import PublisherKeys
from sync.manifest import Manifest, TensorSpec
from sync.membership import Member
from sync.report import PublishReport
from sync.sender import BucketMemory, BucketSender
from sync.shared_memory import SharedStream, place_of_this_process
from sync.wire import Abort, Meet, Prepare

logger = logging.getLogger(__name__)

OUT_OF_HANDLES_S = 1.0
"""Between two attempts of a learner that cannot open a group's connections."""


class Publisher:
    """Publishes versions to whoever joined.

    Use:
        publisher.start(); publisher.wait_for_members(1, timeout_s)
        while True:
            try:
                publisher.publish(version, specs, export())  # other ranks just run through export()
                break
            except PublishInterrupted:  # tell the other ranks to export once more
                continue
        ... train on ...
        report = publisher.wait_loaded()  # or not: the next publish does it

    A server that joined later, or was evicted and came back, lacks the version: `wants_publish()` says so,
    and publishing the same version again sends it to those only.
    """

    def __init__(
        self, config: SyncConfig, run_id: str, device: torch.device, keys: PublisherKeys | None = None
    ) -> None:
        cuda = device.type == "cuda"
        self._backend = ("nccl" if cuda else "gloo") if config.backend == "auto" else config.backend
        if self._backend == "nccl" and not cuda:
            raise ValueError("sync.backend nccl: the learner has no CUDA device; expected auto or gloo")
        self._host = require_loopback(config.address) if keys is None else host_of(config.address)
        self._timeout_s = config.transfer_timeout_s
        self._answer_timeout_s = min(config.transfer_timeout_s, config.heartbeat_timeout_s)
        self._device = device if self._backend == "nccl" else torch.device("cpu")
        self._buckets = BucketMemory((config.bucket_mib or (512 if cuda else 64)) << 20, self._device)
        self._place = place_of_this_process() if config.shared_memory and self._backend == "gloo" else ""
        self._shared: SharedStream | None = None
        """Of this epoch, if all its members can map it."""
        self._control = Control(config.address, run_id, config.heartbeat_timeout_s, keys)
        self._members = self._control.members
        self._version: int | None = None
        self._attempt = 0
        self._epoch, self._nonce = 0, ""
        self._group: BroadcastGroup | None = None
        self._seated: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._report = PublishReport(-1)
        self._sent_at = 0.0
        self._expected_checksum: int | None = None

    def start(self) -> None:
        """Listen for members.

        Raises:
            ValueError: The address cannot be listened on.
        """
        self._control.start()

    def close(self) -> None:
        """Stop listening. Members go back to waiting for a learner.

        Threads left in a collective that broke are waited for, at most the transfer timeout: the interpreter
        cannot end while one is in there.
        """
        self._control.close()
        self._group = None
        deadline = time.monotonic() + self._timeout_s + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def members(self) -> list[str]:
        with self._control.changed:
            return self._members.names()

    def counted(self) -> dict[str, float]:
        """What all servers together counted since they were first heard of, by names of `wire.COUNTED`."""
        with self._control.changed:
            return self._control.tally.sums()

    def wants_publish(self) -> bool:
        """Whether a member neither holds the newest version given to `publish` nor is just getting it.

        Raises:
            RuntimeError: The control channel came to an end by a fault.
        """
        self._control.check()
        with self._control.changed:
            if self._version is None:
                return bool(self._members.all())
            return bool(self._members.lacking(self._version))

    def wait_for_members(self, count: int, timeout_s: float) -> bool:
        """Block until so many members are there; whether they came in time."""
        return self._control.wait(lambda: len(self._members.all()) >= count, timeout_s)

    def publish(
        self, version: int, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
    ) -> PublishReport:
        """Send a version to every member that lacks it; returns when the last bucket is sent.

        Members load it in the background: `wait_loaded` has the outcome. If the publish before is not loaded
        everywhere yet, this waits for that first, so two are never in flight. With nobody to send to, the
        report has size_bytes 0.

        Args:
            specs: What `tensors` will yield, in its order.
            tensors: (Hugging Face name, tensor). It may be collective over the learner's ranks, so it is
                always run through to its end, also when nobody is there or an error is raised: the other
                ranks only have to run through theirs.

        Raises:
            PublishInterrupted: A member was lost mid-transfer. It is evicted already; publish again, with a
                new iterator, to bring the version to the survivors. One lost before or after costs nothing.
            ValueError: `tensors` and `specs` disagree.
        """
        stream = iter(tensors)
        try:
            self._end_attempt()
            self._version = version
            manifest = Manifest.layout(specs, self._buckets.bucket_bytes)
            with self._control.changed:
                holders = sorted(m.name for m in self._members.all() if m.version == version)
            self._report = PublishReport(version, holders)
            group = self._assemble(version, manifest)
            if group is not None:
                self._transfer(group, version, manifest, stream)
            with self._control.changed:
                self._report.lost += self._members.take_lost()
            return self._report
        finally:
            for _ in stream:
                pass

    def wait_loaded(self) -> PublishReport:
        """Block until every member of the last publish has loaded it, at most the transfer timeout.

        Who has not by then is evicted. A member whose transfer failed behind our back (a relay died between
        us and it) stays and lacks the version: `wants_publish()` is true then.
        """
        self._end_attempt()
        with self._control.changed:
            self._report.lost += self._members.take_lost()
        return self._report

    def _end_attempt(self) -> None:
        report, attempt = self._report, self._attempt
        done = self._control.wait(lambda: not self._members.working(attempt), self._timeout_s)
        with self._control.changed:
            if not done:
                late = self._members.working(attempt)
                self._control.evict(late, f"version {report.version} not loaded within {self._timeout_s:g} s")
            self._settle(report, self._members.of(attempt))

    def _settle(self, report: PublishReport, members: list[Member]) -> None:
        """Fill in what the members say of the attempt just ended. Called under `changed`."""
        for member in members:
            loaded = member.loaded
            if loaded is None:
                self._group = None  # broken for it, so broken
                if member.phase == "failed":
                    self._blame(member)
            elif self._expected_checksum not in (None, loaded.checksum):
                self._control.evict([member], f"version {report.version} loaded with another checksum")
            elif member.name not in report.members:
                report.members = sorted([*report.members, member.name])
                report.load_seconds = max(report.load_seconds, loaded.load_seconds)
                report.pause_seconds = max(report.pause_seconds, loaded.pause_seconds)
                report.arrival_seconds = max(report.arrival_seconds, member.loaded_at - self._sent_at)
        self._attempt += 1  # settled once; late answers are stale

    def _assemble(self, version: int, manifest: Manifest) -> BroadcastGroup | None:
        """Get everybody who lacks the version ready, in one group; None when there is nobody.

        Members that do not answer or cannot connect are evicted and the rest tried again. Who joins meanwhile
        waits for the next publish: else a server that fails and comes back could hold this one for ever.
        """
        with self._control.changed:
            here = {member.identity for member in self._members.all()}
        while True:
            with self._control.changed:
                targets = [m for m in self._members.lacking(version) if m.identity in here]
            if not targets:
                return None
            try:
                return self._try_group(targets, version, manifest)
            except OutOfHandles as failure:
                # Our own: nobody is to blame, and whoever lacks the version gets it once there are some.
                logger.warning("sync: no group for version %d: %s", version, failure)
                self._abort(str(failure), blame=False)
                self._control.wait(lambda: False, OUT_OF_HANDLES_S)
                return None
            except TransferFailed as failure:
                logger.warning("sync: no group for version %d: %s", version, failure)
                self._abort(str(failure))

    def _try_group(self, targets: list[Member], version: int, manifest: Manifest) -> BroadcastGroup:
        seated = [member.identity for member in targets]
        fits = self._shared is None or self._shared.fits(manifest)
        kept = self._group if self._seated == seated and fits else None
        if kept is None:
            self._group, self._seated = None, seated
            self._epoch, self._nonce = self._epoch + 1, secrets.token_hex(16)
            self._shared = self._share(targets, manifest)
        attempt = self._ask(targets, version, manifest, fresh=kept is None)
        connecting = None if kept is not None else self._connect(1 + sum(m.world_size for m in targets))
        self._until(lambda: not self._members.unanswered(attempt), "PREPARE not answered", attempt)
        if connecting is not None:
            self._introduce(connecting, attempt)
            self._until(connecting.settled, "the group was not connected", attempt)
            self._group = connecting.result()
        assert self._group is not None
        return self._group

    def _share(self, targets: list[Member], manifest: Manifest) -> SharedStream | None:
        """Memory for a new epoch; None where not every member can map it, or there is none to be had."""
        if not self._place or any(member.place != self._place for member in targets):
            return None
        try:
            return SharedStream(manifest.stream_bytes, manifest.bucket_bytes)
        except (OSError, ValueError) as error:
            logger.warning("sync: no memory to share (%s): versions are sent", error)
            return None

    def _ask(self, targets: list[Member], version: int, manifest: Manifest, fresh: bool) -> int:
        self._attempt += 1
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        first_rank, size = 1, 1 + sum(member.world_size for member in targets)
        memory = self._shared.path if self._shared is not None else ""
        with self._control.changed:
            self._members.asked(targets, self._attempt)
            for member in targets:
                order = Prepare(
                    self._attempt, version, self._epoch, self._nonce, fresh, first_rank, size, self._backend,
                    memory, self._timeout_s, manifest,
                )  # fmt: skip
                self._control.send([member], order)
                first_rank += member.world_size
        return self._attempt

    def _connect(self, size: int) -> Connecting:
        seat = Seat(self._host, self._epoch, self._nonce, 0, size, self._backend, self._timeout_s)
        connecting = Connecting(seat, self._device, self._control.notify)
        self._threads.append(connecting.thread)
        return connecting

    def _introduce(self, connecting: Connecting, attempt: int) -> None:
        """Tell every member how each rank of the new group is reached, and rank 0 too."""
        own = connecting.left()
        with self._control.changed:
            entries, wrong = self._members.introduce(attempt, own)
            self._control.evict(wrong, "what it said of its ranks was not as it should be")
            self._control.send(self._members.of(attempt), Meet(attempt, entries))
        connecting.bring(entries)

    def _until(self, done: Callable[[], bool], what: str, attempt: int) -> None:
        """Wait for something of an attempt.

        Raises:
            TransferFailed: A member was lost or failed meanwhile, or the deadline passed.
        """
        broken = self._watch(attempt)
        if not self._control.wait(lambda: done() or broken() is not None, self._timeout_s):
            raise TransferFailed(f"{what} within {self._timeout_s:g} s")
        with self._control.changed:
            why = broken()
        if why is not None:
            raise TransferFailed(why)

    def _watch(self, attempt: int) -> Callable[[], str | None]:
        """A look, under `changed`, at why an attempt cannot end well."""
        expected = len(self._seated)
        return lambda: self._members.trouble(attempt, expected)

    def _transfer(
        self, group: BroadcastGroup, version: int, manifest: Manifest, stream: Iterator[tuple[str, Tensor]]
    ) -> None:
        report, started, sent = self._report, time.monotonic(), False
        self._expected_checksum = None
        broken = self._watch(self._attempt)
        sender = BucketSender(
            group, self._shared or self._buckets, self._timeout_s, self._control.changed, broken
        )
        self._threads.append(sender.thread)
        sender.start(version)
        try:
            for bucket, checksum in pack(manifest, stream, sender.lend):
                sender.send(bucket, checksum)
            sender.finish()
            sent = True
        except TransferFailed as failure:
            sender.cancel()
            self._abort(str(failure))
            sent = True  # given up, in order
            with self._control.changed:
                report.lost += self._members.take_lost()
            raise PublishInterrupted(version, report.lost) from failure
        finally:
            if not sent:  # `stream` raised: its error goes on, but nobody is left waiting for buckets
                sender.cancel()
                self._abort("the learner failed")
        self._expected_checksum = combine(sender.sums)
        report.size_bytes = manifest.stream_bytes
        self._sent_at = time.monotonic()
        report.transfer_seconds = self._sent_at - started

    def _abort(self, reason: str, blame: bool = True) -> None:
        """Give an attempt up: everybody drops it, and who does not say so in time was the one that hung.

        Where nobody hung, whoever may be to blame is blamed a little, unless `blame` is false.
        """
        attempt = self._attempt
        if self._group is not None:
            self._group.abort()
            self._group = None
        with self._control.changed:
            members = [m for m in self._members.of(attempt) if m.phase != "loaded"]
            self._control.send(members, Abort(attempt, reason))
        self._control.wait(lambda: not self._members.undropped(attempt), self._answer_timeout_s)
        with self._control.changed:
            stuck = self._members.undropped(attempt)
            self._control.evict(stuck, f"no answer to ABORT within {self._answer_timeout_s:g} s ({reason})")
            for member in self._members.suspects(attempt, len(self._seated)) if blame else ():
                self._blame(member)

    def _blame(self, member: Member) -> None:
        if member.phase != "loaded" and self._members.count_failed_transfer(member):
            self._control.evict([member], f"transfers to it keep failing ({member.failure or 'timed out'})")
