"""How good a model is at a set of prompts, from the rewards of several completions of each."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

PASS_REWARD = 1.0
"""A completion with at least this reward passes."""


def pass_at(k: int, samples: int, passed: int) -> float:
    """Probability that one of k completions drawn without replacement from `samples` passes.

    Unbiased: 1 − C(n−c, k) / C(n, k), equation 1 of arXiv 2107.03374.

    Args:
        k: 1 to `samples`.
        samples: n, completions of the prompt.
        passed: c, how many of them passed.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def rates(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Score and pass rates over prompts.

    Args:
        rewards: Per prompt, of its completions; prompts without completions are left out.

    Returns:
        `prompts`, `completions`, `score` (mean reward), `stderr` of the score over prompts, and `pass@k` for
        k = 1, 2, 4… up to the fewest completions any prompt has. Only the two counts when nothing was scored.
    """
    scored = [r for r in rewards if r]
    counts: dict[str, float] = {"prompts": len(scored), "completions": sum(map(len, scored))}
    if not scored:
        return counts
    means = [fmean(r) for r in scored]
    spread = math.sqrt(sum((m - fmean(means)) ** 2 for m in means) / max(1, len(means) - 1))
    fewest = min(len(r) for r in scored)
    passed = [(len(r), sum(reward >= PASS_REWARD for reward in r)) for r in scored]
    ks = [2**i for i in range(fewest.bit_length())]
    return {
        **counts,
        "score": fmean(means),
        "stderr": spread / math.sqrt(len(means)),
        **{f"pass@{k}": fmean(pass_at(k, n, c) for n, c in passed) for k in ks if k <= fewest},
    }


def part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named part of the reward, over the completions that have it."""
    names = sorted({name for p in parts for name in p})
    return {name: fmean(p[name] for p in parts if name in p) for name in names}
