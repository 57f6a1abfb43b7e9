"""Completions of several turns: what the policy says is sampled and trained, what it is told is neither.

An episode is a function of the user's, called once for each completion, when the prompt is rendered:

    async def guess(row, chat):
        while (answer := await chat.reply()) is not None:
            if answer.strip() == row["secret"]:
                return {"found": True}
            chat.tell("No. Guess again.")

What it returns, a mapping or nothing, stands under the key `episode` in the row that the rewards are given.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from buffer.dotted import resolve
from buffer.rendering import PromptRefused, Renderer
from rollout.engine import Completion, CompletionFailed, EngineFailed

Sample = Callable[[list[int], int], Awaitable[Completion]]
"""From all token ids so far and the turn's number, from 0, to what the policy says next."""


class Chat:
    """One conversation. Its token ids only grow, so that what was sampled is what is trained."""

    def __init__(self, sample: Sample, renderer: Renderer, prompt_ids: list[int]) -> None:
        self._sample = sample
        self._renderer = renderer
        self._ids = list(prompt_ids)
        self._pending: list[dict[str, str]] = []
        self._parts: list[Completion] = []
        self.transcript: list[dict[str, str]] = []
        """What was said and told so far, as chat messages, to be read by people."""
        self.turns = 0
        """How often the policy spoke."""

    async def reply(self) -> str | None:
        """Sample what the policy says next: its text, or None when it can say no more, because it was cut off
        or because model.max_length leaves no room.

        Raises:
            CompletionFailed: It just spoke and was told nothing since, or never spoke and was told something.
        """
        if self._parts and self._parts[-1].finish_reason != "stop":
            return None
        told = self._render() if self._parts else self._nothing_told()
        if self._renderer.room(len(self._ids) + len(told)) < 1:
            return None
        self._append(_told(told))
        said = await self._sample(self._ids, self.turns)
        self._append(said)
        self.turns += 1
        self.transcript.append({"role": "assistant", "content": said.text})
        return said.text

    def tell(self, text: str, role: str = "user") -> None:
        """Have the next reply answer a message too, which the tokenizer's chat template renders."""
        self._pending.append({"role": role, "content": text})

    def completion(self) -> Completion:
        """All turns as one; text and finish reason are the last reply's.

        Raises:
            CompletionFailed: The policy was never asked.
        """
        if not self.turns:
            raise CompletionFailed("episode", "ended without a reply")
        parts = [part for part in self._parts if len(part.token_ids)]
        return replace(
            self._parts[-1],
            token_ids=np.concatenate([p.token_ids for p in parts]),
            logprobs=np.concatenate([p.logprobs for p in parts]),
            versions=np.concatenate([p.versions for p in parts]),
            sampled=np.concatenate([p.sampled_mask for p in parts]),
            turns=self.turns,
        )

    def _render(self) -> list[int]:
        if not self._pending:
            raise CompletionFailed("episode", "asks twice for a reply; expected chat.tell between them")
        pending, self._pending = self._pending, []
        self.transcript += pending
        return self._renderer.follow_up(pending, self._ids[-1])

    def _nothing_told(self) -> list[int]:
        if self._pending:
            raise CompletionFailed("episode", "tells before the first reply; expected that in the prompt")
        return []

    def _append(self, part: Completion) -> None:
        self._parts.append(part)
        self._ids = [*self._ids, *part.token_ids.tolist()]


def _told(ids: Sequence[int]) -> Completion:
    zeros = np.zeros(len(ids), np.int32)
    return Completion(
        np.asarray(ids, np.int32), zeros.astype(np.float32), zeros, "stop", "", zeros.astype(np.uint8)
    )


async def answered(
    episode: str | None, row: dict[str, Any], prompt_ids: list[int], sample: Sample, renderer: Renderer
) -> tuple[Completion, dict[str, Any], list[dict[str, str]]]:
    """What the policy answers to a prompt.

    Args:
        episode: Where the user's function is; None asks for one reply.

    Returns:
        The completion, the row for the rewards, and what was said and told, which is nothing without an
        episode.

    Raises:
        CompletionFailed, PromptRefused, EngineFailed: As `play`.
    """
    if episode is None:
        return await sample(prompt_ids, 0), row, []
    chat = Chat(sample, renderer, prompt_ids)
    row = await play(episode, row, chat)
    return chat.completion(), row, chat.transcript


async def play(path: str, row: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """Run the user's episode to its end; the row for the rewards.

    Raises:
        CompletionFailed: It raised something, or returned no mapping.
        PromptRefused: What it told cannot be rendered.
        EngineFailed: The engine is gone.
    """
    try:
        outcome = await resolve(path)(row, chat)
    except (CompletionFailed, PromptRefused, EngineFailed):
        raise
    except Exception as error:  # a user's function may raise anything; it costs this completion
        raise CompletionFailed("episode", f"{path} raised {type(error).__name__}: {error}") from error
    if outcome is not None and not isinstance(outcome, Mapping):
        raise CompletionFailed("episode", f"{path} returned {type(outcome).__name__}; expected a mapping")
    return {**row, "episode": dict(outcome or {})}
