"""The socket of a service that answers requests, and the gate before it."""

import ipaddress
import logging
import math
import socket as sockets
import time

import zmq
import zmq.asyncio

from buffer.errors import AddressTaken
from buffer.keys import GATE, ServerKeys

logger = logging.getLogger(__name__)

TELL_S = 10.0
"""Between two lines about peers that were turned away."""


class Router:
    """A ROUTER bound to an address. Behind keys it takes messages only of those whom they admit.

    Args:
        key: The setting that the address is of, for messages.
        address: Without keys of this machine only: nobody is asked who he is.
        max_message_bytes: A peer that sends a larger frame is cut off.
        keys: Its own and those that it admits.

    Raises:
        AddressTaken: Somebody else listens there.
        ValueError: The address is malformed, or reaches beyond this machine without keys.
    """

    def __init__(self, key: str, address: str, max_message_bytes: int, keys: ServerKeys | None) -> None:
        if keys is None and (refusal := unguarded(key, address)):
            raise ValueError(refusal)
        self._key = key
        self._keys = keys
        self._refused = 0
        self._context = zmq.asyncio.Context()
        self._gate = self._context.socket(zmq.REP) if keys else None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        self.socket.setsockopt(zmq.IPV6, 1)
        try:
            if keys is not None and self._gate is not None:
                self._gate.bind(GATE)
                keys.guard(self.socket)
            self.socket.bind(numeric(address))
        except zmq.ZMQError as error:
            self.close(linger=0)
            if error.errno == zmq.EADDRINUSE:
                told = f"{key}: {address} is taken; stop who listens there or set another"
                raise AddressTaken(told) from None
            raise ValueError(f"{key}: {address}: {error}") from None

    async def admit(self) -> None:
        """Answer for each new connection whether it may be, until cancelled. Returns at once without keys."""
        told = -math.inf
        while self._keys is not None and self._gate is not None:
            question = await self._gate.recv_multipart()
            answer = self._keys.verdict(question)
            await self._gate.send_multipart(answer)
            if answer[2] != b"200":
                self._refused += 1
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    who = b"".join(question[3:4]).decode(errors="replace")
                    told_of = (self._key, who, self._refused)
                    logger.warning("%s: %s has no key that is admitted (%d so far)", *told_of)

    def role(self, frame: zmq.Frame) -> str | None:
        """Whose key the sender of a message has; None without keys."""
        return None if self._keys is None else str(frame.get("User-Id"))

    def close(self, linger: int = 500) -> None:
        self.socket.close(linger=linger)
        if self._gate is not None:
            self._gate.close(linger=0)
        self._context.term()


def unguarded(key: str, address: str) -> str | None:
    """Why nothing may listen at an address without keys; None if it may: nobody else reaches it."""
    if is_local(address):
        return None
    return (
        f"{key}: {address} reaches beyond this machine, which needs keys: make them with `slipstream keys "
        "DIR` and set security.keys=DIR, or use a loopback address"
    )


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host == "localhost":
        return True
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def numeric(address: str) -> str:
    """The address with its host's name looked up: ZeroMQ binds to numbers only."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or host == "*":
        return address
    try:
        found = sockets.getaddrinfo(host.strip("[]"), None, type=sockets.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        return address  # ZeroMQ says what is wrong with it
    number = str(found[4][0])
    return f"tcp://[{number}]:{port}" if found[0] == sockets.AF_INET6 else f"tcp://{number}:{port}"
