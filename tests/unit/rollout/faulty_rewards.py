"""Rewards that misbehave, imported by the worker processes of test_reward_pool.py."""

import os
import subprocess
import sys
import time


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


ACTIONS = {
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
