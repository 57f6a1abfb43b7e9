"""Rewards into advantages. Pure: numbers in, numbers out; one advantage per trajectory, for all its tokens.

r is the rewards of one group, shape [G], in float64. Called by `learner/step.py`; `docs/algorithms.md` has
the formulas beside their papers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.dotted import is_dotted, resolve

Rewards = NDArray[np.float64]

EPSILON = 1e-5
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over the trajectories of a batch; they add up over data-parallel ranks."""

    count: float
    total: float
    total_squares: float

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1.0)

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for an empty batch."""
        return float(np.sqrt(max(self.total_squares / max(self.count, 1.0) - self.mean**2, 0.0)))


def moments(groups: Sequence[Rewards]) -> Moments:
    values = np.concatenate([np.zeros(0), *groups])
    return Moments(float(len(values)), float(values.sum()), float((values**2).sum()))


def clipped(groups: Sequence[Rewards], limit: float | None) -> list[Rewards]:
    """A shard's rewards inside [-limit, limit]; None leaves them as they are.

    Raises:
        ValueError: A reward that is not finite.
    """
    for number, rewards in enumerate(groups):
        if not np.isfinite(rewards).all():
            raise ValueError(
                f"group {number} of the shard: rewards {rewards.tolist()}; expected finite numbers"
            )
    return list(groups) if limit is None else [rewards.clip(-limit, limit) for rewards in groups]


def length_penalty(lengths: Rewards, limit: int, band: int, penalty: float) -> Rewards:
    """What is added to the rewards of completions of these lengths, [G] in tokens: 0 up to limit - band, from
    there a line to -penalty at the limit (DAPO's soft overlong punishment, arXiv 2503.14476, section 3.4)."""
    return -penalty * ((lengths - (limit - band)) / band).clip(0.0, 1.0)


def advantages(kind: str, groups: Sequence[Rewards], batch: Moments) -> list[Rewards]:
    """Advantages of a shard's groups, each of its rewards' shape; rewards are finite.

    Args:
        kind: Of gae they are 0 until every token gets its own (`learner/returns.py`).
        batch: Moments over all shards; only reinforce_plus_plus looks at them.

    Raises:
        ValueError: A function of the user's made something else than a finite number of each reward.
    """
    if kind == "gae":
        return [np.zeros_like(r) for r in groups]
    if is_dotted(kind):
        return [_own(kind, r) for r in groups]
    if kind == "reinforce_plus_plus":
        return [reinforce_plus_plus(r, batch) for r in groups]
    return [{"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}[kind](r) for r in groups]


def _own(path: str, r: Rewards) -> Rewards:
    made = np.asarray(resolve(path)(r.copy()), np.float64)
    if made.shape != r.shape or not np.isfinite(made).all():
        raise ValueError(f"{path} made {made.tolist()} of rewards {r.tolist()}; expected as many, finite")
    return made


def grpo(r: Rewards) -> Rewards:
    """(r - mean) / (std + ε), population std (DeepSeekMath, arXiv 2402.03300, section 4.1.2). A group of one
    gets 0."""
    return dr_grpo(r) / (r.std() + EPSILON)


def dr_grpo(r: Rewards) -> Rewards:
    """r - mean (Dr.GRPO, arXiv 2503.20783, section 3.2): no division, which would favour nearly solved
    prompts."""
    # The mean of equal numbers may differ from them in the last bit; equal rewards must teach nothing.
    return np.zeros_like(r) if (r == r[0]).all() else r - r.mean()


def rloo(r: Rewards) -> Rewards:
    """r - mean of the others (arXiv 2402.14740, section 2.3). A group of one has no others and gets 0."""
    return dr_grpo(r) * (len(r) / max(len(r) - 1, 1))


def reinforce_plus_plus(r: Rewards, batch: Moments) -> Rewards:
    """(r - mean) / (std + ε) over the whole batch's trajectories (REINFORCE++, arXiv 2501.03262 in its ninth
    version, section 3.1)."""
    return (r - batch.mean) / (batch.std + EPSILON)
