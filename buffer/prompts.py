"""Which prompts the buffer hands out, and in which order.

The training prompts stay where they are and are read row by row; evaluation rows are few and are held.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from buffer.examples import Example
from buffer.experiment import DataConfig, PromptSource
from buffer.order import Order
from buffer.stream import Source, check, fingerprint_of, open_sources

EVAL_SEED = 1_000_003
"""Added to the seed for evaluation rows, so that a generated source never evaluates on what it trains on."""

Row = dict[str, Any]


class PromptRows:
    """The rows of all sources by number: the first source's, then the next one's."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] | None = None) -> None:
        self.sizes = [len(source) for source in sources]
        self.weights = weights
        self._sources = sources
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Row:
        """What rollout servers and rewards get: the row as it stands, with its prompt under `prompt`.

        Raises:
            BadRow: It cannot be read.
        """
        source = next(i for i, start in enumerate(self._starts[1:]) if number < start)
        return _row(self._sources[source].example(number - self._starts[source]))

    def number(self, source: int, place: int) -> int:
        return self._starts[source] + place

    def fingerprint(self) -> str:
        return fingerprint_of(self._sources, self.weights)


def open_prompts(config: DataConfig, seed: int) -> "PromptQueue":
    """The training prompts.

    Raises:
        ValueError: What is wrong with which source or row.
    """
    sources, weights = open_sources(config.train, seed, "rl", config.split)
    check(sources, config.on_bad_row == "skip")
    return PromptQueue(PromptRows(sources, weights), seed, config.epochs, config.shuffle)


def load_rows(config: PromptSource, seed: int) -> list[Row]:
    """All rows of a source, in its own order; the same every time.

    Args:
        config: The `eval.source` section.
        seed: Of a generated source that sets none in its `args`.

    Raises:
        ValueError: What is wrong with which row: file and line for a file, number for a function.
    """
    sources, _ = open_sources(config, seed, "rl", split=None)
    return [_row(source.example(place)) for source in sources for place in range(len(source))]


def fingerprint(rows: Sequence[Row] | PromptRows) -> str:
    """Changes when any row does; kept with the run, because prompt ids are row numbers."""
    if isinstance(rows, PromptRows):
        return rows.fingerprint()
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()


class PromptQueue:
    """The rows of every epoch in order. Stateless: the store keeps the place, so that a restart resumes
    it."""

    def __init__(
        self, rows: Sequence[Row] | PromptRows, seed: int, epochs: int | None, shuffle: bool
    ) -> None:
        self.rows = rows
        self.epochs = epochs
        whole = not isinstance(rows, PromptRows)
        self._order = Order(
            [len(rows)] if whole else rows.sizes, None if whole else rows.weights, seed, shuffle, epochs
        )

    @property
    def order(self) -> str:
        """Names the order of the draws, whatever the rows are."""
        return self._order.name

    def at(self, epoch: int, position: int) -> tuple[int, int] | None:
        """How often the row's source was gone through before, and the row's number; None past the last epoch.

        The first is the epoch, but in a blend, whose sources go round at their own pace. No two places have
        the same pair.
        """
        draw = self._order.at(epoch * self._order.total + position)
        if draw is None:
            return None
        if isinstance(self.rows, PromptRows):
            return draw.lap, self.rows.number(draw.source, draw.row)
        return draw.lap, draw.row

    def after(self, epoch: int, position: int) -> tuple[int, int]:
        """The next place."""
        return (epoch, position + 1) if position + 1 < len(self.rows) else (epoch + 1, 0)


def _row(example: Example) -> Row:
    prompt = example.prompt
    return {**example.row, "prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
