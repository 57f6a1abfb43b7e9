"""Examples for a stage of training, in order, from any source; the place is a few numbers.

What a source holds is read row by row when it is asked for. A restart seeks the exact row.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer.adapters import Adapter, find
from buffer.examples import BadRow, Example, Stage
from buffer.experiment import BlendSource, DataConfig, PromptSource
from buffer.order import Order, share
from buffer.sources import open_table
from buffer.tables import Table, first_rows

logger = logging.getLogger(__name__)

LOOKED_AT = 16
"""First rows that tell a source's shape."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table, how its rows are read, and which of them belong to the stage."""

    table: Table
    adapter: Adapter
    stage: Stage
    share: np.ndarray | None

    def __len__(self) -> int:
        return len(self.table) if self.share is None else len(self.share)

    def row(self, place: int) -> int:
        """The table's number of the share's `place`-th row."""
        return place if self.share is None else int(self.share[place])

    def example(self, row: int) -> Example:
        """Row `row` of the table, as the stage wants it.

        Raises:
            BadRow: With the row's place.
        """
        try:
            return self.adapter(self.table[row]).fitted(self.stage)
        except BadRow as error:
            raise error.at(self.table.where(row)) from None


class ExampleStream:
    """The examples of every epoch, in the seed's order.

    Attributes:
        counts: Rows left out so far, by reason: `bad_row`, and what `drop` was told.
    """

    def __init__(self, sources: Sequence[Source], order: Order, skip_bad_rows: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._sources = sources
        self._order = order
        self._skip = skip_bad_rows
        self._draw = 0

    def __len__(self) -> int:
        """Draws of an epoch."""
        return self._order.total

    def take(self, count: int) -> list[Example]:
        """The next examples; fewer than `count` only where the last epoch ends.

        Raises:
            BadRow: A row cannot be read, and the config does not say to skip it.
        """
        taken: list[Example] = []
        while len(taken) < count:
            draw = self._order.at(self._draw)
            if draw is None:
                break
            source = self._sources[draw.source]
            try:
                taken.append(source.example(source.row(draw.row)))
            except BadRow as error:
                if not self._skip:
                    raise
                self.counts["bad_row"] += 1
                logger.warning("left out: %s", error)
            self._draw += 1
        return taken

    def drop(self, reason: str) -> None:
        """Count an example that the caller could not use, such as a prompt too long for the model."""
        self.counts[reason] += 1

    @property
    def position(self) -> dict[str, Any]:
        """Where the next example comes from: plain JSON, for `seek`."""
        return {"draw": self._draw, "counts": dict(self.counts)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on exactly where a stream of the same config, seed and data was.

        Raises:
            ValueError: Not a position.
        """
        try:
            self._draw = int(position["draw"])
            self.counts = Counter({str(k): int(v) for k, v in position["counts"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a position in the data: {position!r}: {error!r}") from None


def open_stream(config: DataConfig, seed: int, stage: Stage) -> ExampleStream:
    """The stream of a stage.

    Args:
        config: The `data` section.
        seed: Of the order, and of generated sources that set none.
        stage: What the examples are for: which of the split's shares, and which responses they carry.

    Raises:
        ValueError: What is wrong with which source or row.
    """
    sources, weights = open_sources(config.train, seed, stage, config.split)
    order = Order([len(s) for s in sources], weights, seed, config.shuffle, config.epochs)
    return ExampleStream(sources, order, config.on_bad_row == "skip")


def open_sources(
    config: PromptSource, seed: int, stage: Stage, split: str | None
) -> tuple[list[Source], list[float] | None]:
    """Every single source and, for a blend, their weights.

    Raises:
        ValueError: Which source cannot be read, or has no rows for the stage.
    """
    if isinstance(config, BlendSource):
        parts, weights = [part.source for part in config.parts], [part.weight for part in config.parts]
    else:
        parts, weights = [config], None
    sources: list[Source] = []
    for part in parts:
        table = open_table(part, seed)
        rows = first_rows(table, LOOKED_AT)
        if not rows:
            raise ValueError(f"{table.name}: no rows; at least one is needed")
        adapter = find(getattr(part, "adapter", "auto"), rows, table.name)
        logger.info("%s: read as %s, %d rows", table.name, adapter.told(), len(table))
        source = Source(table, adapter, stage, share(len(table), split, stage))
        if not len(source):
            raise ValueError(f"{table.name}: data.split {split!r} leaves no rows for {stage}")
        sources.append(source)
    return sources, weights
