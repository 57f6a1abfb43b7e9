"""From an example to token ids: prompt and responses apart, so that the boundary between them is exact."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from buffer.examples import Example
from buffer.rendering import PromptRefused, Renderer


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


class Encoder:
    """Renders prompts as rollout servers do, and appends the tokenizer's end mark to every response.

    Args:
        tokenizer: A Hugging Face tokenizer with an end mark.
        max_length: Of prompt and response together, tokens.
        system_prompt: Put before the messages of a prompt that has no system message.
        too_long: What happens to more tokens than that.

    Raises:
        ValueError: The tokenizer has no end mark.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, system_prompt: str | None, too_long: Literal["drop", "cut"]
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{tokenizer.name_or_path}: the tokenizer has no eos_token; a response needs an end mark"
            )
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, max_length, system_prompt)
        self._max_length = max_length
        self._cuts = too_long == "cut"

    def encode(self, example: Example) -> Encoded:
        """
        Raises:
            PromptRefused: `too_long` when a response that it cannot do without does not fit; `bad_row` when
                the prompt cannot be rendered.
        """
        prompt = example.prompt if isinstance(example.prompt, str) else list(example.prompt)
        ids = np.array(self._renderer.encode(prompt), np.int32)
        responses = [self._response(text) for text in example.responses]
        if self._cuts:
            return self._cut(ids, responses, example.scores)
        fits = [len(ids) + len(r) <= self._max_length for r in responses]
        if sum(fits) < min(2, len(responses)):
            lengths = ", ".join(str(len(ids) + len(r)) for r in responses)
            raise PromptRefused("too_long", f"{lengths} tokens, model.max_length={self._max_length}")
        kept = tuple(r for r, fit in zip(responses, fits, strict=True) if fit)
        scores = tuple(s for s, fit in zip(example.scores, fits, strict=bool(example.scores)) if fit)
        return Encoded(ids, kept, scores)

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
