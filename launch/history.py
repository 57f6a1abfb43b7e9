"""What a run has written so far, read back: metrics and evaluations, for the screen and the report."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer.fields import is_count
from learner.config import DATA_END

Record = dict[str, Any]


class Tail:
    """Reads the lines that were added to a JSONL file since the last look; a half-written line waits."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self._file_id = 0

    def rewritten(self) -> bool:
        """Whether the file is another one than at the last look, or shorter: it is then read from its start.

        A service that resumes cuts off what it will write again.
        """
        if not self.path.exists():
            return False
        found = self.path.stat()
        changed = self.offset > 0 and (found.st_ino != self._file_id or found.st_size < self.offset)
        self._file_id = found.st_ino
        if changed:
            self.offset = 0
        return changed

    def new(self) -> list[Record]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self.offset += len(whole) + 1
        return [record for line in whole.splitlines() if (record := _parse(line)) is not None]


def _parse(line: bytes) -> Record | None:
    """A service killed in the middle of a line leaves half of it before the next one: it is skipped."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and all(fits(record.get(key, 0)) for key, fits in FIELDS.items())
    return record if known else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


CHANGES = "changes.jsonl"
LARGEST = 1e18
LIVE_LINES = 100
"""More than anybody looks back at in a run under way."""
FIELDS = {"step": is_count, "version": is_count, "index": is_count, "time": _is_number}
"""What a line has if it has it at all; in another it is something else."""


@dataclass
class History:
    """Everything known of one run folder. `refresh` reads what is new."""

    run_dir: Path
    live: bool = False
    """For who watches a run as it goes, for as long as it does: of the services only the newest lines are
    kept, and no completions."""
    steps: dict[int, Record] = field(default_factory=dict)
    """Learner metrics by step; a step made again after a restart replaces the first one."""
    buffer: list[Record] = field(default_factory=list)
    servers: dict[str, list[Record]] = field(default_factory=dict)
    reference: list[Record] = field(default_factory=list)
    """Of a reference on ranks of its own."""
    value: list[Record] = field(default_factory=list)
    """Of a value model on ranks of its own."""
    changes: list[Record] = field(default_factory=list)
    """Of the configuration, at starts behind the first step: `step` and `changes`."""
    scores: dict[int, Record] = field(default_factory=dict)
    """Evaluation score lines by policy version; none where every prompt was dropped."""
    completions: dict[int, dict[tuple[str, int], Record]] = field(default_factory=dict)
    """Evaluated completions by policy version, then by prompt id and index."""
    opened: float = field(default_factory=time.time)
    _tails: dict[str, Tail] = field(default_factory=dict)

    def refresh(self) -> list[Record]:
        """Returns: the learner's records of steps that were not known."""
        known = dict(self.steps)
        if self._tail("metrics.jsonl").rewritten():
            self.steps.clear()
        self._tail("eval.jsonl").rewritten()
        records = {int(r["step"]): r for r in self._tail("metrics.jsonl").new() if "step" in r}
        self.steps |= records
        self.changes += [r for r in self._tail(CHANGES).new() if "step" in r and _is_texts(r.get("changes"))]
        self._add(self.buffer, "buffer")
        self._add(self.reference, "reference")
        self._add(self.value, "value")
        for path in sorted((self.run_dir / "metrics").glob("rollout-*.jsonl")):
            self._add(self.servers.setdefault(path.stem.removeprefix("rollout-"), []), path.stem)
        for record in self._tail("eval.jsonl").new():
            self._take_evaluation(record)
        # After a rewrite the steps that stayed are read again.
        return [record for step, record in records.items() if record != known.get(step)]

    @property
    def data_end(self) -> int | None:
        """The last step, where the data ended behind it and no other was made since."""
        path, last = self.run_dir / DATA_END, max(self.steps, default=0)
        if not path.is_file():
            return None
        found = _parse(path.read_bytes())
        return last if found is not None and found.get("step") == last else None

    def since_opened(self, lines: list[Record]) -> list[Record]:
        """Those written after this history was opened, not by an earlier start of the run."""
        return [line for line in lines if float(line.get("time", 0)) >= self.opened]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a learner metric, where it was written."""
        found = [(s, float(r[key])) for s, r in sorted(self.steps.items()) if _is_number(r.get(key))]
        return [s for s, _ in found], [v for _, v in found]

    def _add(self, lines: list[Record], name: str) -> None:
        lines += self._tail(f"metrics/{name}.jsonl").new()
        if self.live:
            del lines[:-LIVE_LINES]

    def _tail(self, name: str) -> Tail:
        return self._tails.setdefault(name, Tail(self.run_dir / name))

    def _take_evaluation(self, record: Record) -> None:
        version = int(record.get("version", 0))
        if record.get("kind") == "completion":
            if self.live:
                return
            key = (str(record.get("prompt_id")), int(record.get("index", 0)))
            self.completions.setdefault(version, {})[key] = record
        elif _is_number(record.get("score")):
            self.scores[version] = record
