"""A reward of one's own: shorter answers are better, once they are right.

A reward is a function of the completion's text and of the prompt's row. It runs in its own process, where
it may import what it likes; what it raises costs that one completion.
"""

from typing import Any

from rollout.rewards import exact_number

ENOUGH = 10
"""Words that an answer may have before it costs something."""


def reward(text: str, row: dict[str, Any]) -> dict[str, float]:
    """Named numbers are added up, and each is in the metrics: `reward_parts/brevity/right`, `…/short`."""
    right = exact_number(text, row)
    return {"right": right, "short": right * min(1.0, ENOUGH / max(1, len(text.split())))}
