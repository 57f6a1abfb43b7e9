"""A loss of one's own: CISPO (MiniMax-M1, arXiv 2506.13585, equation 4).

PPO drops the gradient of a token whose ratio left the band. CISPO keeps every token's, and limits only the
weight that it has: sg(min(r, 1 + ε))·A·log π.
"""

from torch import Tensor

from learner.packing import MicroBatch

HIGHEST = 1.3
"""1 + ε of the paper's IS weight."""


def loss(logprobs: Tensor, old_logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """The loss of every trained token, [N].

    Args:
        logprobs: float32 [N], log π of the tokens, with gradient.
        old_logprobs: float32 [N], of the policy that the batch began with (`correction.kind: decoupled`), or
            that sampled (`bypass`).
        batch: `advantages`, `weights`, `sequence_index` and what else is known of the N tokens.
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    return -ratio.clamp(max=HIGHEST) * batch.advantages * logprobs
