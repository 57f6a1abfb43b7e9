"""What the members count, summed by the publisher. Pure, as `membership.py` is."""

from collections.abc import Mapping

from sync.wire import COUNTED


class Tally:
    """Each member's counters only rise while it lives; so do the sums over all that ever came."""

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}
        """By the member's name, also of those that left: one that comes back goes on from there."""
        self._sums: dict[str, float] = dict.fromkeys(COUNTED, 0)

    def hear(self, name: str, counts: Mapping[str, float]) -> None:
        """A member's counters. At its first word it had them before anybody here listened: only what it
        counts from then on is added; the same where one fell, because the server was started again."""
        before = self._last.get(name, counts)
        if any(counts.get(key, 0.0) < value for key, value in before.items()):
            before = counts
        for key, value in counts.items():
            self._sums[key] += value - before.get(key, 0.0)
        self._last[name] = counts

    def sums(self) -> dict[str, float]:
        return dict(self._sums)
