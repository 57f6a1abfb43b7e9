"""Conversations written as one text, as Anthropic's HH, ChatLearn and DeepSpeed-Chat write them:
"\n\nHuman: hi\n\nAssistant: hello". DeepSpeed-Chat's pages also have "Human: hi Assistant:"."""

import re

ASSISTANT = "\n\nAssistant:"
SPEAKER = re.compile(r"\n\n(Human|Assistant):")
WHOLE = re.compile(r"\s*Human:(.*)\sAssistant:\s*", re.DOTALL)
"""A prompt whose first and last mark may stand without empty lines. Those between them may not, for there
they could be part of what is said."""


def asked(query: str) -> str:
    """A question with the opening of its answer. One that has it already (in ChatLearn's own data for the
    reward model `query` is the whole conversation) stays as it is."""
    return query if opens(query) else f"\n\nHuman: {query}{ASSISTANT} "


def opens(text: str) -> bool:
    """Whether it ends with the opening of an answer."""
    return text.rstrip().endswith(ASSISTANT) or WHOLE.fullmatch(text) is not None


def unrepeated(prompt: str, answers: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Prompt and answers of a row, none of which repeats the prompt.

    Where all answers are whole conversations that begin or end with the prompt's turns, the prompt is what
    they share up to the opening of the first one's last answer. Any other text stands as it is: an answer may
    well begin with the words of the question.
    """
    before = answers[0][: answers[0].rfind(ASSISTANT) + len(ASSISTANT)] if ASSISTANT in answers[0] else ""
    if before and all(answer.startswith(before) for answer in answers):
        own, begun = spoken(prompt.strip()), spoken(before.strip())
        if own in (begun[: len(own)], begun[-len(own) :]):
            kept = prompt if own == begun and opens(prompt) else before
            return kept, tuple(_behind(before, answer, kept) for answer in answers)
    repeated = prompt.strip()
    if opens(prompt) and all(answer.lstrip().startswith(repeated) for answer in answers):
        return prompt, tuple(_behind(repeated, answer.lstrip(), prompt) for answer in answers)
    return prompt, answers


def _behind(repeated: str, answer: str, prompt: str) -> str:
    """The answer alone, without the space that stands at the end of its prompt already."""
    return answer.removeprefix(repeated).removeprefix(prompt[len(prompt.rstrip()) :])


def spoken(text: str) -> list[dict[str, str]]:
    """A prompt's text as chat messages: its turns, where it is such a conversation up to the opening of an
    answer, else one message of the user's."""
    whole = WHOLE.fullmatch(text)
    before, *rest = SPEAKER.split(f"\n\nHuman:{whole[1]}{ASSISTANT}" if whole else text)
    speakers, said = rest[::2], [words.strip() for words in rest[1::2]]
    turns = len(said) // 2
    complete = turns and speakers == ["Human", "Assistant"] * turns and all(said[:-1])
    if before.strip() or not complete or said[-1]:
        return [{"role": "user", "content": text}]
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": words} for role, words in zip(roles[:-1], said[:-1], strict=True)]
