"""What the rollout loop asks of an inference engine, and the records that pass between them.

`VLLMEngine` is the one that serves; `rollout.scripted.ScriptedEngine` stands in for it in unit tests.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.fields import one_line
from sync.sink import WeightSink


class EngineFailed(RuntimeError):
    """The engine is gone; nothing can be generated any more. One line, fit to print."""


class CompletionFailed(RuntimeError):
    """One completion cannot be used; the engine lives.

    Its text is one line, whatever a user's function put into it.

    Attributes:
        kind: The name under which it is counted: `engine`, `nonfinite_logprob`, `reward_timeout`…
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {one_line(detail)}" if detail else kind)
        self.kind = kind


class CompletionAborted(CompletionFailed):
    """The weights changed, and `rollout.on_update` is `abort`: it may be sampled anew at once.

    Attributes:
        tokens: That were sampled for nothing.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__("aborted", f"after {tokens} tokens")
        self.tokens = tokens


def gravest(failures: BaseExceptionGroup[Any]) -> BaseException:
    """One exception to speak for all: anything that is more than a failed completion comes first."""
    return next(
        (e for e in failures.exceptions if not isinstance(e, CompletionFailed)), failures.exceptions[0]
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. Made by the group runner, read by the engine."""

    request_id: str
    """Unique among the requests of this engine."""
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    """0 is greedy."""
    version: int
    """The policy version in force at dispatch; key-value blocks of another one are not reused."""
    top_p: float = 1.0
    top_k: int | None = None
    """Both never of a completion to train: its distribution would not be the policy's."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled: N tokens, an end-of-sequence token among them when it was sampled."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """[N], of each sampled token under the distribution it was drawn from, temperature included."""
    versions: NDArray[np.int32]
    """[N], the policy version whose weights sampled the token."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    """Decoded without special tokens, and up to the stop string that ended it, if one did."""
    sampled: NDArray[np.uint8] | None = None
    """[N], 0 where the policy was told the token between two turns; None where it sampled all of them."""
    turns: int = 1

    @property
    def sampled_mask(self) -> NDArray[np.uint8]:
        return np.ones(len(self.token_ids), np.uint8) if self.sampled is None else self.sampled


class Engine(Protocol):
    """Generates with weights that its `sink` replaces while requests are running."""

    @property
    def sink(self) -> WeightSink: ...

    async def start(self) -> None:
        """Load the model and get ready.

        Raises:
            EngineFailed: It does not come up.
        """
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one completion; cancelling the call ends the request in the engine.

        Raises:
            CompletionFailed: This one is not usable; `CompletionAborted` if only the weights changed.
            EngineFailed: The engine is gone.
        """
        ...

    async def wait_failed(self) -> str:
        """Wait until the engine dies by itself; returns what is known of why."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
