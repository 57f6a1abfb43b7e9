"""The main loop of a learner that sleeps where it would train: what measures the servers alone.

Everything else is real: batches come from the buffer, and every version, whose weights are the first one's,
is published. What it was given is recorded, to be given to a learner that is measured alone.
"""

import time
from pathlib import Path

from buffer.recording import append_groups
from learner import parallel
from learner.config import RECORDED
from learner.flow import Flow
from learner.metrics import StepReport


def sleep_through(flow: Flow) -> None:
    """As `learner.loop.train`, with `learner.idle_s` of sleep for every batch, and no checkpoints.

    Consumes, waits for, unblocked by: as there.
    """
    seconds = flow.experiment.learner.idle_s
    assert seconds is not None
    path = Path(flow.experiment.run_dir) / RECORDED / f"{parallel.dp_rank()}.groups"
    for batch in flow.batches():
        if parallel.rank() == parallel.model_parallel_source():
            append_groups(path, batch.groups)
        time.sleep(seconds)
        flow.publish()
        flow.report(batch, StepReport(lr=0.0))
