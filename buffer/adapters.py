"""From a row of any known shape to an `Example`. The shape is told by the keys of the first rows.

The shapes are those of ChatLearn (query/response/score, prompt, text, eval_func/answer), DeepSpeed-Chat
(prompt/chosen/rejected), Anthropic's HH transcripts, verl, and those of `buffer/chat_rows.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from buffer.chat_rows import (
    as_plain_messages,
    from_completion,
    from_instruction,
    from_messages,
    from_preference,
    from_turns,
)
from buffer.dotted import RAISED, resolve
from buffer.examples import BadRow, Example, Stage, shown
from buffer.transcripts import ASSISTANT, asked, unrepeated

Row = dict[str, Any]

AUTO = "auto"
SURE = 5
"""The rank above all that `Adapter.rank` gives."""


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    keys: tuple[str, ...]
    """Those a row must have (null counts as missing)."""
    read: Callable[[Row], Example]
    also: tuple[str, ...] = ()
    """Keys it reads beside them where they stand."""
    rank: int = 4
    """Gives way to an adapter of higher rank whose keys are there too."""
    sure: tuple[str, ...] = ()
    """Above every rank where all of these are texts: what else stands in the row is its author's."""

    def rank_of(self, rows: Sequence[Row]) -> int:
        """Of rows that all have its keys."""
        texts = all(isinstance(row.get(key), str) for row in rows for key in self.sure)
        return SURE if self.sure and texts else self.rank

    def __call__(self, row: Any) -> Example:
        """Read one row.

        Raises:
            BadRow: A key is missing or of the wrong type.
        """
        if not isinstance(row, dict):
            raise BadRow(f"expected an object with {_listed(self.keys)}, got {type(row).__name__}")
        for key in self.keys:
            if row.get(key) is None:
                found = _listed(sorted(k for k, v in row.items() if v is not None))
                fault = "null" if key in row else "missing"
                raise BadRow(f"{key}: {fault}; read as {self.name}, keys found: {found}")
        if not isinstance(row.get("metadata") or {}, dict):
            raise BadRow(f"metadata: expected an object, got {shown(row['metadata'])}")
        read = {key: as_plain_messages(row[key]) for key in (*self.keys, *self.also) if key in row}
        return self.read(row | read)

    def told(self, rows: Sequence[Row]) -> str:
        """Name and those of its keys that the rows have, for the log."""
        keys = (*self.keys, *(key for key in self.also if any(row.get(key) is not None for row in rows)))
        return f"{self.name} ({', '.join(keys)})" if keys else self.name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _prompt(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _responses(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _plain(row: Row) -> Example:
    return Example(_prompt(row["prompt"]), (), (), row)


def _text(row: Row) -> Example:
    text = row["text"]
    if not isinstance(text, str) or f"{ASSISTANT} " not in text:
        raise BadRow(f'text: expected text with "\\n\\nAssistant: " in it, got {shown(text)}')
    cut = text.rindex(f"{ASSISTANT} ") + len(ASSISTANT) + 1
    answer = text[cut:]
    return Example(text[:cut], (answer,) if answer.strip() else (), (), row)


def _document(row: Row) -> Example:
    return Example(row["text"], (), (), row)


def _asked(row: Row, key: str) -> Any:
    """The prompt under `key`: the same of one row for every stage."""
    value = row[key]
    return asked(value) if key == "query" and isinstance(value, str) and value else _prompt(value)


def _question(row: Row) -> Example:
    answer = row["answer"]  # a solution in words is good for SFT; a bare number is for the reward alone
    return Example(_prompt(row["question"]), (answer,) if isinstance(answer, str) else (), (), row)


def _query(row: Row) -> Example:
    return Example(_asked(row, "query"), (), (), row)


def _answered(key: str) -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        return Example(_asked(row, key), _responses(row["response"]), (), row)

    return read


def _scored(key: str) -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        responses, scores = _responses(row["response"]), _responses(row["score"])
        try:
            # ChatLearn casts scores to integers, so that 0.7 and 0.3 are a tie there; here they stay floats.
            numbers = tuple(float(s) for s in scores)
        except (TypeError, ValueError):
            raise BadRow(f"score: expected numbers, got {shown(row['score'])}") from None
        return Example(_asked(row, key), responses, numbers, row)

    return read


def _pair(prompt: Any, chosen: Any, rejected: Any, row: Row) -> Example:
    # Some of DeepSpeed-Chat's own data sets have no `rejected`: good for SFT.
    answers = (chosen,) if rejected is None else (chosen, rejected)
    if all(isinstance(text, str) for text in (prompt, *answers)):
        prompt, answers = unrepeated(prompt, answers)
    return Example(prompt, answers, (1.0, 0.0)[: len(answers)], row)


def _rejected(key: str) -> Callable[[Row], Example]:
    return lambda row: _pair(_asked(row, key), row["response"], row["rejected"], row)


def _deepspeed(row: Row) -> Example:
    chosen, rejected = row["chosen"], row.get("rejected")
    if isinstance(chosen, list):
        return from_preference(row)
    return _pair(_prompt(row["prompt"]), chosen, rejected, row)


def _transcripts(row: Row) -> Example:
    """Two whole conversations that differ in their last answer, as text (Anthropic's HH) or as messages."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, list):
        return from_preference(row)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise BadRow(f"chosen, rejected: expected two texts, got {shown(chosen)} and {shown(rejected)}")
    cut = chosen.rfind(ASSISTANT) + len(ASSISTANT)
    if cut < len(ASSISTANT) or chosen[:cut] != rejected[:cut]:
        raise BadRow('chosen, rejected: expected the same text up to the last "\\n\\nAssistant:"')
    return _pair(chosen[:cut], chosen[cut:], rejected[cut:], row)


def _verl(row: Row) -> Example:
    reward = row["reward_model"]
    if not isinstance(reward, dict):
        raise BadRow(f"reward_model: expected an object, got {shown(reward)}")
    if row.get("answer") is None and "ground_truth" in reward:
        row = {**row, "answer": reward["ground_truth"]}
    return Example(_prompt(row["prompt"]), (), (), row)


ADAPTERS: Mapping[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter("prompt", ("prompt",), _plain, also=("answer", "metadata"), rank=1),
        Adapter("text", ("text",), _text, rank=0),
        # Told from `text` by the stage alone: only pretraining takes it where the config says `auto`.
        Adapter("document", ("text",), _document, rank=-1),
        Adapter("query", ("query",), _query, rank=0),
        Adapter("question-answer", ("question", "answer"), _question, rank=-1),
        Adapter("query-response", ("query", "response"), _answered("query")),
        Adapter("prompt-response", ("prompt", "response"), _answered("prompt")),
        Adapter("query-scores", ("query", "response", "score"), _scored("query")),
        Adapter("prompt-scores", ("prompt", "response", "score"), _scored("prompt")),
        Adapter("query-rejected", ("query", "response", "rejected"), _rejected("query")),
        Adapter("rejected", ("prompt", "response", "rejected"), _rejected("prompt")),
        Adapter("math", ("prompt", "eval_func", "answer"), _plain),
        # Its own data sets (Dahoas/rm-static, full-hh-rlhf) have `response` besides, the same as `chosen`.
        Adapter(
            "deepspeed",
            ("prompt", "chosen"),
            _deepspeed,
            ("rejected",),
            sure=("prompt", "chosen", "rejected"),
        ),
        Adapter("transcripts", ("chosen", "rejected"), _transcripts, also=("prompt",), rank=3),
        Adapter("prompt-completion", ("prompt", "completion"), from_completion),
        Adapter("alpaca", ("instruction", "output"), from_instruction, also=("input", "system", "history")),
        Adapter("messages", ("messages",), from_messages, rank=2),
        Adapter("sharegpt", ("conversations",), from_turns, also=("system",), rank=2),
        Adapter("verl", ("data_source", "prompt", "reward_model"), _verl),
    )
}


def find(name: str, first_rows: Sequence[Row], where: str, stage: Stage = "rl") -> Adapter:
    """The adapter of a source.

    Args:
        name: One of `ADAPTERS`, `package.module:function`, or `auto` to tell by the rows.
        first_rows: The first few, at least one.
        where: The source, for the error.
        stage: What the rows are for.

    Raises:
        ValueError: Unknown name, or rows of no or of several known shapes.
    """
    if ":" in name:
        return custom(name)
    if name != AUTO:
        if name not in ADAPTERS:
            raise ValueError(f"adapter {name!r}: expected {AUTO}, {_known()}")
        return ADAPTERS[name]
    best = _fitting(first_rows)
    if len(best) == 1 and _serves(best[0], first_rows, stage):
        return best[0]
    # A few rows that are not like the others, or lack a key that these have (they will be told as bad rows),
    # must not hide what the rest are.
    votes = Counter(fit[0].name for row in first_rows if len(fit := _fitting([row])) == 1)
    for name, count in votes.most_common(1):
        if 2 * count >= len(first_rows):
            return ADAPTERS[name]
    if len(best) == 1:
        return best[0]  # its first row then says what the stage misses
    told = f"could be {' or '.join(a.told(first_rows) for a in best)}" if best else "rows of no known shape"
    found = _listed(sorted(_keys(first_rows[0])))
    raise ValueError(f"{where}: {told}; keys found: {found}; set `adapter` to one of {_known()}")


def _serves(adapter: Adapter, rows: Sequence[Row], stage: Stage) -> bool:
    """Whether the stage can use any of the rows, read so."""
    for row in rows:
        with suppress(BadRow):
            adapter(row).fitted(stage)
            return True
    return False


def _keys(row: Row) -> set[str]:
    return {key for key, value in row.items() if value is not None}


def _fitting(rows: Sequence[Row]) -> list[Adapter]:
    """The adapters that the keys of all these rows speak for, the strongest only."""
    keys = set.intersection(*map(_keys, rows))
    fitting = [a for a in ADAPTERS.values() if set(a.keys) <= keys]
    best = [a for a in fitting if not any(set(a.keys) < set(b.keys) for b in fitting)]
    return [a for a in best if a.rank_of(rows) == max(b.rank_of(rows) for b in best)]


def _known() -> str:
    return f"{', '.join(ADAPTERS)}, or a function of yours, module:function"


def custom(path: str) -> Adapter:
    """A function of the user's: row -> `Example`, or a mapping of its fields.

    Raises:
        ValueError: It cannot be imported.
    """
    function = resolve(path)

    def read(row: Row) -> Example:
        try:
            made = function(row)
        except RAISED as error:  # a user's function may raise anything; it costs this row
            raise BadRow(f"{path} raised {type(error).__name__}: {error}") from error
        if isinstance(made, Mapping):
            fields = {"responses": (), "scores": (), "row": row, "given": None, **made}
            if set(fields) != {"prompt", "responses", "scores", "row", "given"}:
                raise BadRow(f"{path} returned {_listed(sorted(made))}; expected the fields of an Example")
            responses, scores = (_listed_by(path, name, fields[name]) for name in ("responses", "scores"))
            made = Example(_prompt(fields["prompt"]), responses, scores, fields["row"], fields["given"])
        if not isinstance(made, Example):
            raise BadRow(f"{path} returned {type(made).__name__}; expected an Example or its fields")
        if isinstance(made.prompt, tuple):
            return replace(made, prompt=tuple(as_plain_messages(list(made.prompt))))
        return made

    return Adapter(path, (), read)


def _listed_by(path: str, name: str, value: Any) -> tuple[Any, ...]:
    """What a user's function returned as responses or as scores.

    Raises:
        BadRow: It is one thing and no list of them, or has no order.
    """
    # A text would be taken for as many responses as it has letters.
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise BadRow(f"{path} returned responses or scores that are no list: {name} {shown(value)}")
    return tuple(value)


def plain(value: Any) -> Any:
    """`value` as JSON would give it back.

    Raises:
        BadRow: JSON has no word for something in it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise BadRow(f"only plain JSON values in UTF-8 can be sent: {error}") from None
