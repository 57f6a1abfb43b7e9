"""The socket of a service that answers requests."""

import ipaddress

import zmq
import zmq.asyncio

from buffer.errors import AddressTaken


def listen(
    context: zmq.asyncio.Context, key: str, address: str, max_message_bytes: int
) -> zmq.asyncio.Socket:
    """A ROUTER bound to the address.

    Args:
        context: Left as it is when nothing comes of it.
        key: The setting that the address is of, for messages.
        address: Of this machine only: nobody is asked who he is.
        max_message_bytes: A peer that sends a larger frame is cut off.

    Raises:
        AddressTaken: Somebody else listens there.
        ValueError: The address is malformed or reaches beyond this machine.
    """
    if not _is_local(address):
        raise ValueError(
            f"{key}: {address} reaches beyond this machine, which needs keys; use a loopback address"
        )
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            raise AddressTaken(f"{key}: {address} is taken; stop who listens there or set another") from None
        raise ValueError(f"{key}: {address}: {error}") from None
    return socket


def _is_local(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host == "localhost":
        return True
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
