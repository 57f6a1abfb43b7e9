"""Whether long or hard prompts are starved: what was trained, beside what was generated and what ran out."""

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.ma  # np.union1d imports it at its first call, when there may be no file handle left for that

NEWEST = 2000
"""Groups that the comparison looks at."""


def starvation(connection: sqlite3.Connection) -> dict[str, Any]:
    """Over the newest groups whose fate is known, by their mean completion: `report`."""
    (newest,) = connection.execute("SELECT max(sequence) FROM groups").fetchone()
    rows = connection.execute(
        "SELECT CAST(trained_tokens AS REAL) / trajectories, reward, "
        "CASE WHEN uses > 0 THEN 'trained' ELSE state END "
        "FROM groups WHERE sequence > ? AND (uses > 0 OR state != 'stored') ORDER BY sequence",
        ((newest or 0) - NEWEST,),
    ).fetchall()
    return report(rows)


def report(groups: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """Lengths and rewards of the trained groups beside those of all, each group once.

    Args:
        groups: Sampled tokens and reward of the mean completion, and `trained`, `evicted` or `dropped`.

    Returns:
        How many there are of each; `length_ratio`, mean length of trained over that of all generated, 1 where
        no length is preferred; `evicted_length_ratio`, of evicted over trained; `length_ks` and `reward_ks`,
        the Kolmogorov-Smirnov distance of trained from generated, 0 to 1. None where there is nothing to
        compare.
    """
    of = {name: np.array([g[:2] for g in groups if g[2] == name]) for name in ("trained", "evicted")}
    trained, evicted = of["trained"], of["evicted"]
    every = np.array([g[:2] for g in groups])
    known = len(trained) > 0
    return {
        "generated": len(every),
        "trained": len(trained),
        "evicted": len(evicted),
        "length_ratio": _ratio(trained, every) if known else None,
        "evicted_length_ratio": _ratio(evicted, trained) if known and len(evicted) else None,
        "length_ks": distance(trained[:, 0], every[:, 0]) if known else None,
        "reward_ks": distance(trained[:, 1], every[:, 1]) if known else None,
    }


def _ratio(groups: np.ndarray, beside: np.ndarray) -> float:
    return round(float(groups[:, 0].mean() / beside[:, 0].mean()), 4)


def distance(sample: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two empirical distribution functions."""
    points = np.union1d(sample, other)
    below = [np.searchsorted(np.sort(s), points, side="right") / len(s) for s in (sample, other)]
    return round(float(np.abs(below[0] - below[1]).max()), 4)
