"""One row a step: what the trainer found, what was left out, and where the time went."""

import logging
import time

from learner.collectives import sum_over_data
from learner.metrics import Journal, Timings
from learner.offline.feed import RULES, Share
from learner.offline.stages import Row

logger = logging.getLogger(__name__)

TOLD = ("loss", "accuracy", "margin", "grad_norm", "eval/loss", "eval/accuracy", "eval/margin")


class OfflineReporter:
    """Owns the step's clock; `write` is collective."""

    def __init__(self, journal: Journal | None) -> None:
        """Args:
        journal: On global rank 0; None elsewhere.
        """
        self._journal = journal
        self.timed = Timings()
        self._started = time.perf_counter()

    def write(self, step: int, steps: int, found: Row, share: Share | None = None) -> None:
        """Report step `step` and what was spent since the last report; step 0 is what was before the first.

        Args:
            step: How many are made.
            steps: How many there will be.
            found: The same on all ranks.
            share: This rank's rows, for what was left out of them.
        """
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        names = (*RULES, "cut")
        counts = sum_over_data([share.counts[name] if share else 0 for name in names])
        left_out = {f"left_out/{name}": int(n) for name, n in zip(names, counts, strict=True)}
        row = {"step": step, "steps": steps, "time": time.time(), **found, **left_out, **self.timed.take()}
        row |= {"time/step": seconds, "tokens/s": found.get("all_tokens", 0) / seconds}
        if self._journal is not None:
            self._journal.write(row)
            told = " ".join(f"{name} {row[name]:.4f}" for name in TOLD if row.get(name) is not None)
            logger.info("step %d of %d: %s | %.1f s, %.0f tokens/s", step, steps, told, seconds,
                        row["tokens/s"])  # fmt: skip

    def amend(self, step: int, found: Row) -> None:
        """Add what was found since to the row of a step that is the last now, and was made by an earlier
        start."""
        if self._journal is not None and (row := self._journal.row(step)) is not None:
            self._journal.write(row | {"steps": step, **found})

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
