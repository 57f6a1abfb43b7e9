"""One row a step, put together on every rank and written on global rank 0."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from buffer.records import Batch
from learner.alarms import Alarms
from learner.config import LearnerExperiment
from learner.metrics import Journal, Row, StepReport, Timings, batch_row
from sync.publisher import PublishReport

logger = logging.getLogger(__name__)


class Reporter:
    """Owns the step's clock; `write` is collective."""

    def __init__(
        self,
        journal: Journal | None,
        experiment: LearnerExperiment,
        counted: Callable[[], Mapping[str, float]],
        wasted: Callable[[], int],
    ) -> None:
        """Args:
        journal: On global rank 0; None elsewhere.
        counted: What all rollout servers together counted so far; asked on global rank 0.
        wasted: Tokens of groups that the buffer gave up since it was asked last; likewise.
        """
        self._journal = journal
        self._max_staleness = experiment.buffer.max_staleness
        self._samples_every = experiment.logging.samples_every
        self._counted, self._counted_before = counted, counted()
        self._wasted = wasted
        # Of groups that were recorded ρ tells nothing: no weights of this run sampled them.
        self._alarms = None if experiment.rollout.recorded is not None else alarms_of(experiment)
        self.timed = Timings()
        self._started = time.perf_counter()

    def write(
        self,
        step: int,
        shard: Batch,
        report: StepReport,
        published: PublishReport | None,
        own: Mapping[str, float],
    ) -> None:
        """Report the batch that became version `step`, and what was spent since the last report.

        Args:
            own: More numbers, of a loop of the user's; their names go behind `own/`.
        """
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        about = batch_row(shard, self._max_staleness)
        row: Row = {
            "step": step,
            "time": time.time(),
            **about,
            **report.row(),
            **self.timed.take(),
            "time/step": seconds,
            "samples/s": about["samples"] / seconds,
            "tokens/s": about["all_tokens"] / seconds,
            **sync_row(published),
            **self._servers_row(),
            "buffer/wasted_tokens": self._wasted(),
            **{f"own/{name}": float(value) for name, value in own.items()},
        }
        if self._journal is None:
            return
        self._journal.write(row)
        logger.info(
            "step %d: reward %.3f loss %.4f grad norm %.3f staleness %.2f rho %.3f ess %.3f | %d tokens, "
            "%.1f s (%.1f waiting), %.1f samples/s",
            *(row[k] for k in ("step", "reward/mean", "loss", "grad_norm", "staleness/mean")),
            *(math.nan if row[k] is None else row[k] for k in ("rho/mean", "ess")),
            *(row[k] for k in ("tokens", "time/step", "time/wait_batch", "samples/s")),
        )
        if self._alarms is not None:
            left_out = row["mask_fraction"] + row["veto_fraction"]
            for line in self._alarms.hear(step, row["ess"], row["rho/bounded"], left_out):
                logger.warning(line)
        if step % self._samples_every == 0 or step == 1:
            self._journal.write_samples(step, shard.groups)

    def _servers_row(self) -> dict[str, float]:
        """What the servers counted since the last report; their seconds are a sum over them."""
        before, self._counted_before = self._counted_before, self._counted()
        return {
            f"servers/{name}": round(count - before[name], 3) for name, count in self._counted_before.items()
        }

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def sync_row(published: PublishReport | None) -> dict[str, Any]:
    """Of the newest version that the servers have loaded; it may be the one before this step's."""
    if published is None:
        return {}
    return {
        "sync/version": published.version,
        "sync/members": len(published.members),
        "sync/lost": len(published.lost),
        "sync/bytes": published.size_bytes,
        "sync/transfer_seconds": published.transfer_seconds,
        "sync/load_seconds": published.load_seconds,
        "sync/arrival_seconds": published.arrival_seconds,
        "sync/pause_seconds": published.pause_seconds,
    }


def alarms_of(experiment: LearnerExperiment) -> Alarms:
    of = experiment.algorithm
    bounded = of.correction.taper or of.correction.cap is not None
    return Alarms(experiment.model.dtype, weighs=of.weight_level != "none" and not bounded)
