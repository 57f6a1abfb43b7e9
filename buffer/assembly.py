"""Batches in the store: choosing, recording, reading back, forgetting. The rules themselves are in
`staleness.py`."""

import sqlite3
from dataclasses import dataclass
from typing import Literal

from buffer.database import Database
from buffer.errors import BatchForgotten
from buffer.fields import MAX_INT
from buffer.groups import Delivery
from buffer.staleness import Candidate, choose, oldest_trainable, shard


@dataclass(frozen=True, slots=True)
class Assembled:
    """What a batch is made of, in training order."""

    index: int
    sequences: tuple[int, ...]
    """Of its groups in the store."""
    tokens: tuple[int, ...]
    """Of each group."""
    shares: dict[str, int]
    """Of the whole batch: `groups`, `trajectories`, `tokens`, `trained_tokens`."""

    def shard(self, rank: int, size: int) -> tuple[int, ...]:
        """The groups of one data-parallel rank."""
        return tuple(self.sequences[p] for p in shard(self.tokens, size)[rank])


def insert(database: Database, delivery: Delivery, turn: int, state: str) -> None:
    """Enter a group, with its payload when it is `stored`."""
    group = delivery.group
    sequence = database.run(
        "INSERT INTO groups (group_id, prompt_id, turn, state, oldest_version, trajectories, tokens, "
        "trained_tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        *(group.group_id, group.prompt_id, turn, state, delivery.oldest_version),
        *(len(group.trajectories), group.num_tokens, delivery.trained_tokens),
    ).lastrowid
    if state == "stored":
        database.run("INSERT INTO payloads VALUES (?, ?, ?)", sequence, delivery.meta, delivery.arrays)


def evict(database: Database, index: int, max_staleness: int) -> list[str]:
    """Take out every stored group that batch `index` may not train any more; returns their prompts."""
    return _discard(database, "evicted", oldest_trainable(index, max_staleness))


def drop_stored(database: Database) -> list[str]:
    """Let go of the stored groups: too few for a batch, and no more will come. Returns their prompts."""
    return _discard(database, "dropped", MAX_INT)


def _discard(database: Database, state: str, below: int) -> list[str]:
    gone = database.run(
        "UPDATE groups SET state = ? WHERE state = 'stored' AND oldest_version < ? "
        "RETURNING sequence, prompt_id",
        *(state, below),
    ).fetchall()
    for sequence, _ in gone:
        database.run("DELETE FROM payloads WHERE sequence = ?", sequence)
    return [prompt_id for _, prompt_id in gone]


def assemble(
    database: Database, index: int, count: int, max_staleness: int, policy: Literal["fifo", "freshest"]
) -> bool:
    """Choose and record batch `index`; False when too few groups are stored."""
    if database.one("SELECT count(*) FROM groups WHERE state = 'stored'") < count:
        return False
    stored = database.run("SELECT sequence, turn, oldest_version FROM groups WHERE state = 'stored'")
    chosen = choose([Candidate(*row) for row in stored], count, index, max_staleness, policy)
    for place, candidate in enumerate(chosen):
        database.run(
            "UPDATE groups SET state = 'batched', batch = ?, place = ? WHERE sequence = ?",
            *(index, place, candidate.sequence),
        )
    database.run(
        "UPDATE prompts SET state = 'batched' "
        "WHERE prompt_id IN (SELECT prompt_id FROM groups WHERE batch = ?)",
        index,
    )
    return bool(chosen)


def recorded(database: Database, index: int) -> Assembled:
    """What a batch was recorded as.

    Raises:
        BatchForgotten: It is below what was committed, or was made before this store.
    """
    committed = database.fact("committed", 0)
    rows = database.run(
        "SELECT sequence, tokens, trajectories, trained_tokens FROM groups WHERE batch = ? ORDER BY place",
        index,
    ).fetchall()
    if index < committed or not rows:
        raise BatchForgotten(
            f"batch {index} is not kept any more: resume from checkpoint {committed} or a later one"
        )
    sequences, tokens, trajectories, trained = zip(*rows, strict=True)
    shares = {
        "groups": len(rows),
        "trajectories": sum(trajectories),
        "tokens": sum(tokens),
        "trained_tokens": sum(trained),
    }
    return Assembled(index, sequences, tokens, shares)


def payloads(connection: sqlite3.Connection, sequences: tuple[int, ...]) -> list[bytes]:
    """The two frames of each group, one after the other."""
    frames: list[bytes] = []
    for sequence in sequences:
        row = connection.execute(
            "SELECT meta, arrays FROM payloads WHERE sequence = ?", (sequence,)
        ).fetchone()
        if row is None:
            raise BatchForgotten(
                "the batch was forgotten while it was being read: its checkpoint was confirmed"
            )
        frames += row
    return frames


def forget(database: Database, index: int) -> int:
    """Delete the groups of every batch below `index`; how many there were."""
    database.run(
        "DELETE FROM payloads "
        "WHERE sequence IN (SELECT sequence FROM groups WHERE batch < ? AND state = 'batched')",
        index,
    )
    done = database.run(
        "UPDATE groups SET state = 'trained' WHERE batch < ? AND state = 'batched' RETURNING prompt_id", index
    ).fetchall()
    for (prompt_id,) in done:
        database.run("UPDATE prompts SET state = 'trained' WHERE prompt_id = ?", prompt_id)
    return len(done)
