"""Rows that hold a conversation, or a question and its answer, as data sets for chat models have them.

OpenAI's and TRL's messages (`role`, `content`), ShareGPT's turns (`from`, `value`), Alpaca's instructions.
"""

from collections.abc import Mapping
from typing import Any

from buffer.examples import BadRow, Example, is_learned, shown

Row = dict[str, Any]
Messages = tuple[Any, ...]

SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's `from` and what its relatives write there, as roles."""


def from_messages(row: Row) -> Example:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"messages: expected a list of chat messages, got {shown(messages)}")
    return _conversation((), tuple(messages), "messages", row)


def from_turns(row: Row) -> Example:
    """ShareGPT's."""
    turns, system = row["conversations"], row.get("system")
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"conversations: expected a list of turns, got {shown(turns)}")
    return _conversation(_said("system", system), tuple(map(_message, turns)), "conversations", row)


def from_completion(row: Row) -> Example:
    """TRL's prompt and completion, both texts or both messages: of these the completion alone is learned."""
    if row.get("label") is False:  # data for KTO: this is how not to answer
        raise BadRow("label: false, so the completion is not one to learn; leave such rows out")
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(completion, list):
        return Example(tuple(prompt) if isinstance(prompt, list) else prompt, (completion,), (), row)
    return _conversation(_as_messages(prompt), tuple(completion), "completion", row)


def from_instruction(row: Row) -> Example:
    """Alpaca's, with the `system` and `history` (pairs of instruction and answer) that some files have."""
    instruction, question, history = row["instruction"], row.get("input") or "", row.get("history") or []
    for name, value in (("instruction", instruction), ("input", question)):
        if not isinstance(value, str):
            raise BadRow(f"{name}: expected text, got {shown(value)}")
    text = f"{instruction}\n{question}" if question else instruction
    before = _said("system", row.get("system"))
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history: expected pairs of instruction and answer, got {shown(pair)}")
        before += _said("user", pair[0]) + _said("assistant", pair[1])
    if not before:
        return Example(text, (row["output"],), (), row)
    return Example((*before, *_said("user", text)), (row["output"],), (), row, given=0)


def from_preference(row: Row) -> Example:
    """`chosen`, and mostly `rejected`, in messages: whole conversations that differ in their last answer, or
    what follows the row's `prompt`."""
    begun, chosen = _last_turn(row["chosen"], "chosen")
    answers = [chosen]
    if row.get("rejected") is not None:
        other, rejected = _last_turn(row["rejected"], "rejected")
        if begun != other:
            raise BadRow("chosen, rejected: expected the same messages but for the last")
        answers.append(rejected)
    prompt = _continued(row.get("prompt"), begun)
    return Example(prompt, tuple(answers), (1.0, 0.0)[: len(answers)], row)


def _continued(prompt: Any, begun: Messages) -> Any:
    """The prompt of a pair: `begun`, which may or may not repeat the row's own `prompt`, or the end of it."""
    if not begun:
        return tuple(prompt) if isinstance(prompt, list) else prompt
    own = _as_messages(prompt)
    if isinstance(prompt, list):
        if own == begun[-len(own) :]:
            return begun
        shared = range(min(len(own), len(begun)), 0, -1)
        repeated = next((n for n in shared if own[-n:] == begun[:n]), 0)
        return (*own, *begun[repeated:])
    answers_it = isinstance(begun[0], dict) and begun[0].get("role") == "assistant"
    return (*own, *begun) if prompt and answers_it else begun


def _conversation(before: Messages, messages: Messages, key: str, row: Row) -> Example:
    """One whose assistant's messages are learned, but for those among `before`."""
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return Example((*before, *messages), (), (), row, given=len(before))
    prompt, response = _last_turn(list(messages), key)
    answers = (response,) if is_learned(last) else ()
    return Example((*before, *prompt), answers, (), row, given=len(before))


def as_plain_messages(value: Any) -> Any:
    """The chat messages, or turns, in a list as every reader and template is to see them; what is none stays
    as it is.

    A key that is null goes, but for the two of every message: Hugging Face `datasets` and parquet give each
    message every key that any has, and a template that finds `tool_calls` takes it for a call. Content that
    stands as OpenAI's parts, and is text throughout, is joined.
    """
    return [_plain_message(m) for m in value] if isinstance(value, list) else value


def _plain_message(message: Any) -> Any:
    if not isinstance(message, dict) or not {"role", "from"} & set(message):
        return message
    # Content that is null beside a call of a tool is what some templates look for.
    said: Row = {
        key: value for key, value in message.items() if value is not None or key in ("role", "content")
    }
    return {**said, "content": "".join(p["text"] for p in said["content"])} if _in_parts(said) else said


def _in_parts(message: Row) -> bool:
    parts = message.get("content")
    return (
        isinstance(parts, list)
        and parts != []
        and all(
            isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
        )
    )


def _last_turn(messages: Any, key: str) -> tuple[Messages, str]:
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or not last.get("content"):
        raise BadRow(f"{key}: expected messages that end with the assistant's, got {shown(messages)}")
    return tuple(messages[:-1]), last["content"]


def _as_messages(prompt: Any) -> Messages:
    return tuple(prompt) if isinstance(prompt, list) else _said("user", prompt)


def _said(role: str, text: Any) -> Messages:
    return ({"role": role, "content": text},) if text else ()


def _message(turn: Any) -> Any:
    """A chat message of ShareGPT's turn; some files name its keys as chat messages do."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadRow(f"conversations: from {shown(speaker)}: expected one of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": turn.get("value")}
