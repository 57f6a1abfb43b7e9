"""Batches in the store: choosing, recording, reading back, forgetting. The rules themselves are in
`staleness.py`."""

import sqlite3
from dataclasses import dataclass

from buffer.database import Database
from buffer.errors import BatchForgotten
from buffer.fields import MAX_INT
from buffer.groups import Delivery
from buffer.policies import choose
from buffer.staleness import Candidate, Rules, oldest_trainable, shard


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


def insert(database: Database, delivery: Delivery, turn: int, state: str, priority: float) -> None:
    """Enter a group, with its payload when it is `stored`."""
    group = delivery.group
    sequence = database.run(
        "INSERT INTO groups (group_id, prompt_id, turn, state, oldest_version, trajectories, tokens, "
        "trained_tokens, reward, priority) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        *(group.group_id, group.prompt_id, turn, state, delivery.oldest_version),
        *(len(group.trajectories), group.num_tokens, delivery.trained_tokens),
        *(sum(t.reward for t in group.trajectories) / len(group.trajectories), priority),
    ).lastrowid
    if state == "stored":
        database.run("INSERT INTO payloads VALUES (?, ?, ?)", sequence, delivery.meta, delivery.arrays)


def evict(database: Database, index: int, max_staleness: int) -> list[str]:
    """Take out every stored group that batch `index` may not train any more; returns the prompts of those
    that none ever trained."""
    return _discard(database, "evicted", oldest_trainable(index, max_staleness))


def drop_stored(database: Database) -> list[str]:
    """Let go of the stored groups: too few for a batch, and no more will come. Returns the prompts of those
    that none ever trained."""
    return _discard(database, "dropped", MAX_INT)


def _discard(database: Database, state: str, below: int) -> list[str]:
    database.run(
        "UPDATE groups SET state = 'batched' WHERE state = 'stored' AND uses > 0 AND oldest_version < ?",
        below,
    )
    gone = database.run(
        "UPDATE groups SET state = ? WHERE state = 'stored' AND oldest_version < ? "
        "RETURNING sequence, prompt_id, trained_tokens",
        *(state, below),
    ).fetchall()
    for sequence, _, _ in gone:
        database.run("DELETE FROM payloads WHERE sequence = ?", sequence)
    if gone:
        database.count("wasted_tokens", sum(tokens for _, _, tokens in gone))
    return [prompt_id for _, prompt_id, _ in gone]


def assemble(database: Database, index: int, rules: Rules, leased: list[int], seed: int) -> bool:
    """Choose and record batch `index`; False when it has to wait. `leased` and `seed` as in `choose`."""
    if database.one("SELECT count(*) FROM groups WHERE state = 'stored'") < rules.groups_per_batch:
        return False
    stored = database.run(
        "SELECT sequence, turn, oldest_version, uses, priority FROM groups WHERE state = 'stored'"
    )
    chosen = choose([Candidate(*row) for row in stored], leased, index, rules, seed)
    for place, candidate in enumerate(chosen):
        database.run("INSERT INTO members VALUES (?, ?, ?)", index, place, candidate.sequence)
        used_up = candidate.uses + 1 >= rules.max_uses
        database.run(
            "UPDATE groups SET uses = uses + 1, state = ? WHERE sequence = ?",
            *("batched" if used_up else "stored", candidate.sequence),
        )
    database.run(
        "UPDATE prompts SET state = 'batched' WHERE prompt_id IN "
        "(SELECT prompt_id FROM members JOIN groups USING (sequence) WHERE batch = ?)",
        index,
    )
    again = sum(candidate.uses > 0 for candidate in chosen)
    if again:
        database.count("reused", again)
    return bool(chosen)


def recorded(database: Database, index: int) -> Assembled:
    """What a batch was recorded as.

    Raises:
        BatchForgotten: It is below what was committed, or was made before this store.
    """
    committed = database.fact("committed", 0)
    rows = database.run(
        "SELECT sequence, tokens, trajectories, trained_tokens FROM members JOIN groups USING (sequence) "
        "WHERE batch = ? ORDER BY place",
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
    """Delete the groups that neither a batch from `index` on nor any to come can ask for; how many there
    were."""
    done = database.run(
        "UPDATE groups SET state = 'trained' WHERE state = 'batched' AND NOT EXISTS "
        "(SELECT 1 FROM members WHERE members.sequence = groups.sequence AND batch >= ?) "
        "RETURNING sequence, prompt_id",
        index,
    ).fetchall()
    for sequence, prompt_id in done:
        database.run("DELETE FROM payloads WHERE sequence = ?", sequence)
        database.run("UPDATE prompts SET state = 'trained' WHERE prompt_id = ?", prompt_id)
    return len(done)
