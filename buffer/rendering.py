"""From a row's prompt to the token ids that an engine samples from and a learner trains behind."""

from typing import Any

from jinja2 import TemplateError

from buffer.transcripts import spoken

ANSWER = "⟨answer⟩"
"""Stands in a rendered conversation where an answer would, to find what follows it."""


class PromptRefused(ValueError):
    """The row can never be sampled from.

    Attributes:
        rule: The name under which its prompt is dropped and counted: `too_long`, `bad_row` or `no_reward`.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Renderer:
    """Applies the tokenizer's chat template.

    A text is one user message, or the turns of a conversation that is written as one
    (`buffer.transcripts`); with a tokenizer that has no template it is encoded as it stands. A list of
    messages needs a template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        max_length: Of prompt and completion together, tokens.
        system_prompt: Put before the messages of a prompt that has no system message.
    """

    def __init__(self, tokenizer: Any, max_length: int, system_prompt: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._system_prompt = system_prompt

    def render(self, row: dict[str, Any], max_tokens: int) -> list[int]:
        """The prompt's token ids, which leave room for `max_tokens` more.

        Raises:
            PromptRefused: `too_long` when they leave less, `bad_row` when there is nothing to render.
        """
        ids = self.encode(row.get("prompt"))
        if len(ids) + max_tokens > self._max_length:
            lengths = f"{len(ids)} prompt tokens and {max_tokens} new ones"
            raise PromptRefused("too_long", f"{lengths} do not fit model.max_length={self._max_length}")
        return ids

    def encode(self, prompt: Any) -> list[int]:
        """The prompt's token ids, whatever their number.

        Raises:
            PromptRefused: `bad_row` when there is nothing to render.
        """
        ids = self._rendered(prompt)
        if not ids:
            raise PromptRefused("bad_row", "an empty prompt")
        return ids

    def room(self, length: int) -> int:
        """How many tokens fit behind so many."""
        return self._max_length - length

    def follow_up(self, messages: list[dict[str, str]], last_id: int) -> list[int]:
        """Token ids of messages that come after an answer, and of the opening of the next one.

        Args:
            messages: Of any role but the answer's.
            last_id: The answer's last token; its end mark is added where it lacks one.

        Raises:
            PromptRefused: There is no template, or it does not just append.
        """
        opened = self._text(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}, *messages], True
        )
        # Only what follows the answer is looked at: some templates write an answer that is not the last
        # without its thoughts, so that two conversations need not begin with the same text.
        mark = self._tokenizer.eos_token
        gap, found, rest = opened.partition(ANSWER)[2].partition(mark) if mark else ("", "", "")
        if not found or gap.strip():
            raise PromptRefused(
                "bad_row", "the chat template cannot go on behind an answer with its end mark"
            )
        rest = rest if last_id == self._tokenizer.eos_token_id else mark + rest
        return list(self._tokenizer.encode(rest, add_special_tokens=False))

    def called(self, messages: list[dict[str, Any]]) -> str:
        """What an assistant says who calls tools, as the template writes it, without the end mark.

        Args:
            messages: Up to the one that calls.

        Raises:
            PromptRefused: The template does not just append it with its end mark.
        """
        before, after = self._text(messages[:-1], True), self._text(messages, False)
        said, found, _ = after.removeprefix(before).rpartition(self._tokenizer.eos_token or "\0")
        if not found or not after.startswith(before):
            raise PromptRefused("bad_row", "the chat template does not append a call of a tool")
        return said

    def _text(self, messages: list[dict[str, Any]], opens: bool) -> str:
        """These messages as text, and the opening of an answer."""
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise PromptRefused("bad_row", f"the chat template refuses what is told: {error}") from None

    def _rendered(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and self._tokenizer.chat_template is None:
            text = f"{self._system_prompt}\n{prompt}" if self._system_prompt else prompt
            return list(self._tokenizer.encode(text))
        messages = spoken(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise PromptRefused("bad_row", "`prompt` is neither text nor a list of chat messages")
        if self._system_prompt and all(m.get("role") != "system" for m in messages):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise PromptRefused("bad_row", f"the chat template refuses it: {error}") from None
