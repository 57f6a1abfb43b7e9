"""The staleness rules: who may be leased, who is too old, whose turn cannot wait. Pure; `docs/staleness.md`
proves them.

v is the published policy version, B = groups_per_batch, S = max_staleness. A group that trains in batch i
meets the learner at version i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["fifo", "freshest", "priority", "uniform"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a batch is made of, and how far generation may run ahead of it."""

    groups_per_batch: int
    max_staleness: int
    policy: Policy = "fifo"
    max_uses: int = 1
    """Batches that a group may be in."""

    @property
    def keeps_turns(self) -> bool:
        """Whether a batch leaves room, and waits, for every group that a later one could not train."""
        return self.policy != "freshest"

    @property
    def ahead(self) -> int:
        """Versions that generation may run ahead: S, or half of it, rounded up, under a policy that passes
        groups over. The other half is how long it can pass over one."""
        chooses = self.policy in ("priority", "uniform")
        return (self.max_staleness + 1) // 2 if chooses else self.max_staleness

    @property
    def fresh(self) -> int:
        """Groups of each batch that are to be trained for the first time: B, or ⌈B / max_uses⌉."""
        return -(-self.groups_per_batch // self.max_uses)

    @property
    def window(self) -> int:
        """Groups leased, or stored and not trained yet, at most."""
        return (self.ahead + 1) * self.fresh

    @property
    def kept(self) -> int:
        """Groups stored for another use at most."""
        return (self.max_staleness + 1) * self.groups_per_batch if self.max_uses > 1 else 0


@dataclass(frozen=True, slots=True)
class Stock:
    """What admission counts: training groups only."""

    leased: int
    stored: int
    """Delivered, and in no batch yet."""
    assembled: int
    """Batches ever assembled, also before a restart: the frontier."""
    published: int | None
    """Newest version that every live server has loaded; None before the first publish."""
    kept: int = 0
    """In a batch already, and stored for another one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored group, as far as the choice of the next batch goes."""

    sequence: int
    turn: int
    """Order of its lease."""
    oldest_version: int
    """Oldest version among its trained tokens."""
    uses: int = 0
    """Batches it is in."""
    priority: float = 0.0


def admissible(stock: Stock, rules: Rules, capacity: int) -> int:
    """How many more groups may be leased now.

    With a = ahead and f = fresh it keeps leased + stored + f · assembled ≤ (a + v + 1) · f, and
    leased + stored + kept ≤ capacity. Nothing before version 0 is published: there is no policy to sample
    from.
    """
    if stock.published is None:
        return 0
    in_flight = stock.leased + stock.stored
    paced = (rules.ahead + stock.published + 1 - stock.assembled) * rules.fresh - in_flight
    return max(0, min(paced, capacity - in_flight - stock.kept))


def oldest_trainable(index: int, max_staleness: int) -> int:
    """The oldest version that batch `index` may train: index − oldest ≤ S."""
    return index - max_staleness


def owed(last_batches: Sequence[int], index: int, groups_per_batch: int) -> Iterator[tuple[int, int]]:
    """What batch `index` must take so that later ones can hold the rest.

    Args:
        last_batches: Of every group in flight, ready or not, the last batch that may train it; ascending.

    Yields:
        A batch d and a number, d ascending: so many of the groups with a last batch up to d, of which the
        batches index + 1 … d cannot hold more than (d − index) · B. Never more than B.
    """
    counts = {last: count for count, last in enumerate(last_batches, start=1)}
    for last, count in counts.items():
        number = count - (last - index) * groups_per_batch
        if number > 0:
            yield last, min(number, groups_per_batch)


def shard(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Positions of groups for each of `size` data-parallel ranks, balanced by tokens, longest first.

    The same tokens and size always give the same shards. Within a shard the batch's order is kept.
    """
    shards: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for position in sorted(range(len(tokens)), key=lambda p: (-tokens[p], p)):
        lightest = min(range(size), key=lambda r: (loads[r], len(shards[r]), r))
        shards[lightest].append(position)
        loads[lightest] += tokens[position]
    return [sorted(s) for s in shards]
