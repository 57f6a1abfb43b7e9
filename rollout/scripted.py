"""An engine without a model: the stand-in behind the Engine seam, for tests of everything around it."""

import asyncio
from collections.abc import Callable

import numpy as np

from rollout.engine import Completion, EngineFailed, Request
from sync.sink import StagePlan, WeightSink

Script = Callable[[Request], Completion | Exception]


class ScriptedEngine:
    """Answers each request as a function of it, after a delay.

    Args:
        script: Returns the completion, or the exception to raise.
        delay_s: How long each request takes.
    """

    def __init__(self, script: Script, delay_s: float = 0.0) -> None:
        self.requests: list[Request] = []
        self.running = 0
        self.cancelled = 0
        self.sink: WeightSink = ScriptedSink()
        self._script = script
        self._delay_s = delay_s
        self._failure: asyncio.Future[str] | None = None

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(self._delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        answer = self._script(request)
        if isinstance(answer, EngineFailed):
            self.fail(str(answer))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fail(self, reason: str) -> None:
        """Die, as far as `wait_failed` can tell."""
        assert self._failure is not None, "not started"
        if not self._failure.done():
            self._failure.set_result(reason)

    async def wait_failed(self) -> str:
        assert self._failure is not None, "not started"
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        return


class ScriptedSink:
    """Takes any version and keeps none of it."""

    world_size = 1

    async def stage(self, plan: StagePlan) -> int:
        return 0

    async def load(self, version: int, loaded: Callable[[], None]) -> float:
        loaded()
        return 0.0

    async def drop(self) -> None:
        return


def plain_completion(request: Request, text: str = "7", num_tokens: int = 4) -> Completion:
    """Tokens 10, 11, 12…, each at logprob -0.5, all of the version the request was dispatched under."""
    return Completion(
        token_ids=np.arange(10, 10 + num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.full(num_tokens, request.version, np.int32),
        finish_reason="stop",
        text=text,
    )
