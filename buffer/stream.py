"""Examples for a stage of training, in order, from any source; the place is a few numbers.

What a source holds is read row by row when it is asked for. A restart seeks the exact row.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer import cache
from buffer.adapters import AUTO, Adapter, find
from buffer.errors import BadMessage
from buffer.examples import BadRow, Example, Stage
from buffer.experiment import BlendSource, DataConfig, PromptSource
from buffer.fields import check_row
from buffer.order import Order, share
from buffer.sources import open_table
from buffer.tables import Table, first_rows

logger = logging.getLogger(__name__)

LOOKED_AT = 16
"""First rows that tell a source's shape."""
RULES = 5
"""Raised by one whenever a row that passed may be refused: large files are then checked anew."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table, how its rows are read, and which of them belong to the stage."""

    table: Table
    adapter: Adapter
    stage: Stage
    split: str | None
    share: np.ndarray | None
    """The table's rows that belong to the stage; None: all."""

    def __len__(self) -> int:
        return len(self.table) if self.share is None else len(self.share)

    def example(self, place: int) -> Example:
        """The share's `place`-th row, as the stage wants it.

        Raises:
            BadRow: With the row's place.
        """
        row = place if self.share is None else int(self.share[place])
        try:
            raw = self.table[row]
            example = self._fitted(self.adapter(raw), raw)
            if self.stage == "rl":  # a prompt goes to the rollout servers with its row
                check_row(example.row)
            return example
        except BadMessage as error:
            raise BadRow(str(error), self.table.where(row)) from None
        except BadRow as error:
            raise error.at(self.table.where(row)) from None

    def _fitted(self, example: Example, raw: Any) -> Example:
        try:
            return example.fitted(self.stage)
        except BadRow as error:
            keys = ", ".join(f"`{key}`" for key, value in sorted(raw.items()) if value is not None)
            told = f"{error.reason}; read as {self.adapter.name}, keys found: {keys}"
            raise BadRow(f"{told}; docs/data.md lists the shapes that are known") from None


class ExampleStream:
    """The examples of every epoch, in the seed's order.

    Attributes:
        counts: Rows left out so far, by reason: `bad_row`, and what `drop` was told.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float] | None, order: Order, skip_bad_rows: bool
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._sources = sources
        self._order = order
        self._skip = skip_bad_rows
        self._draw = 0
        self._data = fingerprint_of(sources, weights)

    def __len__(self) -> int:
        """Draws of an epoch."""
        return self._order.total

    def take(self, count: int) -> list[Example]:
        """The next examples; fewer than `count` only where the last epoch ends.

        Raises:
            BadRow: A row cannot be read, and the config does not say to skip it, or none of an epoch can.
        """
        taken: list[Example] = []
        skipped = 0
        while len(taken) < count:
            draw = self._order.at(self._draw)
            if draw is None:
                break
            try:
                taken.append(self._sources[draw.source].example(draw.row))
            except BadRow as error:
                skipped += 1
                if not self._skip or skipped > self._order.total:
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
        counts = dict(self.counts)
        return {"draw": self._draw, "counts": counts, "data": self._data, "order": self._order.name}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on exactly where a stream of the same config, seed and data was.

        Raises:
            ValueError: Not a position, or one in other data.
        """
        try:
            draw, data = int(position["draw"]), position["data"]
            counts = Counter({str(k): int(v) for k, v in position["counts"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a position in the data: {position!r}: {error!r}") from None
        if data != self._data or draw < 0:
            names = ", ".join(source.table.name for source in self._sources)
            raise ValueError(
                f"{names}: not the rows that this run began with (or split, weights or adapter changed): its "
                "place in them is lost; start another run"
            )
        # One of before this was kept tells no order, and is not compared.
        if (order := position.get("order", self._order.name)) != self._order.name:
            raise ValueError(
                f"the rows came {order}, and would come {self._order.name} now, some of them twice and "
                "others never; set seed and data.shuffle back, or use another run_dir"
            )
        self._draw, self.counts = draw, counts


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
    check(sources, config.on_bad_row == "skip")
    order = Order([len(s) for s in sources], weights, seed, config.shuffle, config.epochs)
    return ExampleStream(sources, weights, order, config.on_bad_row == "skip")


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
        name = getattr(part, "adapter", AUTO)
        name = "document" if (name, stage) == (AUTO, "pretraining") else name
        adapter = find(name, rows, table.name, stage)
        logger.info("%s: read as %s, %d rows", table.name, adapter.told(rows), len(table))
        source = Source(table, adapter, stage, split, share(len(table), split, stage))
        if not len(source):
            raise ValueError(f"{table.name}: data.split {split!r} leaves no rows for {stage}")
        sources.append(source)
    return sources, weights


def check(sources: Sequence[Source], skip_bad_rows: bool) -> None:
    """Read every row once, so that a bad one is told at the start and not in the middle of a run.

    That a large file passed is kept beside its index, unless it is read by a function of the user's. Where
    bad rows are skipped, one good row in each source will do.

    Raises:
        BadRow: The first that cannot be used, with its place.
    """
    for source in sources:
        if skip_bad_rows:
            _check_any(source)
            continue
        key = None if ":" in source.adapter.name else source.table.key
        passed = f"{key}.{source.adapter.name}.{source.stage}.{source.split or 'all'}.{RULES}.checked"
        if key is not None:
            if (cache.folder() / passed).exists():
                continue
            logger.info("%s: checking %d rows, this once", source.table.name, len(source))
        for place in range(len(source)):
            source.example(place)
        if key is not None:
            cache.made(passed, lambda sink: None)


def _check_any(source: Source) -> None:
    first: BadRow | None = None
    for place in range(len(source)):
        try:
            source.example(place)
        except BadRow as error:
            first = first or error
        else:
            return
    assert first is not None, "a source without rows"
    raise ValueError(f"{source.table.name}: no row can be used, the first because of {first}")


def fingerprint_of(sources: Sequence[Source], weights: Sequence[float] | None) -> str:
    """Changes when a source's rows, the way they are read, the split or the weights do. How closely a large
    file is looked at: `cache.content`."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        split = f"{source.split} {source.stage}" if source.split else ""
        digest.update(f"{source.table.fingerprint()}\n{source.adapter.name}\n{split}\n".encode())
    digest.update(repr(weights).encode())
    return digest.hexdigest()
