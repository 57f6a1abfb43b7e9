"""The store: which prompt is where, which groups are kept, what each batch is made of. All survives kill -9.

The rules of leasing, delivery, eviction and batching over `buffer/database.py`'s tables; no sockets, no
threads, and the clock comes from outside. Every call belongs inside `transaction()`, and what it says holds
once that returned.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer import assembly
from buffer.assembly import Assembled
from buffer.belongings import claim
from buffer.config import BufferConfig
from buffer.database import Database, under
from buffer.dotted import is_dotted, resolve
from buffer.errors import BadMessage, DataExhausted, RunFinished
from buffer.evaluations import EVALUATIONS, Evaluations
from buffer.groups import Delivery
from buffer.ledger import Ledger
from buffer.policies import ADVANTAGE, priority
from buffer.prompts import PromptQueue, Row
from buffer.records import GivenUp, Lease
from buffer.settled import settle
from buffer.staleness import Stock, admissible, oldest_trainable
from buffer.starvation import starvation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """What the store hands out: training prompts in order, and evaluation rows (none: nothing is
    evaluated)."""

    queue: PromptQueue
    eval_rows: list[Row]
    eval_every: int | None
    seed: int = 0
    """The run's."""
    temperature: float = 1.0
    """That training completions are sampled at."""


