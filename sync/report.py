"""What a publish tells the learner. No torch."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class PublishReport:
    """What one version's publish came to. Times are this process's clock, in seconds."""

    version: int
    members: list[str] = field(default_factory=list)
    """Who has loaded it."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of every member evicted or gone since the publish before."""
    size_bytes: int = 0
    transfer_seconds: float = 0.0
    """From the first bucket to the last one sent: how long the learner was held."""
    load_seconds: float = 0.0
    """Slowest member's, from staged to generating again."""
    arrival_seconds: float = 0.0
    """From the last bucket sent until the slowest member said that it generates with the version: what is
    left of staging, preparing included, and its load."""
    pause_seconds: float = 0.0
    """Longest time that a server did not generate because of this publish."""
