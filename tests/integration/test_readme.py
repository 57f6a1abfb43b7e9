"""The README's own example, run from its text in a terminal: interrupted by Ctrl-C, resumed, finished."""

import fcntl
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOME = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COLUMNS = 100


class Terminal:
    """A command in a pseudo terminal of its own, and all that it wrote there."""

    def __init__(self, command: list[str], folder: Path) -> None:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 32, COLUMNS, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        self._master, self._written = master, bytearray()
        self.process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 65536)
            except OSError:  # the last process that had the terminal has ended
                return

    @property
    def text(self) -> str:
        """What was written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._written.decode(errors="replace"))

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        os.close(self._master)
        return code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three files as the README gives them, beside the configs that they build on."""
    text = (HOME / "README.md").read_text().split("## Your own model, data and reward")[1].split("\n## ")[0]
    for name in ("prompts.jsonl", "my_reward.py", "own.yaml"):
        (code,) = re.findall(rf"`{re.escape(name)}`.*?```\w+\n(.*?)```", text, re.DOTALL)[:1]
        (tmp_path / name).write_text(code)
    assert "Then `slipstream run own.yaml`" in text
    (tmp_path / "configs").symlink_to(HOME / "configs")
    return tmp_path


def rows(folder: Path) -> list[dict]:
    path = folder / "runs/colours/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_readme_example_runs_stops_at_ctrl_c_and_resumes(folder, made_model):
    small = [
        *(f"model.path={made_model}", "model.max_length=64", "model.dtype=float32"),
        *("rollout.engine.kv_cache_gib=0.25", "rollout.engine.max_num_seqs=32"),
        *("rollout.sampling.max_tokens=4", "learner.steps=200", "learner.checkpoint.every=1"),
    ]
    first = Terminal(["slipstream", "run", "own.yaml", *small], folder)
    deadline = time.monotonic() + 200
    while len(rows(folder)) < 2:
        assert first.process.poll() is None, first.text[-3000:]
        assert time.monotonic() < deadline, first.text[-3000:]
        time.sleep(0.1)
    time.sleep(1.5)  # the screen is drawn twice a second
    first.press_ctrl_c()
    assert first.wait(120) == 130, first.text[-3000:]
    for word in ("progress", "reward", "staleness", "tokens/s", "waiting", "publish", "paused", " left"):
        assert word in first.text, word
    assert "stopping: the learner writes a checkpoint" in first.text
    assert "Traceback" not in first.text
    ending = first.text.splitlines()[-1]
    assert re.match(r"stopped\. To go on from the last checkpoint: \S*slipstream run own\.yaml", ending)
    made = len(rows(folder))
    again = [*shlex.split(ending.partition(": ")[2]), f"learner.steps={made + 2}"]
    second = Terminal(again, folder)
    assert second.wait(200) == 0, second.text[-3000:]
    assert f"{made} steps were made" in second.text
    assert [row["step"] for row in rows(folder)] == list(range(1, made + 3)), "each once, in order"
    for row in rows(folder):
        right, short = (row[f"reward_parts/answer/{part}"] for part in ("right", "short"))
        assert 0 <= right <= 1
        assert right + short == pytest.approx(row["reward_parts/answer"])
        assert row["reward_parts/answer"] == pytest.approx(row["reward/mean"])
    assert any(row["reward_parts/answer/short"] > 0 for row in rows(folder))
    assert (folder / "runs/colours/model/config.json").exists()
    assert (folder / "runs/colours/report/summary.md").exists()
