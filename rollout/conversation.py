"""A conversation with one model: the turns so far, and an engine that answers as the words come."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from buffer.rendering import PromptRefused, Renderer
from rollout.engine import Request
from rollout.groups import SamplingPlan


class StreamingEngine(Protocol):
    def stream(self, request: Request) -> AsyncIterator[str]:
        """The text of a completion, piece by piece; see `VLLMEngine.stream`."""
        ...


class Conversation:
    """
    Args:
        engine: Started; serves one set of weights, labelled version 0.
        renderer: Lays out the turns; its tokenizer has a chat template.
        plan: How each answer is sampled.
    """

    def __init__(self, engine: StreamingEngine, renderer: Renderer, plan: SamplingPlan) -> None:
        self._engine = engine
        self._renderer = renderer
        self._plan = plan
        self._asked = 0
        self.messages: list[dict[str, str]] = []
        """The turns so far, as OpenAI's chat has them."""

    async def answer(self, said: str, tell: Callable[[str], None]) -> None:
        """Say something, and hear the answer. One that is cancelled, or fails, is what it came to until then.

        Args:
            tell: Called with each piece of the answer.

        Raises:
            PromptRefused: It cannot be laid out, or leaves no room for an answer; the conversation stays as
                it was.
            CompletionFailed, EngineFailed: As `Engine.generate`.
        """
        messages = [*self.messages, {"role": "user", "content": said}]
        ids = self._renderer.encode(messages)
        room = min(self._plan.max_tokens, self._renderer.room(len(ids)))
        if room < 1:
            raise PromptRefused(
                "too_long", f"the conversation has {len(ids)} tokens by now, which leaves none"
            )
        self._asked += 1
        plan = self._plan
        request = Request(str(self._asked), ids, room, plan.temperature, 0, plan.top_p, plan.top_k)
        pieces: list[str] = []
        try:
            async for piece in self._engine.stream(request):
                # A first token often has the space in it that sets it off from what is before.
                told = piece if pieces else piece.lstrip()
                if told:
                    pieces.append(told)
                    tell(told)
        finally:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
