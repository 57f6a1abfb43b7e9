"""The pipeline as a discrete-event simulation: servers that generate, the buffer's own rules, one learner.

Pure: no clock but its own, no files.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from buffer.policies import choose, spread
from buffer.staleness import Candidate, Rules, Stock, admissible, oldest_trainable

NEVER = math.inf
COMPLETIONS = 8
"""Of a group whose rewards are drawn."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as measured or assumed.

    Raises:
        ValueError: One is negative or not finite.
    """

    work: tuple[float, ...]
    """Of a group alone on its server: the distribution, drawn from evenly. What makes one group slower than
    those beside it, such as more tokens."""
    contention: float
    """Between 0 and 1: with n groups decoded each takes 1 + contention · (n − 1) times as long as alone. 0
    where the engine decodes many as fast as one, 1 where they share it."""
    train: float
    """Of the learner for each group of a batch."""
    send: float
    """The learner's for sending a version."""
    load: tuple[float, ...]
    """From there until the servers stand still to take it in: the distribution, drawn from evenly."""
    pause: float
    """Of a server at each load; nothing is generated meanwhile."""
    step: float = 0.0
    """Of the learner for each batch, however large: the optimizer's, a checkpoint's share."""
    pace: tuple[float, ...] = (1.0,)
    """So many times as long all groups take that a server has in hand at once: the distribution. Not part of
    `work`, because groups of one length stay abreast of each other however slow their server is."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            wrong = [v for v in (value if isinstance(value, tuple) else (value,)) if not 0 <= v < NEVER]
            if wrong:
                raise ValueError(f"the cost {name!r} is {wrong[0]}; expected a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tried out."""

    servers: int
    max_groups: int
    """That a server has in hand at a time."""
    decoded: int
    """Of these by its engine at a time; the others have no token yet."""
    rules: Rules
    capacity: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the steps after the warm-up."""

    groups_per_second: float
    """Trained."""
    learner_idle: float
    """Share of the time in which the learner waits for a batch."""
    server_idle: float
    """Share of the places for groups, over all servers and the time, that stand empty."""
    staleness_mean: float
    """Over trained completions, by their oldest token, as the learner's `staleness/mean`."""
    staleness_max: int
    evicted: float
    """Share of the delivered groups."""
    work_trained: float
    """Mean work of a trained group over the mean of all: 1 where no length is preferred."""


@dataclass(slots=True)
class Work:
    """A group on its way, with what it costs alone."""

    lease: int
    version: int
    """Published at its lease."""
    work: float
    started: int = -1
    """Version that sampled its first token."""
    priority: float = 0.0
    """Once it is delivered, and where the policy asks for it."""


class Pool(Protocol):
    """The buffer, as far as the simulation goes."""

    def lease(self, limit: int) -> list[Work]: ...
    def deliver(self, group: Work) -> None: ...
    def batch(self, index: int) -> list[Work] | None: ...
    def published(self, version: int) -> None: ...
    def evicted(self) -> int: ...


def drawn_rewards(chance: random.Random) -> list[float]:
    """Of a group whose prompt is as likely to be hard as easy: any number of right answers."""
    right = chance.randint(0, COMPLETIONS)
    return [1.0] * right + [0.0] * (COMPLETIONS - right)


