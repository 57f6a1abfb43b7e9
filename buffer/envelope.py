"""What is around every request and reply, whatever the service: the schema, an id, and refusals.

A request's header names the schema and an id, which is its own over all its retries; a reply's header repeats
the id. A refusal crosses by its `kind` and is raised again at the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from buffer.errors import BadMessage, Refusal, WrongRun
from buffer.fields import integer, pack, text, unpack
from buffer.groups import Frame

LONGEST_ID = 64


@dataclass(frozen=True, slots=True)
class Envelope:
    """Of one service and its clients."""

    service: str
    """What it is called in messages."""
    client: str
    schema: int
    """Raised by one whenever the bytes change their meaning; a peer with another number is refused."""
    kinds: Mapping[str, type[Refusal]]
    """What it refuses with, by `kind`."""
    longest_request: int | None = None
    """Bytes of a header; None where the socket's limit will do."""
    longest_reply: int | None = None

    def request(self, request_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A request's header, to be packed."""
        return {"schema": self.schema, "id": request_id, **fields}

    def open_request(self, frame: Frame) -> tuple[str, dict[str, Any]]:
        """A request's id and its header.

        Raises:
            WrongRun: Another schema.
            BadMessage: No header, or no id.
        """
        header = unpack(frame, "header", self.longest_request)
        self._check_schema(header, self.service, self.client)
        return text(header, "id", LONGEST_ID), header

    def request_id(self, frame: Frame) -> str:
        """Of a request that may be broken in any other way; empty when it cannot be told."""
        try:
            return text(unpack(frame, "header", self.longest_request), "id", LONGEST_ID)
        except BadMessage:
            return ""

    def reply(self, request_id: str, fields: Mapping[str, Any] | None = None) -> bytes:
        return pack({"schema": self.schema, "id": request_id, **(fields or {})})

    def refusal(self, request_id: str, refusal: Refusal) -> bytes:
        return self.reply(request_id, {"refused": refusal.kind, "text": str(refusal)})

    def open_reply(self, frame: Frame) -> tuple[str, dict[str, Any]]:
        """The request's id, and the reply's fields. Whether it is a refusal is for `raise_if_refused`.

        Raises:
            WrongRun: Another schema.
            BadMessage: No header.
        """
        header = unpack(frame, "reply", self.longest_reply)
        self._check_schema(header, self.client, self.service)
        identity = header.get("id")
        return (identity if isinstance(identity, str) else ""), header

    def raise_if_refused(self, reply: dict[str, Any]) -> None:
        """
        Raises:
            Refusal: The one that the service answered with.
        """
        if "refused" in reply:
            raise self.kinds.get(text(reply, "refused"), Refusal)(str(reply.get("text", "")))

    def _check_schema(self, header: dict[str, Any], ours: str, theirs: str) -> None:
        found = integer(header, "schema")
        if found != self.schema:
            raise WrongRun(
                f"schema: the {ours} speaks {self.schema}, the {theirs} {found}; "
                "run the same version on both sides"
            )
