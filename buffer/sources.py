"""What a `data.train` or `eval.source` section names, opened as a table."""

import importlib
from pathlib import Path
from typing import Any

from buffer.adapters import plain
from buffer.examples import BadRow
from buffer.experiment import FilesSource, FunctionSource, JsonlSource, ReasoningGymSource
from buffer.tables import Joined, JsonLines, ListTable, Table

SingleSource = JsonlSource | FilesSource | FunctionSource | ReasoningGymSource


def open_table(source: SingleSource, seed: int) -> Table:
    """Open one source.

    Args:
        source: Its section.
        seed: Of a generated source that sets none in its `args`.

    Raises:
        ValueError: What is wrong with it, in one line.
    """
    match source:
        case JsonlSource():
            return JsonLines(Path(source.path))
        case FilesSource():
            paths = [source.path] if isinstance(source.path, str) else source.path
            tables = [JsonLines(Path(path)) for path in paths]
            return tables[0] if len(tables) == 1 else Joined(tables)
        case FunctionSource():
            return _function(source)
        case ReasoningGymSource():
            return _reasoning_gym(source, seed)


def _function(source: FunctionSource) -> Table:
    module, _, name = source.path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{source.path}: cannot be imported as package.module:function: {error}") from None
    rows = function(**source.args)
    return ListTable(source.path, [_plain(row, f"{source.path} row {n}") for n, row in enumerate(rows)])


def _reasoning_gym(source: ReasoningGymSource, seed: int) -> Table:
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
    name = f"reasoning_gym {source.dataset}"
    rows: list[dict[str, Any]] = []
    for number in range(source.size):
        entry = dataset[number]
        row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        rows.append(_plain(row, f"{name} row {number}"))
    # A few datasets verify against Python objects that JSON has no word for; better told here than as zero
    # rewards.
    entry = dataset[0]
    crossed = {"question": rows[0]["prompt"], "answer": rows[0]["answer"], "metadata": rows[0]["metadata"]}
    score: Any = reasoning_gym.get_score_answer_fn(entry["metadata"].get("source_dataset", source.dataset))
    if entry["answer"] is not None and score(entry["answer"], entry) != score(crossed["answer"], crossed):
        raise ValueError(
            f"reasoning_gym dataset {source.dataset!r}: its verifier does not survive a trip through JSON"
        )
    return ListTable(name, rows)


def _plain(row: Any, where: str) -> Any:
    try:
        return plain(row)
    except BadRow as error:
        raise error.at(where) from None
