"""Jobs of the reference and of the value model, started as an operator starts them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from launch.guard import children


class Job:
    """One torchrun of `learner.reference`, or of another such module; its log grows over restarts."""

    def __init__(self, folder: Path, experiment: dict, role: str = "reference") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.program = ["-m", f"learner.{role}"]
        self.environment: dict[str, str] = {}
        self._config, self._log = folder / f"{role}.yaml", folder / f"{role}.log"
        self._config.write_text(yaml.safe_dump(experiment))
        section = experiment["learner"][role]
        self._ranks = section.get("ranks", section)["processes"]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> "Job":
        torchrun = ["-m", "learner.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
        command = [sys.executable, *torchrun, f"--nproc-per-node={self._ranks}", *self.program]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self._config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )
        return self

    def says(self, text: str, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            assert self.process is not None
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """To every rank: torchrun starts each in a session of its own."""
        assert self.process is not None
        for rank in children().get(self.process.pid, []):
            os.kill(rank, number)

    def end(self) -> int:
        """As the supervisor does."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            # Only the stacks of its ranks can tell why.
            self.process.send_signal(signal.SIGUSR2)
            time.sleep(2)
            raise AssertionError(f"SIGTERM did not end it:\n{self.log[-16000:]}") from None

    def kill(self) -> None:
        """torchrun first: it would look after its ranks."""
        assert self.process is not None
        ranks = children().get(self.process.pid, [])
        self.process.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def jobs(*made: Job) -> Iterator[None]:
    try:
        for job in made:
            job.start()
        yield
    finally:
        for job in made:
            if job.process is not None and job.process.poll() is None:
                job.kill()
