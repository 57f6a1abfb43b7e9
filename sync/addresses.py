"""Addresses of the control channel: whom they let in, and how ZeroMQ wants them. No torch."""

import ipaddress
import socket
from urllib.parse import urlsplit


def host_of(address: str) -> str:
    """The host of a `tcp://host:port` address.

    Raises:
        ValueError: It is not one, or its host is a wildcard that no other machine could connect to.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"sync.address {address!r}: expected tcp://HOST:PORT: {error}") from None
    if parts.scheme != "tcp" or not host or port is None or host in ("*", "0.0.0.0", "::"):
        raise ValueError(
            f"sync.address {address!r}: expected tcp://HOST:PORT, a host that servers can reach: the weights "
            "go through its interface, so there is no listening on all of them"
        )
    return host


def require_loopback(address: str) -> str:
    """The host of an address to listen on.

    Raises:
        ValueError: It is reachable from other machines, where without keys anybody could hand a server any
            weights.
    """
    host = host_of(address)
    try:
        resolved = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"sync.address {address}: {error.strerror}") from None
    if not ipaddress.ip_address(resolved).is_loopback:
        raise ValueError(
            f"sync.address: {address} reaches beyond this machine, which needs keys: make them with "
            "`slipstream keys DIR` and set security.keys=DIR, or use a loopback address"
        )
    return host


def numeric(address: str) -> str:
    """The address with its host's name looked up: ZeroMQ binds to numbers only."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        return address  # ZeroMQ says what is wrong with it
    number = str(found[4][0])
    return f"{scheme}://[{number}]:{port}" if ":" in number else f"{scheme}://{number}:{port}"
