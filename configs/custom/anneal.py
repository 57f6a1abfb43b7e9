"""A loop and an advantage of one's own: the price of length rises while the policy learns.

The loop is the main loop of `learner/loop.py` with one thing more: what a completion earned is changed before
it is trained. All ranks run it; each verb of the flow is collective, so every rank calls the same ones.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from buffer.records import Batch
from learner.flow import Flow

PRICE = 0.02
"""Of one token, at the end of the run."""


def loop(flow: Flow) -> None:
    for batch in flow.batches():
        price = PRICE * flow.version / flow.steps
        report = flow.update(charged(batch, price))
        flow.publish()
        if flow.save_due():
            flow.save()
        flow.report(batch, report, price=price)


def charged(batch: Batch, price: float) -> Batch:
    """The same batch, whose completions pay for each token that they have."""
    groups = tuple(
        replace(
            group,
            trajectories=tuple(
                replace(t, reward=t.reward - price * int(t.loss_mask.sum())) for t in group.trajectories
            ),
        )
        for group in batch.groups
    )
    return replace(batch, groups=groups)


def ranks(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Advantages of one group's rewards: their ranks, centred, ties sharing theirs. However far the best is
    ahead, it teaches as much."""
    below = (rewards[None, :] < rewards[:, None]).sum(1)
    above = (rewards[None, :] > rewards[:, None]).sum(1)
    return (below - above) / len(rewards)
