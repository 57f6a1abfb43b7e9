"""What one server did and what it waited for, as lines of `run_dir/metrics/rollout-<name>.jsonl`."""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer.records import Group
from buffer.stacks import Stillness
from rollout.engine import Completion
from sync.sink import StagePlan, WeightSink

PERIOD_S = 2.0
CAUSES = ("weights", "scorers", "leases")
"""What a server with no group in hand may wait for, in the order in which it does."""


@dataclass(frozen=True, slots=True)
class Started:
    """When a group was, and what was booked by then."""

    at: float
    held_s: float
    held_squared_s: float


class Meters:
    """Counts since the server started; `line()` also gives rates since the last line.

    Args:
        server: The server's name.
        clock: Seconds, monotonic.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[str] = Counter()
        """Completions and groups that came to nothing, by kind."""
        self.publish_s: defaultdict[str, float] = defaultdict(float)
        """Seconds in `stage` (while decoding), `load` and `pause` (not decoding) of publishes."""
        self.publishes = 0
        self.groups = 0
        self.completions = 0
        self.tokens = 0
        self.wasted_tokens = 0
        """Sampled for nothing: of aborted completions, and of finished ones whose group came to nothing."""
        self._groups_told: list[tuple[float, int, float, float]] = []
        self.version: int | None = None
        self._server = server
        self._clock = clock
        self._running = 0
        self._waiting_s: defaultdict[str, float] = defaultdict(float)
        self._cause, self._booked_until = "weights", clock()
        self._busy_s = self._held_s = self._held_squared_s = 0.0
        """Seconds with any group in hand; those times how many there were, and times its square."""
        self._last_time, self._last_tokens = clock(), 0
        self._last_busy_s = self._last_held_s = 0.0

    def wait_for(self, cause: str) -> None:
        """From now on a server with no group in hand waits for this: one of `CAUSES`."""
        self._book()
        self._cause = cause

    def group_started(self) -> Started:
        self._book()
        self._running += 1
        return Started(self._booked_until, self._held_s, self._held_squared_s)

    def group_ended(self) -> None:
        self._book()
        self._running -= 1

    def delivered(self, group: Group, kept: bool, started: Started) -> None:
        """The buffer has a group that is still in hand, or did not want it."""
        self._book()
        self.groups += 1
        sampled = [int(t.loss_mask.sum()) for t in group.trajectories]
        if not kept:
            self.wasted_tokens += sum(sampled)
        if group.kind == "train":
            seconds = max(self._booked_until - started.at, 1e-9)
            in_hand = (self._held_s - started.held_s) / seconds
            squared = (self._held_squared_s - started.held_squared_s) / seconds
            self._groups_told.append((seconds, max(sampled), in_hand, squared - in_hand**2))

    def completed(self, completion: Completion) -> None:
        self.completions += 1
        self.tokens += len(completion.token_ids)

    def _book(self) -> None:
        """Book the time since the last change: on the groups in hand, or on what the server waited for."""
        now = self._clock()
        passed, self._booked_until = now - self._booked_until, now
        if self._running == 0:
            self._waiting_s[self._cause] += passed
        else:
            self._busy_s += passed
            self._held_s += self._running * passed
            self._held_squared_s += self._running**2 * passed

    def counted(self) -> dict[str, float]:
        """What also goes to the learner (`sync.wire.COUNTED`): tokens, and seconds without generating."""
        self._book()
        return {
            "tokens": self.tokens,
            "wasted_tokens": self.wasted_tokens,
            **{f"waiting_s/{cause}": round(self._waiting_s[cause], 3) for cause in CAUSES},
            "publish_s/pause": round(self.publish_s["pause"], 3),
        }

    def line(self) -> dict[str, Any]:
        counted = self.counted()
        now = self._clock()
        sampled, passed = self.tokens - self._last_tokens, max(now - self._last_time, 1e-9)
        self._last_time, self._last_tokens = now, self.tokens
        groups, self._groups_told = self._groups_told, []
        busy_s, held_s = self._busy_s - self._last_busy_s, self._held_s - self._last_held_s
        self._last_busy_s, self._last_held_s = self._busy_s, self._held_s
        return {
            "time": time.time(),
            "server": self._server,
            "version": self.version,
            "tokens_per_s": round(sampled / passed, 1),
            "running_groups": self._running,
            "busy_s": round(busy_s, 3),
            "groups_in_hand": round(held_s / busy_s, 2) if busy_s else 0.0,
            "groups": self.groups,
            "completions": self.completions,
            **counted,
            # Of every group for training since the last line, from its lease on: how long it took, tokens of
            # its longest completion, and mean and variance of how many groups were in hand meanwhile.
            "group_seconds": [round(seconds, 3) for seconds, *_ in groups],
            "group_tokens": [tokens for _, tokens, *_ in groups],
            "group_in_hand": [round(in_hand, 3) for *_, in_hand, _ in groups],
            "group_in_hand_variance": [round(variance, 3) for *_, variance in groups],
            "publishes": self.publishes,
            **{f"publish_s/{phase}": round(self.publish_s[phase], 3) for phase in ("stage", "load")},
            "reward_timeouts": self.failures["reward_timeout"],
            **{f"failed/{kind}": count for kind, count in sorted(self.failures.items())},
        }

    async def write(self, path: Path, version: Callable[[], int | None], stillness: Stillness) -> None:
        """Append a line every `PERIOD_S`, and a last one when cancelled."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                while True:
                    await asyncio.sleep(PERIOD_S)
                    self._append(file, version())
                    stillness.see(self.version, self.tokens, self.groups)
            finally:
                stillness.end()
                self._append(file, version())

    def _append(self, file: Any, version: int | None) -> None:
        self.version = version
        file.write(json.dumps(self.line()) + "\n")
        file.flush()


class MeteredSink:
    """A WeightSink that books what a publish costs this server."""

    def __init__(self, sink: WeightSink, meters: Meters) -> None:
        self._sink = sink
        self._meters = meters

    @property
    def world_size(self) -> int:
        return self._sink.world_size

    async def stage(self, plan: StagePlan) -> int:
        start = time.monotonic()
        checksum = await self._sink.stage(plan)
        self._meters.publish_s["stage"] += time.monotonic() - start
        return checksum

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        start = time.monotonic()
        pause_s = await self._sink.load(version, loaded)
        self._meters.publish_s["load"] += time.monotonic() - start
        self._meters.publish_s["pause"] += pause_s
        self._meters.publishes += 1
        return pause_s

    async def drop(self) -> None:
        await self._sink.drop()
