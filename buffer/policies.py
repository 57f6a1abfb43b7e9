"""Which stored groups make the next batch: the policies' orders, and the turns that none of them may miss."""

import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from buffer.dotted import resolve
from buffer.errors import BadMessage
from buffer.records import Group
from buffer.staleness import Candidate, Rules, oldest_trainable, owed

ADVANTAGE = "advantage"
UNIFORM_SEED = 104_729
"""Keeps the draws of `uniform` apart from those of the data's order."""


def choose(
    candidates: Sequence[Candidate], leased: Sequence[int], index: int, rules: Rules, seed: int
) -> list[Candidate]:
    """The groups of batch `index` in training order, or [] while it has to wait.

    It waits until enough groups are young enough. Unless the policy is `freshest` it also waits for groups
    on lease that neither this batch nor the later ones could hold otherwise, and takes such groups first,
    whatever the policy prefers: no group that comes back runs out.

    Args:
        candidates: Stored groups with a use left.
        leased: Published version at the lease, of every training lease whose server is heard of.
        index: Of the batch.
        rules: Sizes, bound, policy.
        seed: The run's, for `uniform`.
    """
    floor, count = oldest_trainable(index, rules.max_staleness), rules.groups_per_batch
    young = [c for c in candidates if c.oldest_version >= floor]
    if len(young) < count:
        return []
    ranked = rank(young, rules, index, seed)
    chosen: dict[int, Candidate] = {}
    if rules.keeps_turns:
        unused = [c.oldest_version for c in young if not c.uses]
        # A lease that is older than that is of no use here; should its tokens be younger they are welcome.
        in_flight = sorted([*unused, *(v for v in leased if v >= floor)])
        due = owed([v + rules.max_staleness for v in in_flight], index, count)
        for last, number in due:
            missing = number - len(chosen)
            ready = (c for c in ranked if _is_due(c, last - rules.max_staleness, chosen))
            taken = list(islice(ready, max(0, missing)))
            if len(taken) < missing:
                return []
            chosen |= {c.sequence: c for c in taken}
    rest = (c for c in ranked if c.sequence not in chosen)
    chosen |= {c.sequence: c for c in islice(rest, count - len(chosen))}
    return [c for c in ranked if c.sequence in chosen]


def _is_due(candidate: Candidate, oldest: int, chosen: dict[int, Candidate]) -> bool:
    return not candidate.uses and candidate.oldest_version <= oldest and candidate.sequence not in chosen


def rank(candidates: Sequence[Candidate], rules: Rules, index: int, seed: int) -> list[Candidate]:
    """In the policy's order, the most wanted first.

    fifo takes the oldest lease first, so that a group that took long to generate is trained next; freshest
    the newest versions, of equal ones the oldest lease; both prefer groups that were in fewer batches.
    priority takes the highest, used or not. uniform draws, from the run's seed and the batch's index alone.
    """
    if rules.policy == "uniform":
        by_arrival = sorted(candidates, key=lambda c: c.sequence)
        # RandomState's streams are frozen by numpy's compatibility policy (NEP 19).
        drawn = np.random.RandomState([seed % 2**32, UNIFORM_SEED, index]).permutation(len(by_arrival))
        return [by_arrival[i] for i in drawn]
    orders: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
        "fifo": lambda c: (c.uses, c.turn, c.sequence),
        "freshest": lambda c: (-c.oldest_version, c.uses, c.turn, c.sequence),
        "priority": lambda c: (-c.priority, c.uses, c.turn, c.sequence),
    }
    return sorted(candidates, key=orders[rules.policy])


def spread(rewards: Sequence[float]) -> float:
    """The mean |r − mean r|."""
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum(abs(r - mean) for r in rewards) / len(rewards)


def priority(group: Group, measure: str) -> float:
    """How much a batch wants a group: by `advantage` the mean |r − mean r| of its rewards, which is 0 where
    GRPO's advantages are all 0; or what a function of the user's makes of its rewards and metadata.

    Raises:
        BadMessage: The function failed or returned no finite number.
    """
    rewards = [t.reward for t in group.trajectories]
    if measure == ADVANTAGE:
        return spread(rewards)
    try:
        value = float(resolve(measure)(rewards, [t.metadata for t in group.trajectories]))
    except Exception as error:  # a user's function may raise anything; it costs this group
        raise BadMessage(f"buffer.priority={measure} raised {type(error).__name__}: {error}") from error
    if not math.isfinite(value):
        raise BadMessage(f"buffer.priority={measure}: expected a finite number, got {value}")
    return value
