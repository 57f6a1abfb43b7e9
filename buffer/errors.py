"""The answers that are not results: each crosses the wire by its `kind` and is raised again at the client."""

from typing import ClassVar


class Refusal(Exception):
    """The buffer understood and says no. Never the end of the service."""

    kind: ClassVar[str] = "refused"


class RunFinished(Refusal):
    """The learner made its last step and the final evaluation is in: nothing will be leased any more."""

    kind = "run_finished"


class DataExhausted(Refusal):
    """The epochs are used up and no full batch can ever come."""

    kind = "data_exhausted"


class BadMessage(Refusal, ValueError):
    """A field is missing, of the wrong type or out of range; the text names it."""

    kind = "bad_message"


class WrongRun(Refusal, ValueError):
    """The peer speaks another schema or belongs to another run."""

    kind = "wrong_run"


class BatchForgotten(Refusal, ValueError):
    """A checkpoint that holds this batch's effect was confirmed, and its groups were deleted."""

    kind = "batch_forgotten"


class Unreachable(TimeoutError):
    """No answer from the service within the call's deadline."""


class DiskFailed(ValueError):
    """The run folder cannot be written: it is full, or gone."""


class StoreDamaged(ValueError):
    """The buffer's database is not what was written."""


class Fruitless(ValueError):
    """Prompt after prompt is given up, and no group comes, or none that may be trained."""


class FolderInUse(ValueError):
    """The run folder belongs to another live buffer, or learner."""


class AddressTaken(ValueError):
    """Somebody else listens where a service was told to."""


KINDS: dict[str, type[Refusal]] = {
    c.kind: c for c in (Refusal, RunFinished, DataExhausted, BadMessage, WrongRun, BatchForgotten)
}
