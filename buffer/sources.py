"""What a `data.train` or `eval.source` section names, opened as a table."""

import codecs
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer.adapters import plain
from buffer.arrow_tables import ArrowTable, saved_by_datasets
from buffer.dotted import RAISED, place, resolve
from buffer.examples import BadRow
from buffer.experiment import FilesSource, FunctionSource, JsonlSource, ReasoningGymSource, SingleSource
from buffer.tables import Joined, ListTable, Table
from buffer.text_tables import TextTable, items, lines


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
            return TextTable(_readable(Path(source.path)), lines)
        case FilesSource():
            patterns = [source.path] if isinstance(source.path, str) else source.path
            paths = [path for pattern in patterns for path in _matching(pattern)]
            _refuse_twice(paths)
            tables = [_file(path) for path in paths]
            return tables[0] if len(tables) == 1 else Joined(tables)
        case FunctionSource():
            return _function(source)
        case ReasoningGymSource():
            return _reasoning_gym(source, seed)


def _matching(pattern: str) -> list[Path]:
    """A path as it stands, or the files that a pattern with * ? or [ names, by name."""
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    found = sorted(Path(path) for path in glob.glob(pattern))
    if not found:
        raise ValueError(f"{pattern}: no file matches the pattern")
    return found


def _refuse_twice(paths: Sequence[Path]) -> None:
    """
    Raises:
        ValueError: Two of them are one file, whose rows would count twice: of patterns that overlap, say.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            other = "" if first == path else f", as {first} too"
            raise ValueError(
                f"{path}: named twice{other}, so each of its rows would come twice in an epoch; name it once "
                "(a blend draws more often from a file)"
            )


def _readable(path: Path) -> Path:
    """The path, of what can be read more than once and has an end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: a pipe or a device; expected a file, which is read more than once")
    return path


def _file(path: Path) -> Table:
    """A file by what is in it; its name decides only that .jsonl is never an array."""
    if path.is_dir():
        return ArrowTable(str(path), saved_by_datasets(path))
    _readable(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return TextTable(path, lines)
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if path.suffix in (".parquet", ".arrow") or head.startswith((b"PAR1", b"ARROW1")):
        return ArrowTable(str(path), [path])
    match head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]:
        case b"[":
            return TextTable(path, items)
        case b"{" | b"":
            return TextTable(path, lines)
    raise ValueError(
        f"{path}: expected JSON lines, a JSON array, parquet, arrow, or a folder saved by datasets"
    )


def _function(source: FunctionSource) -> Table:
    function = resolve(source.path)
    try:
        rows = list(function(**source.args))
    except RAISED as error:  # a user's function may raise anything
        told = f"{type(error).__name__}: {error}{place(error)}"
        raise ValueError(f"{source.path} raised {told}") from error
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
