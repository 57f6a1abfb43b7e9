"""An environment of one's own: a number is to be guessed in a few turns, with a hint after each guess.

The function is called once for every completion. What the policy says is sampled by the engine and trained;
what it is told is neither. It may await whatever it needs (a tool, a browser, a game) between two replies.
"""

import re
from typing import Any

from rollout.episodes import Chat

GUESSES = 3


def rows(count: int = 64) -> list[dict[str, Any]]:
    prompt = "I think of a number from 1 to 9. Guess it. Answer with the number only."
    return [{"prompt": prompt, "answer": str(1 + number * 4 % 9)} for number in range(count)]


async def episode(row: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """Play to the end; what is returned is `row["episode"]` for the reward."""
    secret, proper = int(row["answer"]), 0
    while (said := await chat.reply()) is not None:
        number = re.search(r"\d+", said)
        proper += re.fullmatch(r"[1-9]\.?", said.strip()) is not None
        if number and int(number[0]) == secret:
            return {"found": True, "guesses": chat.turns, "proper": proper}
        if chat.turns == GUESSES:
            break
        hint = "Say a number." if not number else "Higher." if int(number[0]) < secret else "Lower."
        chat.tell(hint)
    return {"found": False, "guesses": chat.turns, "proper": proper}


def reward(_text: str, row: dict[str, Any]) -> dict[str, float]:
    """A number is found so rarely at first that the form of an answer has to be worth something too."""
    played = row["episode"]
    return {
        "found": float(played["found"]),
        "early": 0.2 * (GUESSES - played["guesses"]) * played["found"],
        "form": 0.3 * played["proper"] / max(1, played["guesses"]),
    }
