"""Where prompts come from, and in which order they go out.

A row is a plain mapping: `prompt` (text, or a list of chat messages), optional `answer` and `metadata`. The
buffer serves rows from here to rollout servers; offline stages read them here themselves.
"""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from buffer.experiment import FunctionSource, JsonlSource, PromptSource, ReasoningGymSource

EVAL_SEED = 1_000_003
"""Added to the seed for evaluation rows, so that a generated source never evaluates on what it trains on."""

Row = dict[str, Any]


def load_rows(source: PromptSource, seed: int) -> list[Row]:
    """All rows of a source, in its own order; the same every time.

    Args:
        source: The `data.train` or `eval.source` section.
        seed: Of a generated source that sets none in its `args`.

    Raises:
        ValueError: What is wrong with which row: file and line for a file, number for a function.
    """
    match source:
        case JsonlSource():
            rows = _jsonl(Path(source.path))
        case FunctionSource():
            rows = _function(source)
        case ReasoningGymSource():
            rows = _reasoning_gym(source, seed)
        case _:
            raise ValueError(f"data of kind {source.kind} is read by the offline stages only")
    if not rows:
        raise ValueError(
            f"{getattr(source, 'path', None) or source.kind}: no rows; at least one prompt is needed"
        )
    return rows


def fingerprint(rows: list[Row]) -> str:
    """Changes when any row does; kept with the run, because prompt ids are row numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()


class PromptQueue:
    """The rows of every epoch in order. Stateless: the store keeps the place, so that a restart resumes
    it."""

    def __init__(self, rows: list[Row], seed: int, epochs: int | None, shuffle: bool) -> None:
        self.rows = rows
        self.epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Any] = (-1, None)

    def at(self, epoch: int, position: int) -> int | None:
        """The row number at a place; None past the last epoch."""
        if self.epochs is not None and epoch >= self.epochs:
            return None
        if not self._shuffle:
            return position
        if self._order[0] != epoch:
            # RandomState's streams are frozen by numpy's compatibility policy (NEP 19): an upgrade in the
            # middle of a run keeps the order.
            generator = np.random.RandomState([self._seed % 2**32, epoch])
            self._order = (epoch, generator.permutation(len(self.rows)))
        return int(self._order[1][position])

    def after(self, epoch: int, position: int) -> tuple[int, int]:
        """The next place."""
        return (epoch, position + 1) if position + 1 < len(self.rows) else (epoch + 1, 0)


def _jsonl(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read: {error}; expected a file of one JSON object a line"
        ) from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        rows.append(_checked(value, f"{path}:{number}"))
    return rows


def _function(source: FunctionSource) -> list[Row]:
    module, _, name = source.path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{source.path}: cannot be imported as package.module:function: {error}") from None
    return [
        _checked(row, f"{source.path} row {number}") for number, row in enumerate(function(**source.args))
    ]


def _reasoning_gym(source: ReasoningGymSource, seed: int) -> list[Row]:
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            "data of kind reasoning_gym: the package is missing; pip install reasoning-gym"
        ) from None
    arguments = {"seed": seed, **source.args}
    try:
        dataset = reasoning_gym.create_dataset(source.dataset, size=source.size, **arguments)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym dataset {source.dataset!r}: {error}") from None
    rows: list[Row] = []
    for number in range(source.size):
        entry = dataset[number]
        where = f"reasoning_gym {source.dataset} row {number}"
        row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        rows.append(_checked(row, where))
    # A few datasets verify against Python objects that JSON has no word for; better told here than as zero
    # rewards.
    entry = dataset[0]
    crossed = {"question": rows[0]["prompt"], "answer": rows[0]["answer"], "metadata": rows[0]["metadata"]}
    score: Any = reasoning_gym.get_score_answer_fn(entry["metadata"].get("source_dataset", source.dataset))
    if entry["answer"] is not None and score(entry["answer"], entry) != score(crossed["answer"], crossed):
        raise ValueError(
            f"reasoning_gym dataset {source.dataset!r}: its verifier does not survive a trip through JSON"
        )
    return rows


def _checked(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with a `prompt`, got {type(value).__name__}")
    prompt = value.get("prompt")
    if isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise ValueError(
                    f"{where}: prompt: expected chat messages with `role` and `content`, got {message!r}"
                )
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f"{where}: prompt: expected text or a list of chat messages, got {prompt!r}")
    if not isinstance(value.get("metadata", {}), dict):
        raise ValueError(f"{where}: metadata: expected an object, got {value['metadata']!r}")
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: only plain JSON values can be sent: {error}") from None
