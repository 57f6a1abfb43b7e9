"""Which listening sockets are shut: gloo's, and no other of the process."""

import socket
import struct

import pytest

from sync.door import close_door


def listener(family, host):
    found = socket.socket(family, socket.SOCK_STREAM)
    found.bind((host, 0))
    found.listen()
    return found


def kernel_form(handle) -> bytes:
    host, port = handle.getsockname()[:2]
    flow = b"\0" * 4 if handle.family == socket.AF_INET6 else b""
    return (
        struct.pack("=H", handle.family)
        + struct.pack("!H", port)
        + flow
        + socket.inet_pton(handle.family, host)
    )


def lets_in(handle) -> bool:
    with socket.socket(handle.family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(0.3)
        try:
            stranger.connect(handle.getsockname())
        except TimeoutError:
            return False
        return True


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_one_of_the_same_host_stays_open_whose_port_is_among_the_bytes_by_chance(family, host):
    with listener(family, host) as gloos, listener(family, host) as control:
        chance = struct.pack("!H", control.getsockname()[1])
        close_door(kernel_form(gloos) + b"\0" * 5 + chance + b" a.host.name")
        assert not lets_in(gloos)
        assert lets_in(control)
