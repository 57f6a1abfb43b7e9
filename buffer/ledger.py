"""The ledger: where every prompt is, who holds it on lease, and which rule took it out.

A prompt gets its row at its first lease: queued, leased, stored, batched, trained, or dropped by a named
rule, so that every prompt of an epoch can be accounted for. What is long over is counted in the place of its
rows (`buffer/settled.py`).
"""

import logging
import uuid
from collections import Counter
from collections.abc import Callable

from buffer.database import Database
from buffer.examples import BadRow, FileChanged
from buffer.prompts import PromptQueue, Row
from buffer.records import GivenUp, Lease, Prompt

logger = logging.getLogger(__name__)

SILENCES = frozenset({"engine_silent", "scorer_silent"})
"""Reasons to hand a lease back where engine or scorer left the server without any answer. It then takes no
other lease until there is one."""
BLAMELESS = SILENCES | {"server_stopped", "server_silent"}
"""Those that count for nothing: a server that ends, or hands back what it is granted in such a silence."""
OFTEN = 4
"""A prompt that met so many silent ones is told of, and again at twice as many: it may be what hangs them."""
MAX_FAILURES = 3
"""A prompt given up more often than this is dropped by rule `failed`."""
MOST_FRUITLESS = 64
"""So many prompts that failed too often in a row, without a group between them, end the buffer: something
that every completion needs does not work, and going on would use up the data."""
MOST_EQUAL = 1024
"""So many groups in a row, each dropped because its completions were rewarded alike, end the buffer: were one
in a hundred not so, this would happen once in thirty thousand times. At an eighth it is said in the log."""
SILENT_S = 15.0
"""No batch waits for a lease not renewed for this long, or for half its time where that is less: its server
may be dead. Servers renew every 5 s, or every quarter of the lease's time."""