class Store:
    """Reads `config` for its rules. One thread at a time."""

    def __init__(
        self,
        run_dir: Path | None,
        run_id: str,
        config: BufferConfig,
        sources: Sources,
        clock: Callable[[], float],
    ) -> None:
        """Open or resume. `run_dir` None keeps everything in memory.

        Raises:
            ValueError: The file belongs to another run, the data or its order changed since the run began, or
                there is no such function as `config.priority`.
        """
        if is_dotted(config.priority or ADVANTAGE):
            resolve(str(config.priority))
        self.database = Database(run_dir / "buffer.sqlite" if run_dir else None)
        self._config = config
        self._rules = config.rules
        self._seed = sources.seed
        self._temperature = sources.temperature
        with self.transaction():
            claim(self.database, run_id, sources.queue, sources.eval_rows, sources.temperature)
        self.ledger = Ledger(self.database, sources.queue, sources.eval_rows, config.lease_timeout_s, clock)
        path = run_dir / EVALUATIONS if run_dir else None
        self.evaluations = Evaluations(
            self.database, self.ledger, sources.eval_rows, sources.eval_every, path
        )
        self._stock_changed = False
        self._barren = False
        """Whether the data ended before the first batch."""

    def transaction(self) -> AbstractContextManager[None]:
        """All calls within are durable together once it returned."""
        return self.database.transaction()

    def close(self) -> None:
        self.database.close()

    def take_changes(self) -> tuple[bool, bool]:
        """Since the last call: whether a waiting lease may be granted now, and whether a waiting batch may
        be."""
        changes = self.ledger.changed, self._stock_changed
        self.ledger.changed = self._stock_changed = False
        return changes

    # Leases

    def lease(self, name: str, request_id: str, max_groups: int) -> list[Lease]:
        """Lend up to `max_groups` prompts to server `name`; the same request always gets the same answer.

        Raises:
            RunFinished: The run is over.
        """
        again = self.ledger.lent_for(request_id)
        if again:
            return again
        if self.over():
            raise RunFinished("the run is finished")
        published = self.database.fact("published")
        if published is None:
            return []
        # Evaluation goes first and outside admission: it is never trained, so it cannot be too old.
        drawn = [("eval", *prompt) for prompt in self.ledger.queued("eval", max_groups)]
        if not self.finished() and not self.ledger.gone():
            room = min(max_groups - len(drawn), self.room())
            drawn += [("train", *prompt) for prompt in self.ledger.draw(room)]
        lent = [self.ledger.lend(name, request_id, published, *prompt) for prompt in drawn]
        if None in lent:
            self._stock_changed = True  # the data may be exhausted by it
        return [lease for lease in lent if lease is not None]

    def renew(self, lease_ids: list[str]) -> set[str]:
        """Give live leases their full time again; returns those that are nobody's any more."""
        return self.ledger.renew(lease_ids)

    def start(self, name: str) -> int:
        """Server `name` was started and holds nothing: put the prompts of its leases back into the queue, on
        which nobody works since its former life ended; how many."""
        return self._take_back(self.ledger.lent_to(name), "server_started")

    def expire(self) -> int:
        """Put the prompts of leases that ran out back into the queue; how many."""
        return self._take_back(self.ledger.late(), "timeout")

    def _take_back(self, lease_ids: list[str], cause: str) -> int:
        for lease_id in lease_ids:
            prompt_id = self.ledger.end(lease_id)
            assert prompt_id is not None, "a lease that is not live"
            self.ledger.requeue(prompt_id, cause)
            self._stock_changed = True  # a batch may have waited for it
        return len(lease_ids)

    def give_up(self, lease_id: str, reason: str, requeue: bool) -> GivenUp | None:
        """A group failed at its server. Without effect, and None, when the lease is not live any more."""
        prompt_id = self.ledger.end(lease_id)
        if prompt_id is None:
            return None
        self._stock_changed = True  # a batch may have waited for it, or the data may be exhausted by it
        outcome = self.ledger.fail(prompt_id, reason, requeue)
        if not outcome.queued:
            self.evaluations.dropped(prompt_id)
        return outcome

    # Groups

    def deliver(self, delivery: Delivery) -> bool:
        """Keep a group; False when there is nothing to keep it for.

        A group whose lease ran out is welcome as long as its prompt still waits: whoever else works on it is
        told so at its next renewal.

        Raises:
            BadMessage: The group is not of the prompt that its lease lent, or of a version still to come, or
                the user's priority fails on it.
        """
        group = delivery.group
        prompt = self.database.run(
            "SELECT kind, state, turn FROM prompts WHERE prompt_id = ?", group.prompt_id
        ).fetchone()
        if prompt is None:
            self.database.count("orphans")
            return False
        # A server has the next version before all have it, and the learner tells us; none has the one after.
        next_version = self.database.fact("published", -1) + 1
        if delivery.newest_version > next_version:
            raise BadMessage(
                f"versions: {delivery.newest_version}, and a server has {next_version} at the newest"
            )
        kind, state, turn = prompt
        if kind != group.kind:
            raise BadMessage(
                f"kind: prompt {group.prompt_id} was lent for {kind}, the group says {group.kind}"
            )
        lent = self.database.one("SELECT prompt_id FROM leases WHERE lease_id = ?", group.lease_id)
        if lent is not None and lent != group.prompt_id:
            raise BadMessage(
                f"prompt_id: lease {group.lease_id} lent {lent}, the group says {group.prompt_id}"
            )
        known = self.database.one("SELECT 1 FROM groups WHERE group_id = ?", group.group_id)
        if known or state not in ("queued", "leased"):
            self.database.count("duplicates")
            return False
        self.ledger.bore_fruit()
        if kind == "eval":
            self.ledger.end_of_prompt(group.prompt_id)
            self.evaluations.record(group)
            self._stock_changed = True  # a batch may have waited for the end of the evaluation
            return True
        wanted = 0.0
        if self._rules.policy == "priority":
            wanted = priority(group, self._config.priority or ADVANTAGE)
        self.ledger.end_of_prompt(group.prompt_id)
        self._keep(delivery, turn, wanted)
        return True

    def _keep(self, delivery: Delivery, turn: int, wanted: float) -> None:
        group = delivery.group
        self.database.count("delivered")
        rewards = {t.reward for t in group.trajectories}
        if self._config.dynamic_sampling:
            self.ledger.compared(rewards)
        if self._config.dynamic_sampling and len(rewards) == 1:
            assembly.insert(self.database, delivery, turn, "dropped", wanted)
            self.database.count("wasted_tokens", delivery.trained_tokens)
            self.ledger.drop(group.prompt_id, "zero_variance")
        else:
            assembly.insert(self.database, delivery, turn, "stored", wanted)
            self.ledger.move(group.prompt_id, "stored")
        self._stock_changed = True

    # Batches

    def batch(self, index: int) -> Assembled | None:
        """What batch `index` is made of: recorded once, the same ever after. None while too little is stored,
        or version `index` is being evaluated: nothing newer may come of a batch meanwhile.

        Raises:
            BatchForgotten: Its effect is in a confirmed checkpoint, and its groups are deleted.
            DataExhausted: No full batch can ever come.
        """
        rules, frontier = self._rules, self.frontier()
        if index < frontier:
            return assembly.recorded(self.database, index)
        if index > frontier or self.evaluations.hold(index):
            return None
        for prompt_id in assembly.evict(self.database, index, rules.max_staleness):
            self.ledger.requeue(prompt_id, "evicted")
        if assembly.assemble(self.database, index, rules, self.ledger.awaited(), self._seed):
            self.database.set_fact("frontier", index + 1)
            self._stock_changed = True
            return assembly.recorded(self.database, index)
        # Data of which nothing could come was not trained to its end: the buffer says so, and ends.
        if self.ledger.exhausted() and not self.ledger.hopeless():
            if index == 0:
                self._barren = True
                return None
            for prompt_id in assembly.drop_stored(self.database):
                self.ledger.drop(prompt_id, "remainder")
            raise DataExhausted(f"the {self.ledger.queue.epochs} epochs of prompts end before batch {index}")
        return None

    def published(self, version: int) -> None:
        """All live servers hold `version`, for which that many batches were trained."""
        newest = self.database.fact("published")
        if newest is not None and version < newest:
            logger.warning("version %d published after %d: admission stays with the newer", version, newest)
            return
        self.database.set_fact("published", version)
        # A learner whose checkpoint is ahead of this store (a lost run folder) counts its trained groups too.
        self.database.set_fact("frontier", max(self.frontier(), version))
        self.evaluations.published(version)
        self.ledger.changed = self._stock_changed = True

    def committed(self, index: int) -> None:
        """A checkpoint holds the effect of every batch below `index`: their groups go, their prompts are
        done."""
        self.database.count("trained", assembly.forget(self.database, index))
        settle(self.database)
        self.database.set_fact("committed", max(self.database.fact("committed", 0), index))
        self.database.set_fact("frontier", max(self.frontier(), index))

    def finish(self, version: int) -> None:
        """The learner made its last step: no more training leases; the last evaluation opens."""
        if not self.finished():
            self.database.set_fact("finished", version)
            self.evaluations.finished(version)
            lent = self.database.run("SELECT lease_id, prompt_id FROM leases WHERE kind = 'train'").fetchall()
            for lease_id, prompt_id in lent:
                self.ledger.end(lease_id)
                self.ledger.requeue(prompt_id, "finished")
            logger.info("version %d is the last: %d training leases are taken back", version, len(lent))
        self.ledger.changed = True

    def reopen(self, steps: int) -> None:
        """Go on with a finished run that has more to do by now: `steps` versions to make, with data left, or
        its last version to evaluate, where evaluations were added since."""
        with self.transaction():
            last = self.database.fact("finished")
            if last is None:
                return
            if last >= steps or self.ledger.exhausted():
                self.evaluations.finished(last)
            else:
                self.database.run("DELETE FROM facts WHERE name = 'finished'")
                logger.info("the run was finished at version %d; it goes on to version %d", last, steps)

    # Numbers

    def finished(self) -> bool:
        return self.database.fact("finished") is not None

    def over(self) -> bool:
        """Nothing will be leased any more."""
        return self.finished() and not self.evaluations.outstanding()

    def hopeless(self) -> bool:
        """Whether no batch comes, of this data or of what is done with it."""
        return self._barren or self.ledger.hopeless()

    def frontier(self) -> int:
        """The index of the next batch to be assembled."""
        return self.database.fact("frontier", 0)

    def stock(self) -> Stock:
        return Stock(
            leased=self.database.one("SELECT count(*) FROM leases WHERE kind = 'train'"),
            stored=self.database.one("SELECT count(*) FROM groups WHERE state = 'stored' AND uses = 0"),
            assembled=self.frontier(),
            published=self.database.fact("published"),
            kept=self.database.one("SELECT count(*) FROM groups WHERE state = 'stored' AND uses > 0"),
        )

    def room(self) -> int:
        """How many training groups may be leased now."""
        return admissible(self.stock(), self._rules, self._config.capacity)

    def overdue(self) -> int:
        """Leases that the next batch waits for: no later one may train what they bring."""
        last = oldest_trainable(self.frontier(), self._rules.max_staleness)
        return sum(version == last for version in self.ledger.awaited()) if self._rules.keeps_turns else 0

    def status(self) -> dict[str, Any]:
        """Plain numbers on everything kept here."""
        stock, counters = self.stock(), self.database.counters()
        epoch, position = self.ledger.place()
        return {
            "max_staleness": self._rules.max_staleness,
            "temperature": self._temperature,
            "version": stock.published,
            "published": stock.published,
            "frontier": stock.assembled,
            "committed": self.database.fact("committed", 0),
            "leased": stock.leased,
            "stored": stock.stored,
            "kept": stock.kept,
            "overdue": self.overdue(),
            "eval_leased": self.database.one("SELECT count(*) FROM leases WHERE kind = 'eval'"),
            "eval_left": self.evaluations.left(),
            "room": self.room(),
            "epoch": epoch,
            "position": position,
            "prompts": len(self.ledger.queue.rows),
            "delivered": counters.get("delivered", 0),
            "trained": counters.get("trained", 0),
            "reused": counters.get("reused", 0),
            "duplicates": counters.get("duplicates", 0),
            "orphans": counters.get("orphans", 0),
            "evicted": counters.get("requeued/evicted", 0),
            "wasted_tokens": counters.get("wasted_tokens", 0),
            "dropped": under(counters, "dropped/"),
            "requeued": under(counters, "requeued/"),
            "failed": under(counters, "failed/"),
            "fruitless": self.ledger.fruitless,
            "equal": self.ledger.equal,
            "equal_rewards": self.ledger.equal_rewards,
            "unreadable": self.ledger.unreadable,
            "gone": self.ledger.unreadable_last if self.ledger.gone() else None,
            "groups_per_batch": self._rules.groups_per_batch,
            "barren": self._barren,
            "hopeless": self.hopeless(),
            "starvation": starvation(self.database.connection),
            "evaluations": {str(v): results for v, results in self.evaluations.results().items()},
            "finished": self.finished(),
            "over": self.over(),
        }
