"""The two ends' keys, as far as this package knows them: who made them is its callers' business."""

from collections.abc import Sequence
from typing import Any, Protocol

GATE = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a key is admitted (rfc.zeromq.org/spec/27)."""


class PublisherKeys(Protocol):
    def guard(self, socket: Any) -> None:
        """Have a socket admit nobody whom `verdict` does not; before `bind`."""
        ...

    def verdict(self, question: Sequence[bytes]) -> list[bytes]:
        """The answer to a question that came at `GATE`."""
        ...


class MemberKeys(Protocol):
    def show(self, socket: Any) -> None:
        """Give a socket our keys and the publisher's; before `connect`."""
        ...
