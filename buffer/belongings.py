"""What a run's store was begun with and goes on with: compared before anything starts, and by the store."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from buffer.database import LAYOUT, Database, other_layout, read_only
from buffer.prompts import PromptQueue, Row, fingerprint


def belongings(
    run_id: str, queue: PromptQueue, eval_rows: list[Row], temperature: float
) -> Iterator[tuple[str, str, str]]:
    """Fact, its value for this configuration, and what to do where the store has another."""
    yield "run_id", run_id, "use another run_dir"
    yield "data", fingerprint(queue.rows), "the training rows changed; use another run_dir"
    # The place in the data is a number in that order: in another one rows would come twice, and others never.
    yield "order", queue.order, "set seed and data.shuffle back, or use another run_dir"
    # The learner's ratios are to the logprobs of what is stored, and at another one of another distribution.
    back = "set rollout.sampling.temperature back, or use another run_dir"
    yield "temperature", str(float(temperature)), back
    if eval_rows:
        yield "eval", fingerprint(eval_rows), "the eval rows changed; use another run_dir"


def claim(
    database: Database, run_id: str, queue: PromptQueue, eval_rows: list[Row], temperature: float
) -> None:
    """Keep them in a new store, compare them with those of an old one.

    Raises:
        ValueError: The store cannot go on with these.
    """
    for fact, value, advice in belongings(run_id, queue, eval_rows, temperature):
        known = database.fact(fact)
        if known is None:
            database.set_fact(fact, value)
        elif known != value:
            raise ValueError(_differs(database.path, fact, known, value, advice))
    open_ = database.one("SELECT version FROM evals WHERE state = 'open'")
    if open_ is not None and not eval_rows:
        raise ValueError(_still_open(database.path, open_))


def check(run_dir: Path, run_id: str, queue: PromptQueue, eval_rows: list[Row], temperature: float) -> None:
    """As `claim`, of a store that is only looked at; a run that has none yet may begin with anything.

    Raises:
        ValueError: The store cannot go on with these.
    """
    path = run_dir / "buffer.sqlite"
    if not path.is_file():
        return
    connection = read_only(path)
    try:
        facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
        found = connection.execute("SELECT version FROM evals WHERE state = 'open'").fetchone()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: cannot be used as the buffer's store: {error}") from None
    finally:
        connection.close()
    if facts.get("layout", LAYOUT) != LAYOUT:
        raise ValueError(other_layout(path, facts["layout"]))
    for fact, value, advice in belongings(run_id, queue, eval_rows, temperature):
        if facts.get(fact, value) != value:
            raise ValueError(_differs(path, fact, facts[fact], value, advice))
    if found is not None and not eval_rows:
        raise ValueError(_still_open(path, found[0]))


def _differs(path: Path | None, fact: str, known: str, value: str, advice: str) -> str:
    return f"{path}: {fact} is {known!r}, this run's is {value!r}: {advice}"


def _still_open(path: Path | None, version: int) -> str:
    return (
        f"{path}: the evaluation of version {version} is under way, and this run has no eval section: set it "
        "back until that is over, or use another run_dir"
    )
