"""From an example to token ids: prompt and responses apart, so that the boundary between them is exact."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from buffer.examples import Example
from buffer.rendering import PromptRefused, Renderer
from buffer.transcripts import opens


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example in token ids."""

    prompt: NDArray[np.int32]
    responses: tuple[NDArray[np.int32], ...]
    """Each with its end mark, unless it was cut."""
    scores: tuple[float, ...]
    """As many as responses, or none."""
    cut: bool = False
    """Whether anything of it is missing."""
    learned: NDArray[np.bool_] | None = None
    """Of a conversation, whose one response goes from its first learned answer to its last: which of the
    response's tokens are an answer's or its end mark. None: all."""

    @property
    def targets(self) -> tuple[NDArray[np.int64], ...]:
        """Of each response, the places of its tokens that are trained, rising."""
        if self.learned is not None:
            return (np.flatnonzero(self.learned),)
        return tuple(np.arange(len(r)) for r in self.responses)

    @property
    def trained(self) -> int:
        """How many tokens are."""
        return sum(map(len, self.targets))


def check_known(ids: NDArray[np.int32], vocabulary: int, tokenizer: Any) -> None:
    """
    Raises:
        ValueError: The model has no such token. On tensor-parallel ranks it would be embedded as zeros, and
            get the logprob of nothing.
    """
    highest = int(ids.max(initial=0))
    if highest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise ValueError(
            f"{tokenizer.name_or_path}: the tokenizer makes token {highest} ({token!r}) of a row, and by "
            f"vocab_size in config.json the model has {vocabulary}; expected the model's own tokenizer, or "
            "embeddings that were resized for the tokens that were added to it"
        )


class Encoder:
    """Renders prompts as rollout servers do, and appends the tokenizer's end mark to every response.

    Args:
        tokenizer: A Hugging Face tokenizer with an end mark.
        max_length: Of prompt and response together, tokens.
        system_prompt: Put before the messages of a prompt that has no system message.
        too_long: What happens to more tokens than that.
        every_turn: Whether a conversation's earlier answers are responses too.
        vocabulary: Tokens that the model has; None where nobody knows.

    Raises:
        ValueError: The tokenizer has no end mark.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        system_prompt: str | None,
        too_long: Literal["drop", "cut"],
        every_turn: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{tokenizer.name_or_path}: the tokenizer has no eos_token; a response needs an end mark"
            )
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, max_length, system_prompt)
        self._max_length = max_length
        self._cuts = too_long == "cut"
        self._every_turn = every_turn
        self._vocabulary = vocabulary

    def renders(self, example: Example) -> bool:
        """Whether the tokenizer can render rows like it at all."""
        return isinstance(example.prompt, str) or self._tokenizer.chat_template is not None

    def encode(self, example: Example) -> Encoded:
        """
        Raises:
            PromptRefused: `too_long` when a response that it cannot do without does not fit; `bad_row` when
                the prompt, or what stands between a conversation's answers, cannot be rendered.
            ValueError: The model lacks one of the tokens.
        """
        found = self._encoded(example)
        if self._vocabulary is not None:
            for ids in (found.prompt, *found.responses):
                check_known(ids, self._vocabulary, self._tokenizer)
        return found

    def _encoded(self, example: Example) -> Encoded:
        if not self.renders(example):
            raise PromptRefused("bad_row", "chat messages, and the tokenizer has no chat template")
        if self._every_turn and example.learned:
            return self._conversation(example)
        prompt = example.prompt if isinstance(example.prompt, str) else list(example.prompt)
        ids = np.array(self._renderer.encode(prompt), np.int32)
        said = example.responses
        if isinstance(prompt, str) and self._tokenizer.chat_template is not None and opens(prompt):
            # The template takes the turns before it without the space behind their marks.
            said = tuple(text.strip() for text in said)
        responses = [self._response(text) for text in said]
        if self._cuts:
            return self._cut(ids, responses, example.scores)
        fits = [len(ids) + len(r) <= self._max_length for r in responses]
        if sum(fits) < min(2, len(responses)):
            lengths = ", ".join(str(len(ids) + len(r)) for r in responses)
            raise PromptRefused("too_long", f"{lengths} tokens, model.max_length={self._max_length}")
        kept = tuple(r for r, fit in zip(responses, fits, strict=True) if fit)
        scores = tuple(s for s, fit in zip(example.scores, fits, strict=bool(example.scores)) if fit)
        return Encoded(ids, kept, scores)

    def _conversation(self, example: Example) -> Encoded:
        """Tokens as an episode of `rollout/episodes.py` would have them: each answer with its end mark, and
        what the template writes up to the next."""
        assert not isinstance(example.prompt, str), "a text has no answers in it"
        messages, places = list(example.prompt), example.learned
        parts: list[NDArray[np.int32]] = []
        for place, end in pairwise((*places, len(messages))):
            answer = self._answer(messages, place)
            told = self._renderer.follow_up(messages[place + 1 : end], int(answer[-1]))
            parts += [answer, np.array(told, np.int32)]
        parts.append(self._response(example.responses[0]))
        response = np.concatenate(parts)
        learned = np.concatenate([np.full(len(part), i % 2 == 0) for i, part in enumerate(parts)])
        prompt = np.array(self._renderer.encode(messages[: places[0]]), np.int32)
        if self._cuts:
            found = self._cut(prompt, [response], ())
            return replace(found, learned=learned[: len(found.responses[0])])
        if len(prompt) + len(response) > self._max_length:
            raise PromptRefused(
                "too_long", f"{len(prompt) + len(response)} tokens, model.max_length={self._max_length}"
            )
        return Encoded(prompt, (response,), (), learned=learned)

    def _answer(self, messages: list[dict[str, Any]], place: int) -> NDArray[np.int32]:
        if messages[place].get("tool_calls"):
            return self._response(self._renderer.called(messages[: place + 1]))
        return self._response(messages[place]["content"])

    def _response(self, text: str) -> NDArray[np.int32]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        end = self._tokenizer.eos_token_id
        return np.array(ids if ids[-1:] == [end] else [*ids, end], np.int32)

    def _cut(
        self, prompt: NDArray[np.int32], responses: list[NDArray[np.int32]], scores: tuple[float, ...]
    ) -> Encoded:
        room = max(self._max_length - max(map(len, responses)), self._max_length // 2)
        left = prompt[-room:]
        kept = tuple(r[: self._max_length - len(left)] for r in responses)
        cut = len(left) < len(prompt) or any(len(k) < len(r) for k, r in zip(kept, responses, strict=True))
        return Encoded(left, kept, scores, cut)
