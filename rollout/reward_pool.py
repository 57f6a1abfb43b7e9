"""Rewards off the event loop, in processes that can be ended.

A reward that hangs, raises, exits, forks, floods its output or eats memory fails the completion it was asked
about; its process is replaced, with all that it started, and every other completion is scored as if nothing
had happened. That is a guard against mistakes and not a jail: it runs as the server's user.
"""

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from buffer.handles import LOOK_S, OUT
from buffer.records import MAX_REWARD
from rollout.config import FunctionReward
from rollout.engine import CompletionFailed
from rollout.process_tree import kill_tree
from rollout.reward_worker import HEADER, frame

logger = logging.getLogger(__name__)

KINDS = ("ready", "import", "ok", "raised", "memory")
"""Of what a worker says."""
START_TIMEOUT_S = 120.0
"""To import the reward function and what it needs."""
MAX_RESULT_BYTES = 1 << 20
MOST_PRINTED_BYTES = 64 << 20
"""Of what a reward prints; a file that grew beyond is begun anew."""
MAX_PARTS = 64
MAX_NAME_CHARS = 100
"""Of a part: it becomes the name of a metric."""


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    parts: dict[str, float]
    """As the function named them; `{"reward": …}` when it returned one number."""


class RewardPool:
    """`workers` processes of `rollout.reward_worker`; `await score(text, row)` uses whichever is free.

    Args:
        config: Which function, how long, how many, how much memory.
        key: The setting that it is of, for messages.
        printed: File that takes what the reward prints, so that it floods no terminal.
    """

    def __init__(self, config: FunctionReward, key: str, printed: Path) -> None:
        self._config = config
        self._key = key
        self._printed = printed
        self._known_bytes: int | None = None
        """Of the file before the reward printed anything; None once that was said."""
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        """One entry per worker not in use; None where one was ended and the next call starts another."""
        self._workers: set[_Worker] = set()

    async def start(self) -> None:
        """Start the workers.

        Raises:
            ValueError: The reward function cannot be imported.
        """
        self._known_bytes = self._printed.stat().st_size if self._printed.exists() else 0
        for _ in range(self._config.workers):
            self._idle.put_nowait(await self._spawn())

    async def score(self, text: str, row: dict[str, Any]) -> Score:
        """Score one completion; waiting for a free worker is not counted in the time limit.

        Raises:
            CompletionFailed: `reward_timeout`, `reward_raised`, `reward_memory`, `reward_exit`,
                `reward_nonfinite`, `reward_invalid` or `reward_start`.
        """
        worker = await self._idle.get()
        sound = False
        try:
            worker = worker or await self._spawn()
            result = await worker.call({"text": text, "row": row}, self._config.timeout_s)
            sound = result["kind"] in ("ok", "raised") and not result.get("worn")
        except TimeoutError:
            raise self._failed("timeout", f"over {self._config.timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise self._failed("exit", "the reward ended its process") from None
        except RewardStartError as error:
            raise self._failed("start", str(error)) from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self._failed("invalid", str(error)) from None
        finally:  # also when this call is cancelled: the worker is then in the middle of it
            if worker is not None and not sound:
                self._end(worker)
            self._idle.put_nowait(worker if sound else None)
            self._look_at_printed()
        return self._read(result)

    def _read(self, result: dict[str, Any]) -> Score:
        """A worker's answer: the part named `reward` is the reward, else it is the sum of the parts."""
        if result["kind"] != "ok":
            raise self._failed(result["kind"], str(result.get("detail"))[:1000])
        parts: Any = result.get("parts")
        if not isinstance(parts, dict) or len(parts) > MAX_PARTS:
            raise self._failed("invalid", f"expected at most {MAX_PARTS} named numbers")
        for name, number in parts.items():
            named = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name.isprintable()
            if not named or not isinstance(number, float):
                told = f"expected numbers with printable names of at most {MAX_NAME_CHARS} characters"
                raise self._failed("invalid", told)
        reward = parts["reward"] if "reward" in parts else sum(parts.values())
        if not all(abs(number) <= MAX_REWARD for number in (reward, *parts.values())):  # nan is none of them
            raise self._failed("nonfinite", f"{parts}; expected numbers of at most {MAX_REWARD:g}")
        return Score(float(reward), parts)

    def _look_at_printed(self) -> None:
        """Say once where it is, and keep it from filling the disk."""
        size = self._printed.stat().st_size if self._printed.exists() else 0
        if self._known_bytes is not None and size > self._known_bytes:
            self._known_bytes = None
            logger.warning("%s prints; what it prints is in %s", self._key, self._printed)
        if size > MOST_PRINTED_BYTES:
            os.truncate(self._printed, 0)

    def _failed(self, kind: str, detail: str) -> CompletionFailed:
        return CompletionFailed(f"reward_{kind}", f"{self._key}: {detail}")

    async def close(self) -> None:
        workers = list(self._workers)
        for worker in workers:
            self._end(worker)
        await asyncio.gather(*(worker.process.wait() for worker in workers))

    async def _spawn(self) -> "_Worker":
        worker = await _Worker.spawn(self._config, self._key, self._printed)
        self._workers.add(worker)
        return worker

    def _end(self, worker: "_Worker") -> None:
        self._workers.discard(worker)
        worker.kill()


class RewardStartError(ValueError):
    """A reward process does not come up: most often the function cannot be imported."""


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._calls = 0

    @classmethod
    async def spawn(cls, config: FunctionReward, key: str, printed: Path) -> "_Worker":
        """Start a worker and wait until it has imported the function; without file handles wait for those.

        Raises:
            RewardStartError: It cannot.
        """
        while True:
            try:
                return await cls._start(config, key, printed)
            except OSError as error:
                if error.errno not in OUT:
                    raise RewardStartError(f"{key}: no process can be started for it: {error}") from error
                await asyncio.sleep(LOOK_S)

    @classmethod
    async def _start(cls, config: FunctionReward, key: str, printed: Path) -> "_Worker":
        memory = str(config.memory_mib << 20)
        printed.parent.mkdir(parents=True, exist_ok=True)  # each time: logs may be cleared away meanwhile
        with printed.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollout.reward_worker", config.function, memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,  # and what the function prints on its standard output
                start_new_session=True,  # so that what the reward starts is killed with it
            )
        worker, first = cls(process), {}
        try:
            first = await asyncio.wait_for(worker._receive(), START_TIMEOUT_S)
        except (TimeoutError, EOFError, ValueError):
            first = {"kind": "import", "detail": "its process did not come up"}
        finally:
            if first.get("kind") != "ready":
                worker.kill()
        if first["kind"] != "ready":
            raise RewardStartError(
                f"{key}.function={config.function}: {first.get('detail')}; "
                "expected an importable package.module:function"
            )
        return worker

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """
        Raises:
            TimeoutError: No answer in time.
            EOFError, ConnectionError: The process is gone.
            ValueError: The answer is none, or one to a call that was not made.
        """
        assert self.process.stdin is not None
        self._calls += 1
        self.process.stdin.write(frame({**message, "number": self._calls}))
        async with asyncio.timeout(timeout_s):
            await self.process.stdin.drain()
            # An earlier call's answer is a second one, of a reward that wrote where results are written.
            while (number := (result := await self._receive()).get("number")) != self._calls:
                if not isinstance(number, int) or number > self._calls:
                    raise ValueError("an answer to no call")
        return result

    def kill(self) -> None:
        """End the process and all that it started at once."""
        kill_tree(self.process.pid)

    async def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        (size,) = HEADER.unpack(await self.process.stdout.readexactly(HEADER.size))
        if size > MAX_RESULT_BYTES:
            raise ValueError(f"a result of {size} bytes, at most {MAX_RESULT_BYTES}")
        try:
            result: Any = msgpack.unpackb(await self.process.stdout.readexactly(size))
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"a result that is not msgpack: {error}") from None
        if not isinstance(result, dict) or result.get("kind") not in KINDS:
            raise ValueError("a result of no known kind")
        return result
