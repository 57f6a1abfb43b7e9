"""What is over, as numbers: rows of trained, evicted and dropped groups, and of their prompts, become counts.

The store would else grow with every group for as long as the run lasts. A prompt that was trained or dropped
is never drawn again, since the place in the data only goes forward; a group that comes once more after all
that is nobody's, as one of another run would be.
"""

import sqlite3

from buffer.database import Database
from buffer.starvation import NEWEST

KEPT = NEWEST
"""Groups, and leases, whose rows stay in any case: a second delivery is known by them, and `starvation` reads
them."""

COUNT = (
    "INSERT INTO settled {} GROUP BY 2, 3 "
    "ON CONFLICT (kind, number, state) DO UPDATE SET count = count + excluded.count"
)


def settle(database: Database) -> None:
    """Count and delete the rows that nothing can ask for any more, but for the newest."""
    newest = database.one("SELECT max(sequence) FROM groups") or 0
    groups = f"groups WHERE sequence <= {newest - KEPT} AND state IN ('trained', 'evicted', 'dropped')"
    uses = f"members JOIN groups USING (sequence) WHERE sequence IN (SELECT sequence FROM {groups})"
    database.run(COUNT.format(f"SELECT 'use', batch - oldest_version, '', count(*) FROM {uses}"))
    database.run(f"DELETE FROM members WHERE sequence IN (SELECT sequence FROM {groups})")
    database.run(COUNT.format(f"SELECT 'group', uses, state, count(*) FROM {groups}"))
    database.run(f"DELETE FROM {groups}")
    turns = database.fact("turn", 0)
    prompts = f"prompts WHERE kind = 'train' AND state IN ('trained', 'dropped') AND turn < {turns - KEPT}"
    database.run(COUNT.format(f"SELECT 'prompt', epoch, state, count(*) FROM {prompts}"))
    database.run(f"DELETE FROM {prompts}")


def counts(connection: sqlite3.Connection, kind: str) -> list[tuple[int, str, int]]:
    """Number, state and count: of `group` by uses, of `prompt` by epoch, of `use` by staleness."""
    return connection.execute(
        "SELECT number, state, count FROM settled WHERE kind = ? ORDER BY number, state", (kind,)
    ).fetchall()
