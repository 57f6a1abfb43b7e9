"""Policy losses: what is lost at every token, and where the loss's trust region held it back.

Shapes: N trained tokens of one micro-batch. Pure. Each gives the loss [N], whose mean over the batch is
minimized, and a bool [N]: the token's gradient was stopped or limited. `old` is log π_prox, or log μ with
`correction.kind: bypass`; A the advantages.
"""

import torch
from torch import Tensor

from buffer.dotted import is_dotted, resolve
from learner.algorithm import AlgorithmConfig
from learner.corrections import at_level, log_ratio, ratio
from learner.packing import MicroBatch

Lost = tuple[Tensor, Tensor]


def policy_loss(
    logprobs: Tensor, old: Tensor, sequences: Tensor, batch: MicroBatch, of: AlgorithmConfig
) -> Lost:
    """The loss that the configuration names.

    Args:
        logprobs: float32 [N], log π with gradient.
        sequences: int64 [N], 0 to B - 1; each sequence lies wholly in this micro-batch.
    """
    advantages = batch.advantages
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    if of.loss == "reinforce":
        return reinforce(logprobs, advantages), nowhere
    if of.loss == "ppo":
        return ppo(logprobs, old, advantages, *of.clip)
    if of.loss == "cispo":
        return cispo(logprobs, old, advantages, *of.clip)
    if of.loss == "gspo":
        return gspo(logprobs, old, sequences, advantages, *of.clip)
    if of.loss == "dppo":
        return dppo(logprobs, old, advantages, *of.clip, of.dppo.penalty)
    if of.loss == "m2po":
        assert batch.trusted is not None
        return m2po(logprobs, old, advantages, batch.trusted)
    return own(of.loss, logprobs, old, batch), nowhere


def gradient_ratio(
    logprobs: Tensor, old: Tensor, sequences: Tensor, batch: MicroBatch, lost: Lost, of: AlgorithmConfig
) -> Tensor:
    """What the loss's own ratio multiplies a token's -A·∇log π by, [N]; 0 where the trust region stops it.

    Args:
        lost: As `policy_loss` gives it. Of what it tells as stopped cispo stops nothing.
    """
    if of.loss == "reinforce":
        return torch.ones_like(old)
    moved = log_ratio(logprobs.detach(), old)
    if is_dotted(of.loss):
        return _measured_ratio(logprobs, moved.exp(), lost[0], batch.advantages)
    if of.loss == "cispo":
        low, high = of.clip
        return moved.exp().clamp(1 - low, 1 + high)
    return at_level(moved, sequences, "geometric" if of.loss == "gspo" else "token").exp() * ~lost[1]


def _measured_ratio(logprobs: Tensor, ratios: Tensor, loss: Tensor, advantages: Tensor) -> Tensor:
    """Of a loss of the user's: its gradient over -A, and π/old where A is 0 or there is no gradient."""
    if not loss.requires_grad:
        return ratios
    (slope,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True, materialize_grads=True)
    flat = advantages == 0
    return torch.where(flat, ratios, -slope / advantages.masked_fill(flat, 1))


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Lost:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) with r = π / π_old; stopped where the clipped side is smaller.

    arXiv 1707.06347, equation 7; with high above low it is DAPO's (arXiv 2503.14476, section 3.1).
    """
    return _clipped(ratio(logprobs, old), advantages, low, high)


def _clipped(r: Tensor, advantages: Tensor, low: float, high: float) -> Lost:
    plain, limited = r * advantages, r.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, limited), (limited < plain).detach()


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A·log π (Williams, Machine Learning 8, 1992, sections 4 and 5, with A for the reinforcement less its
    baseline); the correction's weight makes it the importance-weighted policy gradient."""
    return -advantages * logprobs


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Lost:
    """-sg(clip(r, 1 - low, 1 + high))·A·log π with r = π / π_old: no token's gradient is dropped, only its
    weight is limited (MiniMax-M1, arXiv 2506.13585, equation 4)."""
    r = ratio(logprobs.detach(), old)
    weight = r.clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs, weight != r


def gspo(
    logprobs: Tensor, old: Tensor, sequences: Tensor, advantages: Tensor, low: float, high: float
) -> Lost:
    """PPO's loss with one ratio for all of a completion, s = exp(mean_t log(π / π_old)).

    In the form of its equation 14, sg(s)·π / sg(π), whose mean over the tokens of a completion has the value
    and the gradient of equation 5 where they share one advantage, and in which a token that the correction
    masks gets no gradient (arXiv 2507.18071).
    """
    whole = at_level(log_ratio(logprobs.detach(), old), sequences, "geometric").exp()
    return _clipped(whole * torch.exp(logprobs - logprobs.detach()), advantages, low, high)


def dppo(
    logprobs: Tensor, behavior: Tensor, advantages: Tensor, low: float, high: float, penalty: float
) -> Lost:
    """-A·π/μ where the update does not lead further away than a change of probability of `low` or `high`,
    plus penalty·(log π - log μ)² everywhere.

    A token is stopped where A > 0 and π - μ > high, or A < 0 and π - μ < -low: the total variation between π
    and μ when all other tokens count as one (DPPO, arXiv 2602.04879, equation 12 with 13, its binary
    approximation). Unlike a band on the ratio it leaves rare tokens their way up and holds frequent ones. The
    penalty is not the paper's but prime-rl's, which names Kimi K2.5's (arXiv 2602.02276) for it.
    """
    moved = logprobs.detach().exp() - behavior.exp()
    stopped = ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))
    surrogate = ratio(logprobs, behavior) * advantages * ~stopped
    return penalty * (logprobs - behavior) ** 2 - surrogate, stopped


def m2po(logprobs: Tensor, behavior: Tensor, advantages: Tensor, trusted: Tensor) -> Lost:
    """-A·π/μ at the trusted tokens, 0 at the others (arXiv 2510.01161, equation 5).

    Args:
        trusted: bool [N], as `trusted_limit` decides it over the whole batch.
    """
    return -ratio(logprobs, behavior) * advantages * trusted, ~trusted


def trusted_limit(squares: Tensor, second_moment: float) -> float:
    """The largest square that is still trusted: those up to it have a mean of at most `second_moment`.

    Largest first, squares are given up until the mean of the others is small enough; equal ones go together,
    so that it does not matter in which order tokens come (arXiv 2510.01161, algorithm 1).

    Args:
        squares: Numbers [n], (log π - log μ)² of the whole batch's trust region.

    Returns:
        Below 0 if none is trusted.
    """
    if not len(squares):
        return -1.0
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[1:] != ordered[:-1]
    trusted = ordered[last_of_equals & (means <= second_moment)]
    return float(trusted[-1]) if len(trusted) else -1.0


def own(path: str, logprobs: Tensor, old: Tensor, batch: MicroBatch) -> Tensor:
    """What a function of the user's makes of every token, [N]; the correction multiplies it.

    Raises:
        ValueError: It made something else.
    """
    made = resolve(path)(logprobs, old, batch)
    if not isinstance(made, Tensor) or made.shape != logprobs.shape:
        found = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"{path} returned {found}; expected a loss for each of {len(logprobs)} tokens")
    if logprobs.requires_grad and not made.requires_grad:
        raise ValueError(f"{path} returned a loss without a gradient; expected one made of logprobs")
    return made
