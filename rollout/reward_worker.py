"""The process that computes rewards: `python -m rollout.reward_worker package.module:function MEMORY_BYTES`.

Reads calls from its standard input and writes results to its standard output, each a msgpack map behind a
4-byte big-endian length. The reward function sees neither: what it prints goes to standard error.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from buffer.dotted import place, resolve
from rollout.process_tree import zombies

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_AT_ZOMBIES = 128
"""Calls between two looks whether so many are left behind that another process should take over."""


def main(path: str, memory_bytes: int) -> None:
    # A server killed with -9 closes no reward that hangs: the kernel ends this process with it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # What the reward starts and leaves alone comes back to this process, and is ended with it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    calls, results = _private_pipes()
    try:
        function = resolve(path)
    except Exception as error:  # noqa: BLE001  importing the user's module may raise anything
        _write(results, {"kind": "import", "detail": f"{type(error).__name__}: {error}"})
        return
    # After the imports: what they map is not the reward's doing.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    # A reward that crashes is to be expected, and its memory is of no use to anybody. Files have no limit:
    # the server's own log, to which rewards print, is one of them.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(results, {"kind": "ready"})
    me = os.getpid()
    while (call := _read(calls)) is not None:
        number = call["number"]
        result = score(function, call["text"], call["row"])
        if os.getpid() != me:
            os._exit(0)  # a copy that the reward forked and let return; the one answer is the original's
        # What it adopted and has ended stays a zombie: to ask for all would take their own from the reward.
        worn = number % LOOK_AT_ZOMBIES == 0 and zombies(me) > LOOK_AT_ZOMBIES // 2
        _write(results, {**result, "number": number, "worn": worn})


def score(function: Callable[[str, dict[str, Any]], Any], text: str, row: dict[str, Any]) -> dict[str, Any]:
    """Call the reward: `{kind: "ok", parts}`, or `{kind, detail}` of what went wrong."""
    try:
        value = function(text, row)
        items = value.items() if isinstance(value, dict) else [("reward", value)]
        return {"kind": "ok", "parts": {str(name): float(part) for name, part in items}}
    except MemoryError:
        return {"kind": "memory", "detail": "out of the memory that its memory_mib allows"}
    except Exception as error:  # noqa: BLE001  a user's function may raise anything; it costs this completion
        return {"kind": "raised", "detail": _told(error) + place(error)}


def _told(error: Exception) -> str:
    """Its type and text, as far as both can be had and sent."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  nor need its text come without another
        text = type(error).__name__
    return text[:500].encode(errors="replace").decode()


def frame(message: dict[str, Any]) -> bytes:
    """A message as it goes through a pipe, either way."""
    body: Any = msgpack.packb(message)
    return HEADER.pack(len(body)) + body


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the two pipes for ourselves; give the function an empty input, and standard error to print to."""
    calls, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return calls, results


def _read(calls: BinaryIO) -> dict[str, Any] | None:
    header = calls.read(HEADER.size)
    if len(header) < HEADER.size:
        return None  # the server is gone or done
    return msgpack.unpackb(calls.read(HEADER.unpack(header)[0]))


def _write(results: BinaryIO, message: dict[str, Any]) -> None:
    results.write(frame(message))
    results.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
