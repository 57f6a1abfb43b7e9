"""What is in a run's buffer, read beside a live service or after it: plain numbers for `slipstream buffer
inspect`."""

import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from buffer.database import read_only, under
from buffer.settled import counts
from buffer.starvation import starvation


def inspect(run_dir: Path) -> dict[str, Any]:
    """Counts, versions, staleness histogram, oldest stored group, drops by rule.

    Raises:
        ValueError: There is no buffer in the folder.
    """
    path = run_dir / "buffer.sqlite"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected the run_dir of a run whose buffer was started")
    connection = read_only(path)
    try:
        return _inspect(connection)
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: cannot be read as a buffer's store: {error}") from None
    finally:
        connection.close()


def _inspect(connection: sqlite3.Connection) -> dict[str, Any]:
    def pairs(statement: str) -> dict[Any, Any]:
        return dict(connection.execute(statement).fetchall())

    # One snapshot for all of it, while the service writes on.
    connection.execute("BEGIN")
    facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
    trained = facts.get("published") or 0
    # A batch is kept until each checkpoint that a resume may start from holds it: its groups stay `batched`
    # in the tables long after the learner trained them.
    case = "CASE WHEN state = 'batched' AND {} THEN 'trained' ELSE state END"
    waiting = f"SELECT sequence FROM members WHERE batch >= {int(trained)}"
    made = f"SELECT prompt_id FROM members JOIN groups USING (sequence) WHERE batch < {int(trained)}"
    of_group, of_prompt = case.format(f"sequence NOT IN ({waiting})"), case.format(f"prompt_id IN ({made})")
    oldest = connection.execute(
        "SELECT group_id, prompt_id, oldest_version, tokens FROM groups WHERE state = 'stored' "
        "ORDER BY oldest_version, turn LIMIT 1"
    ).fetchone()
    ledger: dict[int, Counter[str]] = defaultdict(Counter)
    rows = connection.execute(
        f"SELECT epoch, {of_prompt}, count(*) FROM prompts WHERE kind = 'train' GROUP BY 1, 2 ORDER BY 1, 2"
    )
    for epoch, state, count in (*counts(connection, "prompt"), *rows):
        ledger[epoch][state] += count
    groups = Counter(pairs(f"SELECT {of_group}, count(*) FROM groups GROUP BY 1"))
    uses = Counter(pairs("SELECT uses, count(*) FROM groups GROUP BY uses"))
    for used, state, count in counts(connection, "group"):
        groups[state] += count
        uses[used] += count
    staleness = Counter(
        pairs("SELECT batch - oldest_version, count(*) FROM members JOIN groups USING (sequence) GROUP BY 1")
    )
    staleness.update({age: count for age, _, count in counts(connection, "use")})
    counters = pairs("SELECT name, value FROM counters WHERE name != 'trained' ORDER BY name")
    return {
        "run_id": facts.get("run_id"),
        "published": facts.get("published"),
        "frontier": facts.get("frontier", 0),
        "trained": trained,
        "committed": facts.get("committed", 0),
        "finished": facts.get("finished"),
        "groups": dict(groups),
        "leases": pairs("SELECT name, count(*) FROM leases GROUP BY name ORDER BY name"),
        "prompts": {epoch: dict(states) for epoch, states in sorted(ledger.items())},
        "stored_versions": pairs(
            "SELECT oldest_version, count(*) FROM groups WHERE state = 'stored' GROUP BY oldest_version"
        ),
        "staleness": dict(sorted(staleness.items())),
        "uses": {used: count for used, count in sorted(uses.items()) if used},
        "oldest": None
        if oldest is None
        else dict(zip(("group_id", "prompt_id", "oldest_version", "tokens"), oldest, strict=True)),
        "dropped": under(counters, "dropped/"),
        "counters": counters,
        "evaluations": _evaluations(connection),
        "starvation": starvation(connection),
        "payload_bytes": connection.execute(
            "SELECT coalesce(sum(length(arrays)), 0) FROM payloads"
        ).fetchone()[0],
    }


def _evaluations(connection: sqlite3.Connection) -> dict[int, dict[str, float]]:
    closed = connection.execute("SELECT version, results FROM evals WHERE state != 'open' ORDER BY version")
    return {version: json.loads(results) for version, results in closed}