class RulePool:
    """The buffer's rules over lists: what the store does, without it."""

    def __init__(self, rules: Rules, capacity: int, work: Sequence[float], seed: int) -> None:
        self._rules = rules
        self._capacity = capacity
        self._chance, self._luck = random.Random(seed), random.Random(seed)
        self._work = work
        self._seed = seed
        self._again: list[float] = []
        self._leased: dict[int, Work] = {}
        self._stored: dict[int, tuple[Work, int, int]] = {}
        self._on_lease = Counter[int]()
        """Leases, by the version at theirs."""
        self._unused = Counter[int]()
        """Stored and in no batch yet, by the oldest version."""
        self._frontier = 0
        self._published: int | None = None
        self._turn = self._evicted = self._sequence = self._kept = 0
        self._checked = (-1, 0)
        """For which batch, and below which sequence, no stored group is too old."""

    def lease(self, limit: int) -> list[Work]:
        kept = self._kept
        stock = Stock(len(self._leased), len(self._stored) - kept, self._frontier, self._published, kept)
        return [self._lend() for _ in range(min(limit, admissible(stock, self._rules, self._capacity)))]

    def _lend(self) -> Work:
        assert self._published is not None
        work = self._again.pop(0) if self._again else self._chance.choice(self._work)
        lease = Work(self._turn, self._published, work)
        self._leased[lease.lease] = lease
        self._on_lease[lease.version] += 1
        self._turn += 1
        return lease

    def deliver(self, group: Work) -> None:
        del self._leased[group.lease]
        self._on_lease[group.version] -= 1
        if self._rules.policy == "priority":
            group.priority = spread(drawn_rewards(self._luck))
        self._stored[self._sequence] = (group, group.started, 0)
        self._unused[group.started] += 1
        self._sequence += 1

    def batch(self, index: int) -> list[Work] | None:
        self._evict(index)
        if len(self._stored) < self._rules.groups_per_batch or self._awaits_last_turn(index):
            return None
        stored = [
            Candidate(s, g.lease, oldest, uses, g.priority) for s, (g, oldest, uses) in self._stored.items()
        ]
        leased = [lease.version for lease in self._leased.values()]
        chosen = choose(stored, leased, index, self._rules, self._seed)
        if not chosen:
            return None
        self._frontier = index + 1
        taken = [self._stored[c.sequence][0] for c in chosen]
        for candidate in chosen:
            group, oldest, uses = self._take(candidate.sequence)
            if uses + 1 < self._rules.max_uses:
                self._stored[candidate.sequence] = (group, oldest, uses + 1)
                self._kept += 1
        return taken

    def _take(self, sequence: int) -> tuple[Work, int, int]:
        group, oldest, uses = self._stored.pop(sequence)
        self._kept -= uses > 0
        self._unused[oldest] -= uses == 0
        return group, oldest, uses

    def _awaits_last_turn(self, index: int) -> bool:
        """What `choose` would find out at length: a group is on lease that may be in no later batch, and this
        one has room for it."""
        last = oldest_trainable(index, self._rules.max_staleness)
        due = self._on_lease[last]
        return self._rules.keeps_turns and 0 < due <= self._rules.groups_per_batch - self._unused[last]

    def _evict(self, index: int) -> None:
        """What is too old for the batch; groups that were looked at for it before are not again."""
        floor = oldest_trainable(index, self._rules.max_staleness)
        since = self._checked[1] if index == self._checked[0] else 0
        fresh = range(since, self._sequence) if since else list(self._stored)
        for sequence in fresh:
            if sequence not in self._stored or self._stored[sequence][1] >= floor:
                continue
            group, _, uses = self._take(sequence)
            if not uses:
                self._evicted += 1
                self._again.append(group.work)
        self._checked = (index, self._sequence)

    def published(self, version: int) -> None:
        self._published = version

    def evicted(self) -> int:
        return self._evicted


@dataclass(slots=True)
class Server:
    """Groups that are decoded share its speed evenly: each has had `progress − its start` of its work. What
    is said of it is true of the time `at`."""

    max_groups: int
    decoded: int
    contention: float
    draw_pace: Callable[[], float]
    version: int = 0
    progress: float = 0.0
    paused_until: float = 0.0
    empty_s: float = 0.0
    """Places for groups times the seconds they stood empty."""
    decoding: list[tuple[float, int, Work]] = field(default_factory=list)
    """By when they end."""
    waiting: deque[Work] = field(default_factory=deque)
    """For the engine, in order."""
    pace: float = 1.0
    paced: int = 0
    """So many groups more end at this pace."""
    at: float = 0.0
    changes: int = 0
    """So many times what it will do next has changed."""

    @property
    def held(self) -> int:
        return len(self.decoding) + len(self.waiting)

    def speed(self) -> float:
        """While it decodes."""
        return 1.0 / (self.pace * (1.0 + self.contention * (len(self.decoding) - 1)))

    def advance(self, now: float) -> None:
        self.empty_s += (now - self.at) * (self.max_groups - self.held)
        running = now - max(self.at, min(self.paused_until, now))
        if self.decoding:
            self.progress += running * self.speed()
        self.at = now

    def take(self, group: Work) -> None:
        if len(self.decoding) >= self.decoded:
            self.waiting.append(group)
            return
        if not self.paced:
            self.pace, self.paced = self.draw_pace(), min(self.max_groups, self.decoded)
        group.started = self.version
        heappush(self.decoding, (self.progress + group.work, group.lease, group))

    def next_end(self) -> float:
        left = max(0.0, self.decoding[0][0] - self.progress)
        # What is done as the server stops has no token left to wait for.
        return max(self.at, self.paused_until) + left / self.speed() if left else self.at

    def finish(self) -> Work:
        ends, _, group = heappop(self.decoding)
        self.progress = max(self.progress, ends)
        self.paced = max(0, self.paced - 1)
        if self.waiting:
            self.take(self.waiting.popleft())
        return group


