"""How a publish can fail.

SyncError
├── TransferFailed       no group, or a bucket did not get through in time; blames nobody
│   ├── OutOfHandles     of this process, which cannot open the connections of a group
│   └── MemoryNotShared  a server cannot map the learner's memory; it is sent buckets from then on
├── ManifestRefused      the tensors on offer are not the server's model
├── ChecksumMismatch     a bucket arrived with other bytes than were sent
├── LoadFailed           staged weights could not be put into the engine
├── EngineLost           the engine itself is gone; the server cannot go on
├── JoinRefused          the learner will never take this server (another run, another schema)
└── PublishInterrupted   the group broke while buckets were sent; publish again
"""


class SyncError(Exception):
    """Base of everything this package raises beside ValueError."""

    cause = "transfer"
    """What a FAILED message says of it."""


class TransferFailed(SyncError):
    pass


class OutOfHandles(TransferFailed):
    cause = "handles"


class MemoryNotShared(TransferFailed):
    cause = "memory"


class ManifestRefused(SyncError):
    cause = "refused"


class ChecksumMismatch(SyncError):
    cause = "checksum"


class LoadFailed(SyncError):
    cause = "load"


class EngineLost(SyncError):
    cause = "load"


class JoinRefused(SyncError):
    pass


class PublishInterrupted(SyncError):
    """The group broke mid-transfer. Who was to blame is evicted already: publish the version again.

    Attributes:
        version: The version that did not get through to everybody.
        lost: (name, reason) of each member evicted since the publish began.
    """

    def __init__(self, version: int, lost: list[tuple[str, str]]) -> None:
        who = "; ".join(f"{name}: {reason}" for name, reason in lost) or "nobody was lost"
        super().__init__(f"publish of version {version} was interrupted ({who}); publish it again")
        self.version = version
        self.lost = lost


CAUSES = ("transfer", "handles", "memory", "refused", "checksum", "load")
BY_CAUSE: dict[str, type[SyncError]] = {
    "transfer": TransferFailed,
    "handles": OutOfHandles,
    "memory": MemoryNotShared,
    "refused": ManifestRefused,
    "checksum": ChecksumMismatch,
    "load": LoadFailed,
}
