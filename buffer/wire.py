"""What crosses between the buffer and its clients, in bytes: the one file that knows.

A message is a msgpack header followed by raw frames. A request's header names the schema, the run, who asks
and what; a reply's header repeats the request's id. Every request carries the whole introduction, so that a
buffer that was restarted answers a client that never noticed. A group is two of the raw frames, which
`buffer/groups.py` lays out. Every field is checked, by name and range, before it is used; an error names the
field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from buffer.envelope import Envelope
from buffer.errors import KINDS, BadMessage, WrongRun
from buffer.fields import choice, flag, integer, label, mapping, number, pack, sequence, text, texts
from buffer.groups import Frame
from buffer.records import GivenUp, Lease, Prompt

SCHEMA = 1
LONGEST_WAIT_S = 60.0
MAX_HEADER_BYTES = 4 << 20
"""Of a request: far more than its fields need, and little enough that a header of nothing but empty mappings,
64 times as large in memory, harms nobody."""
ENVELOPE = Envelope("buffer", "client", SCHEMA, KINDS, longest_request=MAX_HEADER_BYTES)

ROLES = ("rollout", "learner", "observer")
ROLLOUT_VERBS = ("hello", "status", "start", "lease", "renew", "deliver", "give_up")
LEARNER_VERBS = ("hello", "status", "batch", "published", "committed", "finished")
VERBS = {"rollout": ROLLOUT_VERBS, "learner": LEARNER_VERBS, "observer": ("hello", "status")}
ROLES_OF_KEY = {
    "rollout": ("rollout", "observer"),
    "learner": ("learner", "observer"),
    "scorer": ("observer",),
    "reference": ("observer",),
    "value": ("observer",),
}
"""As what a client may come, by the role that its key is of."""


@dataclass(frozen=True, slots=True)
class Request:
    """Made by a client, read by the server."""

    request_id: str
    """Names the request over its retries; an answer carries it back."""
    role: str
    name: str
    run_id: str
    verb: str
    fields: dict[str, Any]
    """The verb's own fields, checked."""


def encode_request(request: Request) -> bytes:
    header = {"role": request.role, "name": request.name, "run_id": request.run_id, "verb": request.verb}
    return pack(ENVELOPE.request(request.request_id, header | request.fields))


def decode_request(frame: Frame, run_id: str, key: str | None = None) -> Request:
    """Check a request's header.

    Args:
        frame: The header.
        run_id: The run that is served.
        key: The role that the sender's key is of; None where nobody needs one.

    Raises:
        WrongRun: Another schema, or another run.
        BadMessage: Any other fault, naming the field.
    """
    request_id, header = ENVELOPE.open_request(frame)
    theirs = text(header, "run_id")
    if theirs != run_id:
        raise WrongRun(
            f"run_id: this buffer serves run {run_id!r}, the client belongs to {theirs!r}; "
            "of two runs at once on one machine each has a buffer.address and a sync.address of its own"
        )
    role = choice(header, "role", ROLES if key is None else ROLES_OF_KEY.get(key, ()))
    verb = choice(header, "verb", VERBS[role])
    return Request(request_id, role, label(header, "name"), theirs, verb, _fields(verb, header))


def _fields(verb: str, header: dict[str, Any]) -> dict[str, Any]:
    match verb:
        case "lease":
            return {
                "max_groups": integer(header, "max_groups", 0, 1 << 16),
                "wait_s": number(header, "wait_s", 0.0, LONGEST_WAIT_S),
            }
        case "renew":
            return {"lease_ids": texts(header, "lease_ids")}
        case "give_up":
            return {
                "lease_id": text(header, "lease_id"),
                "reason": label(header, "reason"),
                "requeue": flag(header, "requeue"),
            }
        case "batch":
            size = integer(header, "dp_size", 1, 1 << 16)
            return {
                "index": integer(header, "index"),
                "dp_rank": integer(header, "dp_rank", 0, size - 1),
                "dp_size": size,
                "wait_s": number(header, "wait_s", 0.0, LONGEST_WAIT_S),
            }
        case "published" | "finished":
            return {"version": integer(header, "version")}
        case "committed":
            return {"index": integer(header, "index")}
        case _:
            return {}


def encode_given_up(outcome: GivenUp | None) -> dict[str, Any]:
    if outcome is None:
        return {}
    return {"tries": outcome.tries, "most": outcome.most, "queued": outcome.queued}


def decode_given_up(reply: dict[str, Any]) -> GivenUp | None:
    if "tries" not in reply:
        return None
    return GivenUp(integer(reply, "tries"), integer(reply, "most"), flag(reply, "queued"))


def encode_leases(leases: Sequence[Lease]) -> dict[str, Any]:
    return {"leases": [[x.lease_id, x.prompt.prompt_id, x.prompt.row, x.kind, x.version] for x in leases]}


def decode_leases(reply: dict[str, Any]) -> list[Lease]:
    names = ("lease_id", "prompt_id", "row", "kind", "version")
    leases: list[Lease] = []
    for entry in sequence(reply, "leases"):
        if not isinstance(entry, list) or len(cast("list[Any]", entry)) != len(names):
            raise BadMessage(f"leases: expected lists of {', '.join(names)}")
        item: dict[str, Any] = dict(zip(names, cast("list[Any]", entry), strict=True))
        prompt = Prompt(text(item, "prompt_id"), mapping(item, "row"))
        kind = choice(item, "kind", ("train", "eval"))
        leases.append(Lease(text(item, "lease_id"), prompt, kind, integer(item, "version")))
    return leases