class Simulation:
    """One setting; `run` makes its steps.

    Args:
        costs: In seconds.
        setting: What is tried out.
        pool: The buffer.
        seed: Of loads and paces; those of work are the pool's.

    Raises:
        ValueError: Groups take no time at all.
    """

    def __init__(self, costs: Costs, setting: Setting, pool: Pool, seed: int = 1) -> None:
        if not max(costs.work):
            raise ValueError("generating takes 0 s, of every group that was measured; expected more")
        self.now = 0.0
        self._costs = costs
        self._setting = setting
        self._pool = pool
        self._chance = random.Random(seed)
        self._servers = [
            Server(setting.max_groups, setting.decoded, costs.contention, self._pace)
            for _ in range(setting.servers)
        ]
        # Of servers by number, each entry with the count of changes that it is of; others are void.
        self._ends: list[tuple[float, int, int]] = []
        self._rooms = [(0, number, 0) for number in range(setting.servers)]
        self._loaded_at = NEVER
        self._generated_at = 0.0
        """When the servers go on after the newest load."""
        self._loading = 0
        self._delivered = 0
        self.ages: list[int] = []
        """Of every group trained, in versions."""
        self.worked: list[float] = []
        """Work of every group trained."""
        self.generated: list[float] = []
        """And of every group generated."""

    def run(self, steps: int, warm_up: int) -> Outcome:
        """Make `warm_up` steps, then `steps` that are measured."""
        self._pool.published(0)
        idle = began = 0.0
        empty = evicted = delivered = 0.0
        for index in range(warm_up + steps):
            if index == warm_up:
                began, idle = self.now, 0.0
                empty, evicted = self._empty(), self._pool.evicted()
                delivered, skipped = self._delivered, len(self.ages)
                skipped_work, skipped_generated = len(self.worked), len(self.generated)
            asked = self.now
            batch = self._await_batch(index)
            idle += self.now - asked
            self.ages += [index - group.started for group in batch]
            self.worked += [group.work for group in batch]
            self._pass(self._costs.train * len(batch) + self._costs.step)
            self._settle()
            self._pass(self._costs.send)
            self._loading = index + 1
            self._loaded_at = self.now + self._chance.choice(self._costs.load)
        seconds = max(self.now - began, 1e-12)
        ages, worked, generated = self.ages[skipped:], self.worked[skipped_work:], self.generated
        generated = generated[skipped_generated:] or generated
        places = self._setting.servers * self._setting.max_groups
        return Outcome(
            groups_per_second=len(ages) / seconds,
            learner_idle=idle / seconds,
            server_idle=(self._empty() - empty) / (seconds * places),
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
            evicted=(self._pool.evicted() - evicted) / max(1.0, self._delivered - delivered),
            work_trained=(sum(worked) / len(worked)) / (sum(generated) / len(generated)),
        )

    def _pace(self) -> float:
        return self._chance.choice(self._costs.pace)

    def _empty(self) -> float:
        for server in self._servers:
            server.advance(self.now)
        return sum(server.empty_s for server in self._servers)

    def _await_batch(self, index: int) -> list[Work]:
        while True:
            self._fill()
            batch = self._pool.batch(index)
            if batch is not None:
                self._fill()
                return batch
            if self._next() == NEVER:
                raise RuntimeError(f"batch {index} can never be made: nothing is on its way")
            self._step(NEVER)

    def _pass(self, seconds: float) -> None:
        until = self.now + seconds
        while self._next() <= until:
            self._step(until)
            self._fill()
        self.now = until

    def _settle(self) -> None:
        """Wait until the servers generate with the version before."""
        while self._loaded_at != NEVER:
            self._step(NEVER)
            self._fill()
        self._pass(max(0.0, self._generated_at - self.now))

    def _next(self) -> float:
        return min(self._loaded_at, self._first(self._ends, NEVER)[0])

    def _first(self, heap: list[Any], nothing: float) -> tuple[float, int]:
        """The first entry that is still true, and its server."""
        while heap and heap[0][2] != self._servers[heap[0][1]].changes:
            heappop(heap)
        return heap[0][:2] if heap else (nothing, -1)

    def _changed(self, number: int) -> None:
        """Of a server that is at this moment."""
        server = self._servers[number]
        server.changes += 1
        heappush(self._rooms, (server.held, number, server.changes))
        if server.decoding:
            heappush(self._ends, (server.next_end(), number, server.changes))

    def _step(self, until: float) -> None:
        """The next event, if it comes by then: a version is loaded, or a group is done."""
        ends, number = self._first(self._ends, NEVER)
        if self._loaded_at <= ends:
            self.now = min(until, self._loaded_at)
            self._generated_at = self.now + self._costs.pause
            for each, server in enumerate(self._servers):
                server.advance(self.now)
                server.version = self._loading
                server.paused_until = self._generated_at
                self._changed(each)
            self._pool.published(self._loading)
            self._loaded_at = NEVER
            return
        self.now = min(until, ends)
        self._servers[number].advance(self.now)
        group = self._servers[number].finish()
        self._changed(number)
        self._delivered += 1
        self.generated.append(group.work)
        self._pool.deliver(group)

    def _fill(self) -> None:
        """Servers with room take leases, the emptiest first."""
        while True:
            held, number = self._first(self._rooms, NEVER)
            if held >= self._setting.max_groups:
                return
            leases = self._pool.lease(1)
            if not leases:
                return
            self._servers[number].advance(self.now)
            self._servers[number].take(leases[0])
            self._changed(number)


def simulate(costs: Costs, setting: Setting, steps: int = 120, warm_up: int = 20, seed: int = 1) -> Outcome:
    """What a setting comes to."""
    pool = RulePool(setting.rules, setting.capacity, costs.work, seed)
    return Simulation(costs, setting, pool, seed).run(steps, warm_up)
