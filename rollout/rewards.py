"""Reward functions: f(completion_text, row) -> a number, or named numbers.

They run in worker processes (`reward_pool.py`), so a slow or broken one costs no more than its own group. The
row is the prompt's, as the data source gave it. A function of your own has the same shape; name it in
`rollout.rewards` as `package.module:function`. Of named numbers the one called `reward` is the reward;
without one of that name it is their sum.
"""

import logging
import re
from functools import cache
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_number(text: str, row: dict[str, Any]) -> float:
    """1 if the last number in the text is the last one in the answer, else 0. `1,000` and `1000.0` are the
    same; of GSM8K's answers, which are whole solutions, it is the one behind `####`.

    Raises:
        ValueError: There is no number in the answer.
    """
    wanted = NUMBER.findall(str(row["answer"]))
    if not wanted:
        raise ValueError(f"the row's answer {row['answer']!r} has no number in it")
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and _number(numbers[-1]) == _number(wanted[-1]))


def contains(text: str, row: dict[str, Any]) -> float:
    """1 if the answer's text appears in the completion, whatever the case."""
    return float(str(row["answer"]).casefold() in text.casefold())


def math_verify(text: str, row: dict[str, Any]) -> float:
    """1 if the text's final expression, LaTeX or plain, equals the answer as mathematics (math-verify)."""
    from math_verify import parse, verify

    # It would say at every call that these are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its own limits work by SIGALRM; the pool's ends the process, which nothing can swallow.
    gold = parse(str(row["answer"]), parsing_timeout=None)  # type: ignore[arg-type]
    found = parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    return float(verify(gold, found, timeout_seconds=None))


def reasoning_gym(text: str, row: dict[str, Any]) -> float:
    """The score, 0 to 1, that the row's own reasoning-gym dataset gives.

    The row's metadata names the dataset in `source_dataset`. Reads `<answer>…</answer>` where there is one,
    else the whole text.
    """
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
    answers = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    answer = answers[-1] if answers else text
    return float(_scorer(row["metadata"]["source_dataset"])(answer.strip(), entry))


@cache
def _scorer(dataset: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(dataset)


def _number(text: str) -> float:
    return float(text.replace(",", ""))
