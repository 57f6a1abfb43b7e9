"""What a scorer reads: whether the policy's token ids are its own, and text laid out as it was trained on."""

import hashlib
import json
from typing import Any

from buffer.rendering import PromptRefused, Renderer
from rollout.scorer.wire import Words


def fingerprint(tokenizer: Any) -> str:
    """Equal for two tokenizers that turn the same chat into the same ids, and end it the same way.

    Of what it does, not of its files: those hold the version that wrote them and the folder's name.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {}
    # Of the last call, not of the tokenizer.
    said = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    content = [
        said or type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        tokenizer.eos_token_id,
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class WordsRenderer:
    """Lays a chat out in the scorer's own tokens, as the reward stage does: prompt, response, end mark.

    Args:
        tokenizer: A Hugging Face tokenizer.
        max_length: Of everything together, tokens.
        system_prompt: Put before the messages of a prompt that has no system message.

    Raises:
        ValueError: The tokenizer has no end mark.
    """

    def __init__(self, tokenizer: Any, max_length: int, system_prompt: str | None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{tokenizer.name_or_path}: the tokenizer has no eos_token; it is read there")
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._renderer = Renderer(tokenizer, max_length, system_prompt)

    def render(self, words: Words) -> list[int]:
        """The ids whose last one the score is read at.

        Raises:
            PromptRefused: `bad_row`, or `too_long` when there are more than `max_length`.
        """
        response = list(self._tokenizer.encode(words.completion, add_special_tokens=False))
        if words.ended:
            response.append(self._tokenizer.eos_token_id)
        ids = self._renderer.render({"prompt": words.prompt}, 0) + response
        if len(ids) > self._max_length:
            raise PromptRefused("too_long", f"{len(ids)} tokens; the scorer takes {self._max_length}")
        return ids
