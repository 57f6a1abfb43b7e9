"""A loss of one's own: dual-clip PPO (arXiv 1912.09729, equation 5).

PPO's clip does not hold a bad token (A < 0) whose probability has grown: its loss is -r·A, as large as r.
Dual clip bounds the loss of such a token at -c·A, and leaves it no gradient beyond.
"""

import torch
from torch import Tensor

from learner.packing import MicroBatch

LOW, HIGH = 0.2, 0.2
WORST = 3.0
"""c."""


def loss(logprobs: Tensor, old_logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """The loss of every trained token, [N].

    Args:
        logprobs: float32 [N], log π of the tokens, with gradient.
        old_logprobs: float32 [N], of the policy that the batch began with (`correction.kind: decoupled`), or
            that sampled (`bypass`).
        batch: `advantages`, `weights`, `sequence_index` and what else is known of the N tokens.
    """
    ratio = (logprobs - old_logprobs).exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * batch.advantages)
    bounded = torch.maximum(surrogate, WORST * batch.advantages)
    return -torch.where(batch.advantages < 0, bounded, surrogate)
