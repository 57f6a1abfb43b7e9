"""gloo's listening socket, shut once everybody is in.

It takes whoever connects for the rank that he says he is, and keeps the connections of all others: who opens
enough of them has the process out of file handles, which gloo answers by ending it. No torch.
"""

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

SO_ATTACH_FILTER = 26  # of Linux; Python's socket module does not name it
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""One instruction of the kernel's packet filter: return 0, keep nothing of the packet."""


def close_door(addresses: bytes) -> None:
    """Have the kernel drop, from now on, whoever would connect to a listening socket of this process whose
    address is among `addresses`, in the kernel's own form. What is connected stays so.
    """
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP))
    try:
        for number in _listening(addresses):
            with _borrowed(number) as handle:
                handle.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError as error:
        logger.warning("sync: gloo's port stays open to strangers: %s", error)


def _listening(addresses: bytes) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _borrowed(int(name)) as handle:  # no socket, or closed meanwhile
            if _listens_on(handle, addresses):
                found.append(int(name))
    return found


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The socket under this file handle. It is gloo's, or anybody's, and stays open."""
    handle = socket.socket(fileno=number)
    try:
        yield handle
    finally:
        handle.detach()


def _listens_on(handle: socket.socket, addresses: bytes) -> bool:
    if handle.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    host, port, *more = handle.getsockname()
    # Side by side, as in the kernel's form: each for itself, the bytes of another port may lie anywhere.
    flow = struct.pack("!I", more[0]) if more else b""
    address = socket.inet_pton(handle.family, host.partition("%")[0])
    return struct.pack("!H", port) + flow + address in addresses
