"""The buffer service: opens the run's store, serves it, writes its numbers, ends when the run is over or it
is told."""

import asyncio
import json
import logging
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from buffer.bounds import bounds_of
from buffer.commits import happens
from buffer.config import BufferExperiment
from buffer.errors import DiskFailed, Fruitless, StoreDamaged
from buffer.keys import server_keys
from buffer.ledger import MOST_EQUAL
from buffer.prompts import EVAL_SEED, load_rows, open_prompts
from buffer.run_lock import RunLock
from buffer.server import BufferServer
from buffer.stacks import ACHIEVED, Stillness
from buffer.store import Sources, Store

logger = logging.getLogger(__name__)

REPORT_S = 2.0


def run(experiment: BufferExperiment) -> None:
    """Serve until the run is over, or SIGINT or SIGTERM.

    Raises:
        ValueError: The user's mistakes, one line each: data, address, run folder.
        DiskFailed: The run folder cannot be written any more.
        StoreDamaged: The store cannot be read any more.
        Fruitless: Every prompt is given up, no row can be read any more, or no group has rewards that differ
            under dynamic sampling.
    """
    run_dir = Path(experiment.run_dir)
    try:
        lock = RunLock(run_dir, "buffer")
        try:
            sources = _sources(experiment)  # while Ctrl-C still ends the process: large files take minutes
            uvloop.run(_serve(experiment, run_dir, sources))
        finally:
            lock.release()
    except (ExceptionGroup, OSError, sqlite3.DatabaseError) as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if type(cause) is sqlite3.DatabaseError:  # sqlite's own word for it; its subclasses mean other things
            raise StoreDamaged(
                f"{run_dir / 'buffer.sqlite'}: {cause}: it is damaged. Bring back a copy of it, and of the "
                "checkpoints that were there with it, or use another run_dir"
            ) from error
        if not isinstance(cause, OSError | sqlite3.OperationalError):
            raise
        raise DiskFailed(
            f"{run_dir}: {cause}; what was acknowledged is kept: mend that and start the buffer again"
        ) from error


async def _serve(experiment: BufferExperiment, run_dir: Path, sources: Sources) -> None:
    """Consumes requests (in the server's tasks); waits for the next report; unblocked by time or a signal."""
    stop = _stop_on_signals()
    keys = server_keys(experiment.security.keys, "buffer")
    store = Store(run_dir, experiment.name, experiment.buffer, sources, time.monotonic)
    store.reopen(experiment.learner.steps)
    server = BufferServer(
        store,
        run_dir / "buffer.sqlite",
        experiment.name,
        experiment.buffer,
        keys,
        bounds_of(experiment.model),
    )
    logger.info(
        "buffer of %s is up at %s, %d prompts; waiting for the learner and for rollout servers",
        experiment.name,
        experiment.buffer.address,
        len(store.ledger.queue.rows),
    )
    report = Report(run_dir / "metrics" / "buffer.jsonl")
    stillness = Stillness(experiment.logging.stalled_s)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.run())
        while not stop.is_set():
            await happens(stop, REPORT_S)
            status = await server.status()
            report.write(status)
            stillness.see(*(status[key] for key in ACHIEVED))
            if server.may_end(status["over"]) or status["hopeless"]:
                stop.set()
        serving.cancel()
    stillness.end()
    server.close()
    store.close()
    report.close()
    if status["hopeless"]:
        raise Fruitless(fruitless(status))
    logger.info("buffer of %s ends: %s", experiment.name, "the run is over" if status["over"] else "stopped")


def fruitless(status: dict[str, Any]) -> str:
    """Why a buffer that is hopeless ends, in one line."""
    if status["gone"] is not None:
        return (
            f"the last {status['unreadable']} prompts could not be read ({status['gone']}): the data is not "
            "what it was when the run began. Put it back and start the buffer again, or use another run_dir"
        )
    if status["equal"] >= MOST_EQUAL:
        low, high = status["equal_rewards"]
        return (
            f"the completions of each of the last {status['equal']} groups were all rewarded alike "
            f"({low:g} to {high:g}), and buffer.dynamic_sampling drops such groups, so that no batch comes "
            "of them: mend rollout.rewards or take prompts of other difficulty, raise rollout.group_size or "
            "rollout.sampling.temperature, or turn buffer.dynamic_sampling off"
        )
    causes = ", ".join(f"{name} {n}" for name, n in sorted(status["failed"].items()))
    if status["barren"]:
        dropped = ", ".join(f"{name} {n}" for name, n in sorted(status["dropped"].items())) or "none"
        return (
            f"the data ended before the first batch: {status['stored']} came of the "
            f"buffer.groups_per_batch={status['groups_per_batch']} groups that one takes; dropped prompts: "
            f"{dropped}; failures: {causes or 'none'}. The logs of the rollout servers say why prompts "
            "failed, under `gave up prompt`. Mend that and raise data.epochs, or use another run_dir"
        )
    return (
        f"the last {status['fruitless']} prompts were all given up ({causes} in the whole run) and no group "
        "came: the logs of the rollout servers say why, under `gave up prompt`. Mend that and start the "
        "buffer again"
    )


def _sources(experiment: BufferExperiment) -> Sources:
    data, evaluation = experiment.data, experiment.eval
    queue, temperature = open_prompts(data, experiment.seed), experiment.rollout.sampling.temperature
    if evaluation is None:
        return Sources(queue, [], None, experiment.seed, temperature)
    rows = load_rows(evaluation.source, experiment.seed + EVAL_SEED)
    return Sources(queue, rows, evaluation.every, experiment.seed, temperature)


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second one ends the process as it would any other."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def first(number: signal.Signals) -> None:
        logger.info("%s: stopping", number.name)
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first, number)
    return stop


class Report:
    """metrics/buffer.jsonl: one line of numbers every time, with rates since the line before.

    Args:
        clock: Seconds, monotonic: the wall clock, which each line is dated by, may be set meanwhile.
    """

    RATES = (
        "groups_in",
        "groups_out",
        "trajectories_in",
        "bytes_in",
        "bytes_out",
        "requests",
        "transactions",
    )

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")  # kept: a service that is out of file handles goes on writing
        self._clock = clock
        self._last: dict[str, Any] = {}
        self._since = 0.0

    def write(self, status: dict[str, Any]) -> None:
        line, now = {"time": time.time(), **status}, self._clock()
        if self._last:
            seconds = max(now - self._since, 1e-9)
            line["per_second"] = {n: round((line[n] - self._last[n]) / seconds, 3) for n in self.RATES}
        self._last, self._since = line, now
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
