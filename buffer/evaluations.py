"""Evaluations: which versions are evaluated, their prompts' way through leases, their scores, and eval.jsonl.

Evaluation groups are kept as printable lines, never trained. An evaluation closes when each of its prompts
was scored or dropped; until then the version it is of stays the newest. Its lines are then appended to
eval.jsonl, whose written length is a fact in the store, so that a crash between file and store neither loses
nor doubles a line.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from buffer.database import Database
from buffer.handles import OUT
from buffer.ledger import Ledger
from buffer.pass_rate import rates
from buffer.prompts import Row
from buffer.records import Group, Trajectory

logger = logging.getLogger(__name__)

EVALUATIONS = "eval.jsonl"
"""In the run's folder: of each version its completions, and then a line of its score."""
SCORES = 10
"""Of evaluations, in the buffer's status."""


class Evaluations:
    def __init__(
        self, database: Database, ledger: Ledger, rows: list[Row], every: int | None, path: Path | None
    ) -> None:
        """`rows` empty: nothing is ever evaluated. `path` None: no file is written."""
        self.rows = rows
        self._database = database
        self._ledger = ledger
        self._every = every
        self._path = path

    def published(self, version: int) -> None:
        """Open the evaluation of a version if one is due: version 0, and every `every` versions."""
        if self._due(version):
            self._open(version, final=False)

    def _due(self, version: int) -> bool:
        last = self._database.one("SELECT max(version) FROM evals")
        if self._every is None:
            return version == 0 and last is None
        return last is None or version // self._every > last // self._every

    def hold(self, version: int) -> bool:
        """Whether `version` must stay the newest for now: an evaluation is open, or will be as soon as all
        servers have loaded it. A version made of the next batch would sample the rest of it."""
        return bool(self.rows) and (self.outstanding() or self._due(version))

    def finished(self, version: int) -> None:
        """Open the last one, unless that version already has one."""
        self._open(version, final=True)

    def _open(self, version: int, final: bool) -> None:
        if not self.rows or self._database.one("SELECT 1 FROM evals WHERE version = ?", version):
            return
        self._database.run(
            "INSERT INTO evals (version, final, state) VALUES (?, ?, 'open')", version, int(final)
        )
        for row in range(len(self.rows)):
            self._ledger.enter(f"eval/{version}/{row}", "eval", version, row, turn=row)
        self._ledger.changed = True

    def outstanding(self) -> bool:
        """Whether an evaluation is open."""
        return self._database.one("SELECT 1 FROM evals WHERE state = 'open' LIMIT 1") is not None

    def left(self) -> int:
        """Prompts of open evaluations that are neither scored nor dropped: the next batch waits for them."""
        return self._database.one(
            "SELECT count(*) FROM prompts WHERE kind = 'eval' AND state IN ('queued', 'leased')"
        )

    def record(self, group: Group) -> None:
        """Keep a scored group as lines of eval.jsonl."""
        version, row = _place(group.prompt_id)
        trajectories = group.trajectories
        lines = "".join(_line(version, self.rows[row], group, t) for t in trajectories)
        self._database.run(
            "INSERT INTO eval_groups VALUES (?, ?, ?, ?, ?, ?)",
            *(group.prompt_id, version, row, group.group_id),
            *(json.dumps([t.reward for t in trajectories]), lines),
        )
        self._ledger.move(group.prompt_id, "scored")
        self._close_if_done(version)

    def dropped(self, prompt_id: str) -> None:
        """A prompt left, which may have been the last that an evaluation waited for."""
        if prompt_id.startswith("eval/"):
            self._close_if_done(_place(prompt_id)[0])

    def _close_if_done(self, version: int) -> None:
        """Score an evaluation once nothing of it is queued or leased."""
        left = self._database.one(
            "SELECT 1 FROM prompts WHERE kind = 'eval' AND epoch = ? "
            "AND state IN ('queued', 'leased') LIMIT 1",
            version,
        )
        if left:
            return
        rewards = self._database.run(
            "SELECT rewards FROM eval_groups WHERE version = ? ORDER BY row", version
        )
        results = rates([json.loads(of) for (of,) in rewards])
        self._database.run(
            "UPDATE evals SET state = 'closed', results = ? WHERE version = ? AND state = 'open'",
            *(json.dumps(results), version),
        )
        self._ledger.changed = True

    def results(self) -> dict[int, dict[str, float]]:
        """What `rates` says of the newest evaluated versions. All of them would make each line of the
        buffer's metrics longer than the one before."""
        newest = self._database.run(
            "SELECT version, results FROM evals WHERE state != 'open' ORDER BY version DESC LIMIT ?", SCORES
        ).fetchall()
        return {version: json.loads(results) for version, results in reversed(newest)}

    def write(self) -> bool:
        """Append what closed since the last call to eval.jsonl, and forget it; whether there was anything."""
        closed = self._database.run(
            "SELECT version, final, results FROM evals WHERE state = 'closed' ORDER BY version"
        ).fetchall()
        for version, final, results in closed:
            rows = self._database.run("SELECT lines FROM eval_groups WHERE version = ? ORDER BY row", version)
            summary = {
                "kind": "score",
                "version": version,
                "score": None,  # where every prompt was dropped
                **json.loads(results),
                "prompts": len(self.rows),
                "final": bool(final),
            }
            try:
                self._append("".join(lines for (lines,) in rows) + json.dumps(summary) + "\n")
            except OSError as error:
                if error.errno not in OUT:
                    raise
                return False  # the next transaction tries again
            told = "no prompt was scored" if summary["score"] is None else f"score {summary['score']:.3f}"
            logger.info("evaluation of version %d: %s", version, told)
            self._database.run("UPDATE evals SET state = 'written' WHERE version = ?", version)
            self._database.run("DELETE FROM eval_groups WHERE version = ?", version)
            self._database.run("DELETE FROM prompts WHERE kind = 'eval' AND epoch = ?", version)
        return bool(closed)

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        with self._path.open("ab") as file:
            written, there = self._database.fact("eval_bytes", 0), file.tell()
            if there < written:
                logger.warning(
                    "%s: %d bytes of the %d that were written to it are there: what somebody else removed "
                    "stays lost", self._path, there, written,
                )  # fmt: skip
                text = "\n" * bool(there) + text  # it may have been cut within a line
            file.truncate(min(there, written))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            self._database.set_fact("eval_bytes", file.tell())


def _place(prompt_id: str) -> tuple[int, int]:
    """Version and row of `eval/{version}/{row}`."""
    version, row = prompt_id.split("/")[1:]
    return int(version), int(row)


def _line(version: int, row: Row, group: Group, trajectory: Trajectory) -> str:
    metadata = dict(trajectory.metadata)
    labels = trajectory.versions[trajectory.loss_mask > 0]
    line: dict[str, Any] = {
        "kind": "completion",
        "version": version,
        "prompt_id": group.prompt_id,
        "prompt": row["prompt"],
        "answer": row.get("answer"),
        "index": trajectory.index,
        "completion": metadata.pop("text", ""),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason,
        "sampled_by": [int(labels.min()), int(labels.max())] if len(labels) else [],
        "metadata": metadata,
    }
    return json.dumps(line, ensure_ascii=False, default=str) + "\n"
