"""Sums of two digits, the demo's task: a model of 135 million parameters learns it in minutes."""

import random
from typing import Any, Literal

NUM_HELD_OUT = 8
"""Sums, each in both orders: 4 + 3 tells what 3 + 4 is."""

EQUATION = "{a} + {b} = {sum}"
PHRASINGS = ("{sum}", "The answer is {sum}.", EQUATION)
"""Ways to give a sum; its number is the last one in each."""


def train(seed: int = 1) -> list[dict[str, Any]]:
    """65 of the 81 ordered pairs of digits 1 to 9, as rows with `prompt`, `answer` and `metadata`."""
    apart = _held_out(seed)
    return [_row(a, b) for a, b in _shuffled_pairs(seed) if {a, b} not in apart]


def heldout(seed: int = 1) -> list[dict[str, Any]]:
    """The other 16 pairs: no row of `train` with the same seed asks any of them, in either order."""
    apart = _held_out(seed)
    return [_row(a, b) for a, b in _shuffled_pairs(seed) if {a, b} in apart]


def answered(part: Literal["train", "heldout"] = "train", seed: int = 1) -> list[dict[str, Any]]:
    """The sums of a part with the right `response`, for SFT."""
    return [{"prompt": row["prompt"], "response": row["answer"]} for row in PARTS[part](seed)]


def compared(part: Literal["train", "heldout"] = "train", seed: int = 1) -> list[dict[str, Any]]:
    """The sums of a part with three responses, the nearer the sum the higher the `score`: for a reward model
    or DPO."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for row in PARTS[part](seed):
        errors = [0, *chance.sample([-3, -2, -1, 1, 2, 3], 2)]
        answers = [str(int(row["answer"]) + e) for e in errors]
        rows.append({"prompt": row["prompt"], "response": answers, "score": [-abs(e) / 10 for e in errors]})
    return rows


def phrased(part: Literal["train", "heldout"] = "train", seed: int = 1) -> list[dict[str, Any]]:
    """The sums of a part, each answered rightly in every phrasing, for SFT: none of them is preferred."""
    return [
        {"prompt": row["prompt"], "response": _say(phrasing, row)}
        for row in PARTS[part](seed)
        for phrasing in PHRASINGS
    ]


def liked(part: Literal["train", "heldout"] = "train", seed: int = 1) -> list[dict[str, Any]]:
    """The sums of a part, each answered rightly and wrongly in every phrasing, for a reward model: a right
    sum is better than a wrong one, and then the whole equation better than the other phrasings."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for row in PARTS[part](seed):
        errors = (0, chance.choice([-3, -2, -1, 1, 2, 3]))
        answers = [(error, phrasing) for error in errors for phrasing in PHRASINGS]
        rows.append(
            {
                "prompt": row["prompt"],
                "response": [_say(phrasing, row, error) for error, phrasing in answers],
                "score": [2.0 * (error == 0) + (phrasing == EQUATION) for error, phrasing in answers],
            }
        )
    return rows


def _say(phrasing: str, row: dict[str, Any], error: int = 0) -> str:
    return phrasing.format(**row["metadata"], sum=int(row["answer"]) + error)


def _shuffled_pairs(seed: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(seed).shuffle(pairs)
    return pairs


def _held_out(seed: int) -> list[set[int]]:
    sums = [{a, b} for a, b in _shuffled_pairs(seed) if a < b]
    return sums[:NUM_HELD_OUT]


PARTS = {"train": train, "heldout": heldout}


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "metadata": {"a": a, "b": b}}
