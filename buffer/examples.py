"""One record for every stage's data, whatever shape its file has."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Stage = Literal["sft", "reward", "dpo", "rl", "pretraining"]
STAGES: tuple[Stage, ...] = get_args(Stage)
ROLES = ("system", "user", "assistant", "tool")
"""Who may say a chat message."""


class BadRow(ValueError):
    """A row that cannot be used; the text says why, and `where` it stands once that is known."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason

    def at(self, where: str) -> "BadRow":
        """The same, told with its place."""
        return type(self)(self.reason, where)


class FileChanged(BadRow):
    """The row's file was written to since it was opened, and the row is not there any more."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with what was answered to it.

    Raises:
        BadRow: A field is of the wrong type; the text names it.
    """

    prompt: str | tuple[dict[str, Any], ...]
    """Text, or chat messages (`role`, `content`)."""
    responses: tuple[str, ...]
    """None for an RL prompt, one for SFT, two or more for the reward model and DPO."""
    scores: tuple[float, ...]
    """As many as responses, or none; a chosen/rejected pair has (1.0, 0.0)."""
    row: dict[str, Any]
    """The whole row as the file has it (answer, eval_func, metadata…): plain JSON."""
    given: int | None = None
    """How many of the prompt's messages are there to be read alone: SFT learns the assistant's among those
    behind them too. None: it learns the response alone."""

    def __post_init__(self) -> None:
        _check_prompt(self.prompt)
        if isinstance(self.responses, str):  # each of its letters would be one
            raise BadRow(f"responses: expected a list of texts, got {shown(self.responses)}")
        if self.given is not None and (not isinstance(self.given, int) or self.given < 0):
            raise BadRow(f"given: expected a number of messages, got {shown(self.given)}")
        for response in self.responses:
            if not isinstance(response, str):
                raise BadRow(f"response: expected text, got {shown(response)}")
        if self.scores and len(self.scores) != len(self.responses):
            raise BadRow(f"{len(self.responses)} responses but {len(self.scores)} scores")
        for score in self.scores:
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise BadRow(f"score: expected a finite number, got {shown(score)}")

    def fitted(self, stage: Stage) -> "Example":
        """What a stage trains on: no response for `rl`; for `sft` the best scored one, or the last answer of
        a conversation that goes on behind it; all of them, with their scores, for `reward` and `dpo`; for
        `pretraining` a text, which is the prompt.

        Raises:
            BadRow: The stage needs more responses than there are.
        """
        match stage:
            case "rl":
                return replace(self, responses=(), scores=())
            case "sft":
                if not self.responses and self.learned:
                    return self._up_to(self.learned[-1])
                if not self.responses:
                    raise BadRow("sft needs a response, this row has none")
                best = max(range(len(self.responses)), key=lambda i: self.scores[i]) if self.scores else 0
                if not self.responses[best].strip():  # the end mark alone would be learned
                    raise BadRow("sft needs text in the response, which is empty here; leave such rows out")
                return replace(self, responses=(self.responses[best],), scores=())
            case "reward" | "dpo":
                if len(self.responses) < 2 or not self.scores:
                    raise BadRow(
                        f"{stage} needs two responses with scores, this row has {len(self.responses)}"
                        f"{'' if self.scores else ' without scores'}"
                    )
                return self
            case "pretraining":
                if not isinstance(self.prompt, str) or self.responses:
                    found = f"{len(self.responses)} responses" if self.responses else "chat messages"
                    raise BadRow(f"pretraining needs a text and nothing else, this row has {found}")
                return self

    @property
    def learned(self) -> tuple[int, ...]:
        """Places of the prompt's messages that SFT learns beside the response. One that opens the
        conversation answers nothing, and is only read."""
        if self.given is None or isinstance(self.prompt, str):
            return ()
        places = range(max(self.given, 1), len(self.prompt))
        return tuple(i for i in places if is_learned(self.prompt[i]))

    def _up_to(self, place: int) -> "Example":
        """The conversation that ends with this message of the prompt."""
        assert not isinstance(self.prompt, str), "a text has no places"
        content = self.prompt[place]["content"]
        if not content:
            raise BadRow("sft needs text in the last answer, which here only calls a tool")
        return replace(self, prompt=self.prompt[:place], responses=(content,))


def is_learned(message: dict[str, Any]) -> bool:
    """Whether it is the assistant's; OpenAI's files mark with weight 0 those that are not to be learned.

    Raises:
        BadRow: It has another weight than 0 and 1.
    """
    if (weight := message.get("weight")) not in (None, 0, 1):
        raise BadRow(f"weight of a message: expected 0 or 1, got {shown(weight)}")
    return message.get("role") == "assistant" and weight != 0


def _check_prompt(prompt: Any) -> None:
    for message in prompt if isinstance(prompt, tuple) else ():
        _check_message(message)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise BadRow(f"prompt: expected text or a list of chat messages, got {shown(prompt)}")


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise BadRow(f"prompt: expected chat messages with `role` and `content`, got {shown(message)}")
    role, content = message["role"], message["content"]
    is_learned(message)
    if role not in ROLES:
        raise BadRow(f"prompt: role {shown(role)}: expected one of {', '.join(ROLES)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        parts = " (parts such as images cannot be trained on)" if isinstance(content, list) else ""
        raise BadRow(f"prompt: content of the {role}: expected text{parts}, got {shown(content)}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