class Ledger:
    """Leases and prompts in `database`. Deadlines are kept in memory only: servers outlive the buffer, so
    each lease gets its full time again when the store is opened."""

    def __init__(
        self,
        database: Database,
        queue: PromptQueue,
        eval_rows: list[Row],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.queue = queue
        self.changed = False
        """A prompt came back or left: a waiting lease may succeed. Whoever wakes the waiters clears it."""
        self.fruitless = 0
        """Prompts dropped since the last group came, or since this was opened: what did not work may have
        been mended meanwhile."""
        self._failing = 0
        self._silences = Counter[str]()
        """How often each prompt was with a server that fell silent, until something becomes of it."""
        self.equal = 0
        """Groups in a row, up to the last one, whose completions were each rewarded alike."""
        self.equal_rewards = (0.0, 0.0)
        """The least and the greatest of their rewards."""
        self.unreadable = 0
        """Prompts in a row, up to the last one, whose rows could not be read."""
        self.unreadable_last = ""
        """Why the last of them could not."""
        self._file_changed = False
        self._rows = {"train": queue.rows, "eval": eval_rows}
        self._database = database
        self._timeout_s = timeout_s
        self._clock = clock
        deadline = clock() + timeout_s
        self._deadlines = {i: deadline for (i,) in database.run("SELECT lease_id FROM leases")}

    def place(self) -> tuple[int, int]:
        """Epoch and position of the next fresh prompt."""
        return self._database.fact("epoch", 0), self._database.fact("position", 0)

    def draw(self, limit: int) -> list[tuple[str, int]]:
        """Id and row of the next training prompts: those that came back first, then fresh ones in epoch
        order."""
        drawn = self.queued("train", limit)
        start = epoch, position = self.place()
        while len(drawn) < limit:
            found = self.queue.at(epoch, position)
            if found is None:
                break
            lap, row = found
            self.enter(f"{lap}/{row}", "train", epoch, row, turn=0)
            drawn.append((f"{lap}/{row}", row))
            epoch, position = self.queue.after(epoch, position)
        if (epoch, position) != start:  # an empty answer must not cost a write
            self._database.set_fact("epoch", epoch)
            self._database.set_fact("position", position)
        return drawn

    def enter(self, prompt_id: str, kind: str, epoch: int, row: int, turn: int) -> None:
        """A prompt's first entry: queued."""
        self._database.run(
            "INSERT INTO prompts (prompt_id, kind, epoch, row, state, turn) VALUES (?, ?, ?, ?, 'queued', ?)",
            *(prompt_id, kind, epoch, row, turn),
        )

    def queued(self, kind: str, limit: int) -> list[tuple[str, int]]:
        """Id and row of prompts that wait, the oldest lease first."""
        return self._database.run(
            "SELECT prompt_id, row FROM prompts WHERE kind = ? AND state = 'queued' "
            "ORDER BY epoch, turn LIMIT ?",
            *(kind, max(0, limit)),
        ).fetchall()

    def exhausted(self) -> bool:
        """No training prompt waits, is on lease, or is left in the epochs."""
        alive = self._database.one(
            "SELECT 1 FROM prompts WHERE kind = 'train' AND state = 'queued' "
            "UNION ALL SELECT 1 FROM leases WHERE kind = 'train' LIMIT 1"
        )
        return alive is None and self.queue.at(*self.place()) is None

    # Leases

    def lend(
        self, name: str, request_id: str, version: int, kind: str, prompt_id: str, row: int
    ) -> Lease | None:
        """Lend a queued prompt; None when its row cannot be read: the prompt is dropped by rule `bad_row`."""
        prompt = self._prompt(kind, prompt_id, row)
        if prompt is None:
            return None
        turn = self._database.fact("turn", 0)
        self._database.set_fact("turn", turn + 1)
        lease_id = f"{turn}-{uuid.uuid4().hex}"
        self._database.run(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(lease_id, prompt_id, kind, name, request_id, version, turn),
        )
        self._database.run(
            "UPDATE prompts SET state = 'leased', turn = ? WHERE prompt_id = ?", turn, prompt_id
        )
        self._deadlines[lease_id] = self._clock() + self._timeout_s
        return Lease(lease_id, prompt, kind, version)

    def _prompt(self, kind: str, prompt_id: str, row: int) -> Prompt | None:
        try:
            prompt = Prompt(prompt_id, self._rows[kind][row])
            if kind == "train":
                self.unreadable, self._file_changed = 0, False
            return prompt
        except BadRow as error:
            logger.warning("prompt %s is dropped: %s", prompt_id, error)
            self.unreadable += 1
            self.unreadable_last = str(error)
            self._file_changed |= isinstance(error, FileChanged)
            self.end_of_prompt(prompt_id)
            self.drop(prompt_id, "bad_row")
            return None

    def lent_for(self, request_id: str) -> list[Lease]:
        """What a request was granted and is still live."""
        found = self._database.run(
            "SELECT lease_id, prompt_id, row, leases.kind, version "
            "FROM leases JOIN prompts USING (prompt_id) WHERE request_id = ? ORDER BY leases.turn",
            request_id,
        )
        read = [(i, self._prompt(kind, p, row), kind, v) for i, p, row, kind, v in found.fetchall()]
        return [Lease(i, prompt, kind, v) for i, prompt, kind, v in read if prompt is not None]

    def lent_to(self, name: str) -> list[str]:
        """A server's live leases."""
        return [i for (i,) in self._database.run("SELECT lease_id FROM leases WHERE name = ?", name)]

    def renew(self, lease_ids: list[str]) -> set[str]:
        """Give live leases their full time again; returns those that are nobody's any more."""
        deadline = self._clock() + self._timeout_s
        lost = {i for i in lease_ids if i not in self._deadlines}
        self._deadlines.update({i: deadline for i in lease_ids if i not in lost})
        return lost

    def late(self) -> list[str]:
        """Leases that ran out."""
        now = self._clock()
        return [i for i, deadline in self._deadlines.items() if deadline <= now]

    def awaited(self) -> list[int]:
        """Published version at the lease, of the training leases whose server is heard of."""
        heard = self._clock() + self._timeout_s - min(SILENT_S, self._timeout_s / 2)
        leases = self._database.run("SELECT lease_id, version FROM leases WHERE kind = 'train'")
        return [version for lease_id, version in leases if self._deadlines[lease_id] >= heard]

    def end(self, lease_id: str) -> str | None:
        """Take a lease back; its prompt, or None when it is not live."""
        self._deadlines.pop(lease_id, None)
        return self._database.one("DELETE FROM leases WHERE lease_id = ? RETURNING prompt_id", lease_id)

    def end_of_prompt(self, prompt_id: str) -> None:
        """Take a prompt's lease back, whoever holds it."""
        holder = self._database.one("SELECT lease_id FROM leases WHERE prompt_id = ?", prompt_id)
        if holder is not None:
            self.end(holder)

    def bore_fruit(self) -> None:
        """A group came."""
        self.fruitless = self._failing = 0

    def compared(self, rewards: set[float]) -> None:
        """Of a group that came under dynamic sampling: its different rewards."""
        if len(rewards) > 1:
            self.equal = 0
            return
        known = self.equal_rewards if self.equal else ()
        self.equal += 1
        self.equal_rewards = min({*rewards, *known}), max({*rewards, *known})
        if self.equal == MOST_EQUAL // 8:
            logger.warning(
                "the last %d groups were dropped, the completions of each rewarded alike (%g to %g): %d in a "
                "row end the buffer", self.equal, *self.equal_rewards, MOST_EQUAL,
            )  # fmt: skip

    def gone(self) -> bool:
        """Whether the rows are not there any more: none of a whole pass can be read (a pass may end with all
        its bad rows and the next begin with them), or of a file that was changed none of many, or of the last
        there are."""
        if self._file_changed and (self.unreadable >= MOST_FRUITLESS or self.exhausted()):
            return True
        return self.unreadable >= (1 if self._file_changed else 2) * len(self.queue.rows)

    def hopeless(self) -> bool:
        """Whether nothing works: MOST_EQUAL groups in a row had nothing to compare, MOST_FRUITLESS prompts
        failed in a row, a whole pass over the rows was dropped by whatever rule (a few rows in a row may
        well be too long), or the rows are gone."""
        if self.equal >= MOST_EQUAL or self.gone():
            return True
        return self._failing >= MOST_FRUITLESS or self.fruitless >= max(MOST_FRUITLESS, len(self.queue.rows))

    # States

    def move(self, prompt_id: str, state: str) -> None:
        if state != "queued":
            del self._silences[prompt_id]
        self._database.run("UPDATE prompts SET state = ? WHERE prompt_id = ?", state, prompt_id)

    def requeue(self, prompt_id: str, cause: str) -> None:
        self.move(prompt_id, "queued")
        self._database.count(f"requeued/{cause}")
        self.changed = True

    def drop(self, prompt_id: str, rule: str) -> None:
        self.move(prompt_id, "dropped")
        self._database.run("UPDATE prompts SET rule = ? WHERE prompt_id = ?", rule, prompt_id)
        self._database.count(f"dropped/{rule}")
        self.changed = True

    def fail(self, prompt_id: str, reason: str, requeue: bool) -> GivenUp:
        """Count a failure; the prompt goes back to the queue, or is dropped.

        What no try can mend is dropped under its reason's name, what failed too often under `failed`.
        BLAMELESS reasons count for nothing.
        """
        if reason in BLAMELESS:
            if reason in SILENCES:
                self._met_silence(prompt_id, reason)
            self.requeue(prompt_id, reason)
            return GivenUp(0, MAX_FAILURES + 1, True)
        self._database.count(f"failed/{reason}")
        failures = self._database.one(
            "UPDATE prompts SET failures = failures + 1 WHERE prompt_id = ? RETURNING failures", prompt_id
        )
        again = requeue and failures <= MAX_FAILURES
        if again:
            self.requeue(prompt_id, "failed")
        else:
            self.fruitless += 1
            self._failing += requeue
            self.drop(prompt_id, "failed" if requeue else reason)
        return GivenUp(failures, MAX_FAILURES + 1, again)

    def _met_silence(self, prompt_id: str, reason: str) -> None:
        self._silences[prompt_id] += 1
        times = self._silences[prompt_id]
        if times >= OFTEN and times.bit_count() == 1:
            logger.warning(
                "prompt %s was %d times with servers whose engine or scorer fell silent (%s): it may be what "
                "hangs them", prompt_id, times, reason,
            )  # fmt: skip
