"""The staleness rules: who may be leased, who is too old, who is trained next. Pure; `docs/staleness.md`
proves them.

v is the published policy version, B = groups_per_batch, S = max_staleness. A group that trains in batch i
meets the learner at version i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored group, as far as the choice of the next batch goes."""

    sequence: int
    turn: int
    """Order of its lease."""
    oldest_version: int
    """Oldest version among its trained tokens."""


def admissible(stock: Stock, groups_per_batch: int, max_staleness: int, capacity: int) -> int:
    """How many more groups may be leased now.

    Keeps leased + stored + B · assembled ≤ (S + v + 1) · B, and leased + stored ≤ capacity. Nothing before
    version 0 is published: there is no policy to sample from.
    """
    if stock.published is None:
        return 0
    in_flight = stock.leased + stock.stored
    paced = (max_staleness + stock.published + 1 - stock.assembled) * groups_per_batch - in_flight
    return max(0, min(paced, capacity - in_flight))


def oldest_trainable(index: int, max_staleness: int) -> int:
    """The oldest version that batch `index` may train: index − oldest ≤ S."""
    return index - max_staleness


def choose(
    candidates: Sequence[Candidate],
    count: int,
    index: int,
    max_staleness: int,
    policy: Literal["fifo", "freshest"],
) -> list[Candidate]:
    """The groups of batch `index` in training order, or [] when fewer than `count` are young enough.

    fifo takes the oldest lease first, so that a group that took long to generate is trained next instead of
    being overtaken until it is too old. freshest takes the newest versions first, of equal ones the oldest
    lease.
    """
    floor = oldest_trainable(index, max_staleness)
    young = [c for c in candidates if c.oldest_version >= floor]
    if len(young) < count:
        return []
    if policy == "fifo":
        young.sort(key=lambda c: (c.turn, c.sequence))
    else:
        young.sort(key=lambda c: (-c.oldest_version, c.turn, c.sequence))
    return young[:count]


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
