"""The buffer's file: its tables, and how it is opened.

WAL with synchronous=FULL: a commit is in the log and the log is fsynced before it returns, so an acknowledged
group survives `kill -9` and power loss alike. With NORMAL the log is only fsynced at checkpoints: kill -9
still loses nothing (the pages are the kernel's by then), but power loss takes the newest commits back, and an
acknowledged group would be gone. Group commit makes one fsync serve every group that arrived during the last
one.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAYOUT = 4
"""Raised by one whenever the tables change; a file of another layout is refused."""
PAGE_SIZE = 16384
CHECKPOINT_PAGES = 16384
"""256 MiB of log between checkpoints: a page that was written more than once since is copied only once."""

TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

-- The ledger: one row per prompt and epoch, from its first lease until it is settled.
-- state: queued, leased, stored, batched, trained, dropped (by `rule`), scored (evaluation).
CREATE TABLE IF NOT EXISTS prompts (
    prompt_id TEXT PRIMARY KEY, kind TEXT NOT NULL, epoch INTEGER NOT NULL, row INTEGER NOT NULL,
    state TEXT NOT NULL, rule TEXT, failures INTEGER NOT NULL DEFAULT 0, turn INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS prompts_queued ON prompts (kind, epoch, turn) WHERE state = 'queued';
CREATE INDEX IF NOT EXISTS prompts_eval ON prompts (epoch) WHERE kind = 'eval';

CREATE TABLE IF NOT EXISTS leases (
    lease_id TEXT PRIMARY KEY, prompt_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, name TEXT NOT NULL,
    request_id TEXT NOT NULL, version INTEGER NOT NULL, turn INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_kind ON leases (kind);
CREATE INDEX IF NOT EXISTS leases_request ON leases (request_id);

-- state: stored (a use is left), batched (none is), evicted, dropped, trained. `turn` is the lease's, `uses`
-- the number of its batches, `reward` the mean of its completions.
CREATE TABLE IF NOT EXISTS groups (
    sequence INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, prompt_id TEXT NOT NULL,
    turn INTEGER NOT NULL, state TEXT NOT NULL, oldest_version INTEGER NOT NULL,
    trajectories INTEGER NOT NULL, tokens INTEGER NOT NULL, trained_tokens INTEGER NOT NULL,
    reward REAL NOT NULL, priority REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS groups_stored ON groups (oldest_version) WHERE state = 'stored';
CREATE INDEX IF NOT EXISTS groups_batched ON groups (sequence) WHERE state = 'batched';

-- What each batch is made of. No batch holds a group twice.
CREATE TABLE IF NOT EXISTS members (
    batch INTEGER NOT NULL, place INTEGER NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (batch, place)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS members_of_group ON members (sequence, batch);

-- The two frames of a group as they came; gone once nobody can ask for them again.
CREATE TABLE IF NOT EXISTS payloads (sequence INTEGER PRIMARY KEY, meta BLOB NOT NULL, arrays BLOB NOT NULL);

-- Rows of the tables above that are over, as numbers: `buffer/settled.py`.
CREATE TABLE IF NOT EXISTS settled (
    kind TEXT NOT NULL, number INTEGER NOT NULL, state TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (kind, number, state)
) WITHOUT ROWID;

-- state: open, closed (every prompt scored or dropped), written (its lines are in eval.jsonl). `results` and
-- `rewards`, one for each completion of a prompt, are JSON.
CREATE TABLE IF NOT EXISTS evals (
    version INTEGER PRIMARY KEY, final INTEGER NOT NULL, state TEXT NOT NULL, results TEXT
);
CREATE TABLE IF NOT EXISTS eval_groups (
    prompt_id TEXT PRIMARY KEY, version INTEGER NOT NULL, row INTEGER NOT NULL, group_id TEXT NOT NULL,
    rewards TEXT NOT NULL, lines TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS eval_groups_version ON eval_groups (version, row);
"""


class Database:
    """One connection, and the two small tables that everybody uses. One thread at a time."""

    def __init__(self, path: Path | None) -> None:
        """Open or create; None keeps everything in memory."""
        self.path = path
        self.connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise ValueError(f"{path}: cannot be used as the buffer's store: {error}") from None

    def _prepare(self) -> None:
        run = self.connection.execute
        run(f"PRAGMA page_size = {PAGE_SIZE}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        run("PRAGMA cache_size = -65536")
        run("PRAGMA temp_store = MEMORY")
        self.connection.executescript(TABLES)
        layout = self.fact("layout")
        if layout is None:
            self.set_fact("layout", LAYOUT)
        elif layout != LAYOUT:
            raise ValueError(other_layout(self.path, layout))

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it returns."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self.connection.execute(statement, values)

    def one(self, statement: str, *values: Any) -> Any:
        """The first column of the first row; None without one."""
        row = self.connection.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def fact(self, name: str, default: Any = None) -> Any:
        value = self.one("SELECT value FROM facts WHERE name = ?", name)
        return default if value is None else value

    def set_fact(self, name: str, value: Any) -> None:
        self.run("INSERT INTO facts VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2", name, value)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self.run(
            "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
            name,
            number,
        )

    def counters(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT name, value FROM counters ORDER BY name").fetchall())


def other_layout(path: Path | None, layout: object) -> str:
    return f"{path}: layout {layout}, this program reads {LAYOUT}; use another run_dir"


def under(counters: dict[str, int], prefix: str) -> dict[str, int]:
    """The counters of one kind, without its name."""
    return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}


def read_only(path: Path) -> sqlite3.Connection:
    """A second connection for reading beside the writer."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
