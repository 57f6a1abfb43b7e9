"""Who receives weights: the members, what each one holds, and how far it is with the current publish. Pure.

No sockets and no clock (every method is told the time), so that each rule of membership can be tested alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sync.wire import Entries, Failed, Loaded, Ready, is_gloo_entry

MAX_FAILED_TRANSFERS = 3
"""A member whose last transfers all failed is evicted, though it answers: something near it is broken."""

LEFT = "left"
"""Why a member is gone that said so itself; nothing is wrong with it."""

Phase = Literal["idle", "asked", "ready", "loaded", "failed", "dropped"]


@dataclass(slots=True)
class Member:
    """One rollout server. Its ranks in the broadcast group are consecutive."""

    identity: bytes
    """Of its DEALER socket; a server that joins anew has a new one."""
    name: str
    world_size: int
    heard_at: float
    place: str = ""
    """Whose memory it can map; empty once it could not."""
    version: int | None = None
    """What it has acknowledged since it joined; before that it counts as holding nothing."""
    attempt: int = 0
    """The PREPARE it is working on or answered last; answers to others are stale."""
    phase: Phase = "idle"
    entries: Entries = field(default_factory=dict[str, bytes])
    """What its ranks left for the others of a new group, once it is ready."""
    failed_transfers: int = 0
    loaded: Loaded | None = None
    loaded_at: float = 0.0
    """When it said so."""
    failure: str = ""


class Membership:
    def __init__(self) -> None:
        self._members: dict[bytes, Member] = {}
        self._lost: list[tuple[str, str]] = []

    def all(self) -> list[Member]:
        return list(self._members.values())

    def names(self) -> list[str]:
        return sorted(member.name for member in self._members.values())

    def get(self, identity: bytes) -> Member | None:
        return self._members.get(identity)

    def is_active(self, name: str, since: float) -> bool:
        """Whether a member of this name has been heard since then."""
        return any(m.name == name and m.heard_at > since for m in self._members.values())

    def join(self, identity: bytes, name: str, world_size: int, now: float, place: str = "") -> list[Member]:
        """Take a member in. It holds nothing yet, whatever it had: it gets the current version in full.

        Returns:
            Members of the same name that it replaces: a restarted server's former self.
        """
        replaced = [m for m in self._members.values() if m.name == name and m.identity != identity]
        for member in replaced:
            self.evict(member, "another server of this name joined")
        self._members[identity] = Member(identity, name, world_size, now, place)
        return replaced

    def evict(self, member: Member, reason: str) -> None:
        if self._members.pop(member.identity, None) is not None:
            self._lost.append((member.name, reason))

    def take_lost(self) -> list[tuple[str, str]]:
        """(name, reason) of everyone evicted since this was last asked."""
        lost, self._lost = self._lost, []
        return lost

    def silent(self, now: float, timeout_s: float) -> list[Member]:
        return [m for m in self._members.values() if now - m.heard_at > timeout_s]

    def lacking(self, version: int) -> list[Member]:
        """Who does not hold a version and is not about to."""
        busy = ("asked", "ready")
        return [m for m in self._members.values() if m.version != version and m.phase not in busy]

    def asked(self, members: Iterable[Member], attempt: int) -> None:
        for member in members:
            member.attempt, member.phase, member.loaded, member.failure = attempt, "asked", None, ""
            member.entries = {}

    def working(self, attempt: int) -> list[Member]:
        """Members of an attempt that have neither loaded nor failed nor dropped it."""
        return [m for m in self._members.values() if m.attempt == attempt and m.phase in ("asked", "ready")]

    def unanswered(self, attempt: int) -> list[Member]:
        """Members that have not said READY, or anything else, to a PREPARE."""
        return [member for member in self.of(attempt) if member.phase == "asked"]

    def undropped(self, attempt: int) -> list[Member]:
        """Members of an aborted attempt that have not said DROPPED; one that loaded need not."""
        return [member for member in self.of(attempt) if member.phase not in ("dropped", "loaded")]

    def trouble(self, attempt: int, expected: int) -> str | None:
        """Why an attempt that began with `expected` members cannot end well; None while it can."""
        members = self.of(attempt)
        if len(members) < expected:
            return f"{expected - len(members)} of {expected} members lost"
        failed = [f"{member.name}: {member.failure}" for member in members if member.phase == "failed"]
        return failed[0] if failed else None

    def of(self, attempt: int) -> list[Member]:
        return [m for m in self._members.values() if m.attempt == attempt]

    def ready(self, member: Member, message: Ready) -> str | None:
        """Note that a member is ready, and what its ranks left.

        Returns:
            Why it is refused; None where it counts.
        """
        if member.attempt != message.attempt or member.phase != "asked":
            return f"READY of attempt {message.attempt}: it is {member.phase} in attempt {member.attempt}"
        member.phase, member.entries = "ready", message.entries
        return None

    def introduce(self, attempt: int, entries: Entries) -> tuple[Entries, list[Member]]:
        """What every rank of an attempt left, where rank 0 left `entries`; and the members that left more
        than they have ranks, or in another's name, or no address (with nccl, members leave nothing)."""
        wrong: list[Member] = []
        for member in self.of(attempt):
            left = member.entries
            fits = len(left) <= member.world_size and not entries.keys() & left.keys()
            if not fits or not all(is_gloo_entry(entry) for entry in left.values()):
                wrong.append(member)
            else:
                entries = entries | left
        return entries, wrong

    def dropped(self, member: Member, attempt: int) -> None:
        if member.attempt == attempt and member.phase != "loaded":
            member.phase = "dropped"

    def loaded(self, member: Member, message: Loaded) -> None:
        """The member generates with a version now, even if the attempt was aborted meanwhile."""
        if member.attempt == message.attempt:
            member.phase, member.version, member.loaded = "loaded", message.version, message
            member.loaded_at = member.heard_at
            member.failed_transfers = 0

    def failed(self, member: Member, message: Failed) -> str | None:
        """Note a failure.

        Returns:
            Why the member is to be evicted; None where it is perhaps not to blame, or the attempt is past.
        """
        if member.attempt != message.attempt:
            return None
        member.phase, member.failure = "failed", f"{message.cause}: {message.reason}"
        if message.cause == "memory":
            member.place = ""
        elif message.cause != "transfer":
            return member.failure
        return None

    def suspects(self, attempt: int, expected: int) -> list[Member]:
        """Who may be to blame that an attempt failed which began with `expected` members: nobody where one of
        them is out already; else those that said so; else all, since whoever hung has answered again."""
        members = self.of(attempt)
        if len(members) < expected:
            return []
        return [member for member in members if member.failure] or members

    def count_failed_transfer(self, member: Member) -> bool:
        """Whether that was one too many."""
        member.failed_transfers += 1
        return member.failed_transfers >= MAX_FAILED_TRANSFERS
