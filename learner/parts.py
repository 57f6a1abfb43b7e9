"""A batch into the parts that its optimizer steps train on: micro-batches, denominators, rewards.

Called by `learner/step.py` on every rank with its data-parallel shard; collective.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from buffer.records import Batch, Group, Trajectory
from learner import collectives, parallel
from learner.advantages import Moments, Rewards, advantages, clipped, length_penalty, moments
from learner.config import LearnerExperiment
from learner.losses import Denominators, Ranking
from learner.packing import MicroBatch, empty, pack
from learner.passes import equal_counts


@dataclass(slots=True)
class Part:
    """What one optimizer step trains on: micro-batches of this rank, denominators of all."""

    micro_batches: list[MicroBatch]
    total: Denominators
    ranking: Ranking
    """Of what `sequence_index` counts, on this rank's device."""
    reference: Iterator[Tensor] | None = None
    """log π_ref of each micro-batch, in their order, as `ReferenceModel.ask` gives them; None where no loss
    looks at it."""

    def fill(self, name: str, found: Sequence[Tensor]) -> None:
        """Put what a model found into that field of every micro-batch; nothing but on the last stage."""
        if found:
            pairs = zip(self.micro_batches, found, strict=True)
            self.micro_batches = [replace(m, **{name: values}) for m, values in pairs]


def parts_of(shard: Batch, experiment: LearnerExperiment) -> list[Part]:
    """One part for each optimizer step of the batch; the same groups in it for every layout.

    Raises:
        ValueError: A reward that is not finite, or a malformed trajectory, with its place.
    """
    learner, algorithm = experiment.learner, experiment.learner.algorithm
    compares_pairs = algorithm.loss == "dpo"
    rewards = shaped_rewards(shard.groups, experiment)
    everyone = [without_cut(g) if algorithm.overlong.filter else g for g in shard.groups]
    if compares_pairs:
        values = [has_pair(g, r) for g, r in zip(everyone, rewards, strict=True)]
    else:
        batch = Moments(*collectives.sum_over_data(astuple(moments(rewards))))
        values = advantages(algorithm.advantage, rewards, batch)
    digests = [_digest(g) for g in everyone]
    homes = update_of_groups(collectives.digests_over_data(digests), learner.updates_per_batch)
    # No pass over a group that has nothing to teach: it would not change the gradient.
    only_moving = not algorithm.trains_equal_groups
    parts = []
    for number in range(learner.updates_per_batch):
        mine = [i for i, digest in enumerate(digests) if homes[digest] == number]
        groups, chosen = [everyone[i] for i in mine], [values[i] for i in mine]
        micro_batches = pack(groups, chosen, learner.tokens_per_microbatch, only_moving, compares_pairs)
        total = _denominators(groups, chosen, experiment.model.max_length, compares_pairs)
        ranking = _ranking([rewards[i] for i in mine])
        parts.append(Part(equal_counts(micro_batches, empty()), total, ranking))
    return parts


def shaped_rewards(groups: Sequence[Group], experiment: LearnerExperiment) -> list[Rewards]:
    """Of each group, clipped, less the penalty of completions near their limit of length."""
    algorithm = experiment.learner.algorithm
    given = [np.array([t.reward for t in g.trajectories], np.float64) for g in groups]
    rewards = clipped(given, algorithm.reward_clip)
    of, limit = algorithm.overlong, experiment.rollout.sampling.max_tokens
    if of.band is None:
        return rewards
    lengths = [np.array([t.loss_mask.sum() for t in g.trajectories], np.float64) for g in groups]
    penalties = [length_penalty(n, limit, of.band, of.penalty) for n in lengths]
    return [r + p for r, p in zip(rewards, penalties, strict=True)]


def without_cut(group: Group) -> Group:
    """With no token of a completion that was cut by its length to be trained."""
    cut = [t.finish_reason == "length" for t in group.trajectories]
    kept = [untrained(t) if is_cut else t for t, is_cut in zip(group.trajectories, cut, strict=True)]
    return replace(group, trajectories=tuple(kept))


def untrained(trajectory: Trajectory) -> Trajectory:
    """With no token to be trained: it is in no micro-batch."""
    return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))


def _denominators(
    groups: list[Group], values: list[Rewards], max_length: int, compares_pairs: bool
) -> Denominators:
    """Of all trained tokens, also those whose loss is zero without being computed; of online DPO, of the
    groups that have a pair."""
    paired = [g for g, v in zip(groups, values, strict=True) if v.any()] if compares_pairs else []
    counted = paired if compares_pairs else groups
    counts = [int(t.loss_mask.sum()) for group in counted for t in group.trajectories]
    tied = len(groups) - len(paired)
    found = collectives.sum_over_data([sum(counts), sum(n > 0 for n in counts), len(paired), tied])
    tokens, sequences, *pairing = found
    return Denominators(tokens, sequences, max_length, *pairing)


def update_of_groups(digests: Iterable[bytes], updates: int) -> dict[bytes, int]:
    """Which optimizer step of the batch trains which group, by digests of the ids of the whole batch.

    Evenly many each, in the digests' order: the same for every layout.
    """
    ordered = sorted(set(digests))
    return {digest: place * updates // len(ordered) for place, digest in enumerate(ordered)}


def has_pair(group: Group, rewards: Rewards) -> Rewards:
    """1 for every trajectory of a group of which two with a trained token differ in their rewards, else 0."""
    compared = {r for t, r in zip(group.trajectories, rewards.tolist(), strict=True) if t.loss_mask.any()}
    return np.full_like(rewards, len(compared) > 1)


def _ranking(rewards: list[Rewards]) -> Ranking:
    # An empty micro-batch counts from 0 too, so there is always one.
    joined = np.concatenate(rewards) if rewards else np.zeros(1)
    groups = np.repeat(np.arange(len(rewards)), [len(r) for r in rewards]) if rewards else np.zeros(1, int)
    device = parallel.device()
    return Ranking(torch.from_numpy(joined).to(device), torch.from_numpy(groups).to(device))


def _digest(group: Group) -> bytes:
    return hashlib.blake2b(group.group_id.encode(), digest_size=collectives.DIGEST_BYTES).digest()
