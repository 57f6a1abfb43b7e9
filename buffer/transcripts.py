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
