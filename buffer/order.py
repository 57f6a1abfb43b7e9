"""Which row comes at which draw: shares of stages, the shuffle of every pass, the blend of several sources.

Everything is a function of the seed and the draw's number, so that a place is one integer and any
continuation is exact. Held in memory: at most two row numbers (4 bytes each) a row.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from buffer.examples import Stage

SHARES: dict[Stage, int] = {"sft": 0, "reward": 1, "dpo": 1, "rl": 2}
"""Which number of `data.split` is whose. The reward model and DPO both train on preferences, and a pipeline
has one of them."""
SPLIT_SEED = 20_240_229
BLEND_SEED = 7_919
LONGEST_CYCLE = 10_000
"""Draws of a blend's cycle at most; weights that need more are rounded to it."""


class Draw(NamedTuple):
    source: int
    lap: int
    """Passes over that source before this one."""
    row: int
    """Of the source's table."""


def parse_split(text: str) -> tuple[float, ...]:
    """The shares of SFT, of the reward model or DPO, and of RL.

    Raises:
        ValueError: Not three numbers from 0 up.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(
            f'expected the shares of SFT, reward model or DPO, and RL, as in "2,4,4" (20, 40 and 40 %), '
            f"got {text!r}"
        )
    return shares


def share(rows: int, split: str | None, stage: Stage) -> np.ndarray | None:
    """The row numbers that a stage's part of a source holds, in the source's order; None for all of them.

    Every row belongs to exactly one of the three shares. The run's seed has no part in it: stages of
    different seeds still share nothing.
    """
    if split is None:
        return None
    shares = parse_split(split)
    bounds = [round(rows * sum(shares[:i]) / sum(shares)) for i in range(4)]
    order = _permutation(rows, [SPLIT_SEED])
    part = SHARES[stage]
    return np.sort(order[bounds[part] : bounds[part + 1]])


class Order:
    """The draws of a run, in order.

    Args:
        sizes: Rows of every source, at least one each.
        weights: Of every source in the blend; None for a single source.
        epochs: None goes round for ever. An epoch is as many draws as there are rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        seed: int,
        shuffle: bool,
        epochs: int | None,
    ) -> None:
        self.total = sum(sizes)
        self._epochs = epochs
        self._sizes = list(sizes)
        self._seed = seed % 2**32
        self._shuffle = shuffle
        self._counts = None if weights is None else cycle_counts(weights)
        self._cycle: tuple[int, np.ndarray] = (-1, np.empty(0, np.uint32))
        self._passes: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def name(self) -> str:
        """Of two orders of the same rows the same only if they are."""
        if self._counts is None and not self._shuffle:
            return "as the rows stand"
        return f"{'shuffled' if self._shuffle else 'blended'} with seed {self._seed}"

    def at(self, draw: int) -> Draw | None:
        """The `draw`-th draw, from 0; None past the last epoch."""
        if self._epochs is not None and draw >= self._epochs * self.total:
            return None
        if self._counts is None:
            lap, place = divmod(draw, self.total)
            return Draw(0, lap, self._shuffled(0, self.total, lap, place))
        cycle, place = divmod(draw, sum(self._counts))
        if self._cycle[0] != cycle:
            slots = np.repeat(np.arange(len(self._counts)), self._counts)
            np.random.RandomState([self._seed, BLEND_SEED, cycle]).shuffle(slots)
            self._cycle = (cycle, slots)
        slots = self._cycle[1]
        source = int(slots[place])
        drawn = cycle * self._counts[source] + int(np.count_nonzero(slots[:place] == source))
        lap, place = divmod(drawn, self._sizes[source])
        return Draw(source, lap, self._shuffled(source, self._sizes[source], lap, place))

    def _shuffled(self, source: int, rows: int, lap: int, place: int) -> int:
        if not self._shuffle:
            return place
        if self._passes.get(source, (-1,))[0] != lap:
            keys = [self._seed, lap, source] if source else [self._seed, lap]
            self._passes[source] = (lap, _permutation(rows, keys))
        return int(self._passes[source][1][place])


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """How many draws of a cycle each source gets: the weights as the smallest whole numbers, or, where these
    sum to more than `LONGEST_CYCLE`, rounded to it by largest remainder (at least one each)."""
    exact = [Fraction(str(w)) for w in weights]
    total = sum(exact)
    scale = np.lcm.reduce([(w / total).denominator for w in exact], dtype=object)
    if scale <= LONGEST_CYCLE:
        return [int(w / total * scale) for w in exact]
    ideal = [w / total * LONGEST_CYCLE for w in exact]
    counts = [max(1, int(i)) for i in ideal]
    for source in sorted(range(len(ideal)), key=lambda k: counts[k] - ideal[k]):
        if sum(counts) >= LONGEST_CYCLE:
            break
        counts[source] += 1
    return counts


def _permutation(rows: int, keys: list[int]) -> np.ndarray:
    # RandomState's streams are frozen by numpy's compatibility policy (NEP 19): an upgrade in the middle of a
    # run keeps the order. Its shuffle does not depend on the width of what it shuffles.
    order = np.arange(rows, dtype=np.uint32 if rows < 2**32 else np.uint64)
    np.random.RandomState(keys).shuffle(order)
    return order
