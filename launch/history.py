"""What a run has written so far, read back: metrics and evaluations, for the screen and the report."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Tail:
    """Reads the lines that were added to a JSONL file since the last look; a half-written line waits."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0

    def new(self) -> list[Record]:
        if not self.path.exists():
            return []
        if self.path.stat().st_size < self.offset:
            self.offset = 0  # cut by its writer, who had crashed before it knew what it had written
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
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return record if isinstance(record, dict) else None


@dataclass
class History:
    """Everything known of one run folder. `refresh` reads what is new."""

    run_dir: Path
    steps: dict[int, Record] = field(default_factory=dict)
    """Learner metrics by step; a step made again after a restart replaces the first one."""
    buffer: list[Record] = field(default_factory=list)
    servers: dict[str, list[Record]] = field(default_factory=dict)
    scores: dict[int, Record] = field(default_factory=dict)
    """Evaluation score lines by policy version; none where every prompt was dropped."""
    completions: dict[int, dict[tuple[str, int], Record]] = field(default_factory=dict)
    """Evaluated completions by policy version, then by prompt id and index."""
    _tails: dict[Path, Tail] = field(default_factory=dict)

    def refresh(self) -> list[Record]:
        """Returns: the learner's step records that are new."""
        fresh = self._new("metrics.jsonl")
        self.steps |= {int(r["step"]): r for r in fresh if "step" in r}
        self.buffer += self._new("metrics/buffer.jsonl")
        for path in sorted((self.run_dir / "metrics").glob("rollout-*.jsonl")):
            name = path.stem.removeprefix("rollout-")
            self.servers.setdefault(name, []).extend(self._new(f"metrics/{path.name}"))
        for record in self._new("eval.jsonl"):
            self._take_evaluation(record)
        return [r for r in fresh if "step" in r]

    @property
    def last(self) -> Record:
        return self.steps[max(self.steps)] if self.steps else {}

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a learner metric, where it was written."""
        found = [(s, float(r[key])) for s, r in sorted(self.steps.items()) if r.get(key) is not None]
        return [s for s, _ in found], [v for _, v in found]

    def _new(self, name: str) -> list[Record]:
        path = self.run_dir / name
        return self._tails.setdefault(path, Tail(path)).new()

    def _take_evaluation(self, record: Record) -> None:
        version = int(record.get("version", 0))
        if record.get("kind") == "completion":
            key = (str(record.get("prompt_id")), int(record.get("index", 0)))
            self.completions.setdefault(version, {})[key] = record
        elif record.get("score") is not None:
            self.scores[version] = record
