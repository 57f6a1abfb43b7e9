"""Rewards that misbehave, imported by the worker processes of test_reward_pool.py."""

import ctypes
import os
import subprocess
import sys
import time

import msgpack


def by_text(text, row):
    """Does what the text says."""
    return ACTIONS[text](row)


def hang(row):
    while True:
        time.sleep(60)


def hang_deaf(row):
    """Ends by no exception that a limit inside the process could raise."""
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001  this is what it is for
            continue


def hang_with_child(row):
    child = subprocess.Popen(["sleep", "300"])
    with open(row["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(300)


def shout(row):
    print("x" * 100_000)
    sys.stdout.flush()
    os.write(1, b"\0\0\0\1garbage")
    return 0.25


def read_input(row):
    return 0.5 if sys.stdin.read() == "" else 0.0


def eat(row):
    return float(len(bytearray(8 << 30)))


def fail(row):
    raise RuntimeError("no such luck")


def fork_twins(row):
    """Both return."""
    os.fork()
    return 2.0


def fork_and_flee(row):
    """A grandchild in a session of its own, which nobody waits for."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(row["pid_file"] + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(file.name, row["pid_file"])
            time.sleep(300)
        os._exit(0)
    os.wait()
    while not os.path.exists(row["pid_file"]):
        time.sleep(0.01)
    time.sleep(row.get("sleep_s", 300))
    return 1.0


def leave_a_zombie(row):
    """A grandchild that outlives its parent, and ends."""
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
    return os.getpid()


def fork_on(row):
    """As many as it can, until it is ended."""
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(300)
    time.sleep(300)


def close_everything(row):
    os.closerange(0, 256)
    return 1.0


def close_output(row):
    sys.stdout.close()
    sys.stderr.close()
    os.closerange(1, 3)
    return 0.125


def forge(row):
    """Writes a result of its own to wherever the worker writes its results."""
    body = msgpack.packb(row["result"])
    for fd in range(3, 20):
        try:
            os.write(fd, len(body).to_bytes(4, "big") + body)
        except OSError:
            continue
    return 1.0


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def unspeakable(row):
    raise Unspeakable


def half_characters(row):
    raise ValueError("\ud800")


def crash(row):
    ctypes.string_at(0)


def interrupt(row):
    raise KeyboardInterrupt


ACTIONS = {
    "fork_twins": fork_twins,
    "fork_and_flee": fork_and_flee,
    "fork_on": fork_on,
    "leave_a_zombie": leave_a_zombie,
    "close_everything": close_everything,
    "close_output": close_output,
    "forge": forge,
    "unspeakable": unspeakable,
    "half_characters": half_characters,
    "crash": crash,
    "interrupt": interrupt,
    "many_parts": lambda row: {str(i): 1.0 for i in range(1000)},
    "long_name": lambda row: {"x" * 1000: 1.0},
    "endless": lambda row: {"x" * (2 << 20): 1.0},
    "huge_integer": lambda row: 10**400,
    "good": lambda row: 1.0,
    "pid": lambda row: os.getpid(),
    "parts": lambda row: {"correct": 1, "short": 0.5},
    "named": lambda row: {"reward": 0.75, "correct": 1.0},
    "nan": lambda row: float("nan"),
    "huge": lambda row: 1e308,
    "part_inf": lambda row: {"reward": 1.0, "x": float("inf")},
    "text": lambda row: "seven",
    "none": lambda row: None,
    "exit": lambda row: sys.exit(3),
    "hard_exit": lambda row: os._exit(0),
    "hang": hang,
    "hang_deaf": hang_deaf,
    "hang_with_child": hang_with_child,
    "shout": shout,
    "read_input": read_input,
    "eat": eat,
    "fail": fail,
}
