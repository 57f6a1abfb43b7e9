"""The examples of each step, in token ids: every rank takes the same rows and encodes its share of them."""

import logging
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from buffer.examples import Example
from buffer.rendering import PromptRefused
from learner import collectives, parallel
from learner.offline.config import Select
from learner.offline.encoding import Encoded, Encoder
from learner.offline.stages import Stage

logger = logging.getLogger(__name__)

RULES = ("too_long", "bad_row", "no_pair")
"""Why an example is left out: it does not fit, it cannot be read or rendered, its scores are all equal."""


class Rows(Protocol):
    """What is asked of `buffer.stream.ExampleStream`."""

    def __len__(self) -> int: ...
    def take(self, count: int) -> list[Example]: ...
    @property
    def position(self) -> dict[str, Any]: ...
    def seek(self, position: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class Share:
    """This rank's part of a step's rows."""

    examples: list[Encoded] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Left out, by RULES; and `cut`."""


class ExampleFeed:
    """A step's rows are fixed by the data's order alone, whatever is left out of them: so every layout trains
    the same, and a place in the data is all that a resume needs.

    Args:
        rows: At their beginning.
        encoder: Makes token ids of them.
        stage: Says what teaches it something.
        batch_size: Rows of a step, over all ranks.
        epochs: Passes that there are; None for no end.
        responses: Of an example with more, so many are taken; None takes all.
        select: Which ones.
        seed: Of draws among them.
    """

    def __init__(
        self,
        rows: Rows,
        encoder: Encoder,
        stage: Stage,
        batch_size: int,
        epochs: int | None,
        responses: int | None = None,
        select: Select = "random",
        seed: int = 0,
    ) -> None:
        self._rows = rows
        self._draws = None if epochs is None else epochs * len(rows)
        self._encoder = encoder
        self._stage = stage
        self._batch_size = batch_size
        self._responses = responses
        self._select: Select = select
        self._seed = seed

    def check_first(self) -> None:
        """Look at the first row, and stay before it.

        Raises:
            ValueError: It cannot be read, or no row like it can be trained on.
        """
        begun = self._rows.position
        for row in self._rows.take(1):
            if not self._encoder.renders(row):
                raise ValueError(
                    "the first row has chat messages, and the tokenizer has no chat template; expected one "
                    "in the model's folder (chat_template.jinja), or prompts of text"
                )
        self._rows.seek(begun)

    def next(self) -> Share:
        """The next step's.

        Raises:
            ValueError: A row that cannot be read, with its place.
        """
        before, place = self._unreadable(), f"{self._seed}/{self._rows.position['draw']}"
        rows = self._rows.take(self._batch_size)
        if self._responses is not None:
            rows = [some(row, self._responses, self._select, f"{place}/{i}") for i, row in enumerate(rows)]
        found = share(rows, self._encoder, self._stage)
        if parallel.dp_rank() == 0:  # every rank skipped the same
            found.counts["bad_row"] += self._unreadable() - before
        return found

    def _unreadable(self) -> int:
        """Rows skipped so far because they cannot be read."""
        return self._rows.position["counts"].get("bad_row", 0)

    def steps(self, made: int = 0) -> int | None:
        """How many the data has; None for no end.

        Args:
            made: Those up to here. The last one of fewer epochs took fewer rows, and so may those of another
                batch size; rows that were skipped do not count, as in a run that was never stopped.
        """
        if self._draws is None:
            return None
        return made - (self._rows.position["draw"] - self._unreadable() - self._draws) // self._batch_size

    @property
    def used_up(self) -> bool:
        """Whether the last row was taken; earlier than `steps` says where rows were skipped."""
        return self._draws is not None and self._rows.position["draw"] >= self._draws

    @property
    def position(self) -> dict[str, Any]:
        """Where the next step begins; the same on all ranks."""
        return self._rows.position

    def seek(self, position: dict[str, Any]) -> None:
        self._rows.seek(position)


def check_shared(rows: Rows, key: str) -> None:
    """See that every rank has the same rows, of which each then takes its own. Collective.

    Args:
        key: The setting that names them, for the line.

    Raises:
        ValueError: They differ: some would be trained twice and others never, and ranks that share a model
            would not compute the same.
    """
    if not collectives.are_same(rows.position["data"]):
        raise ValueError(
            f"{key}: not every rank found the same rows; expected the same files on each host, and of a "
            "function the same rows in the same order in each process (what it draws needs a seed, and a set "
            "has no order)"
        )


def some(example: Example, most: int, select: Select, seed: str) -> Example:
    """The example with so many of its responses at most, in their order."""
    places = range(len(example.responses))
    if len(places) <= most:
        return example
    match select:
        case "random":
            chosen = random.Random(seed).sample(places, most)
        case "first":
            chosen = places[:most]
        case "best":
            chosen = sorted(places, key=lambda i: -example.scores[i])[:most]
    responses, scores = (tuple(of[i] for i in sorted(chosen)) for of in (example.responses, example.scores))
    return replace(example, responses=responses, scores=scores)


def share(rows: Iterable[Example], encoder: Encoder, stage: Stage) -> Share:
    """Encode every data-parallel rank's own rows, those at its place in turn."""
    found = Share()
    for row in list(rows)[parallel.dp_rank() :: parallel.dp_size()]:
        try:
            example = encoder.encode(row)
        except PromptRefused as error:
            logger.info("left out: %s", error)
            found.counts[error.rule] += 1
            continue
        if not stage.size(example):
            found.counts["no_pair"] += 1
            continue
        found.counts["cut"] += example.cut
        found.examples.append(example)
    return found
