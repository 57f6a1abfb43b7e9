"""Each policy loss against a loop written from its formula: values, gradients and what is stopped."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from learner.algorithm import AlgorithmConfig
from learner.losses import Denominators, objective
from learner.packing import MicroBatch, empty
from learner.policy_losses import cispo, dppo, gspo, m2po, ppo, trusted_limit

PENALTY, SECOND_MOMENT = 0.01, 0.04


def batch_of(rows) -> MicroBatch:
    """Of (sequence, log π, log π_old, A)."""
    sequences, _, old, advantages = map(list, zip(*rows, strict=True))
    n = len(rows)
    return replace(
        empty(),
        target_ids=torch.arange(n),
        target_positions=torch.arange(n),
        behavior_logprobs=torch.tensor(old, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.ones(n),
        sequence_index=torch.tensor(sequences),
        versions=torch.zeros(n, dtype=torch.int32),
    )


def oracle(kind, rows, low, high, trusted) -> tuple[list[float], list[float], list[bool]]:
    """Loss, its derivative by the token's own log π, and whether it was held back; one token at a time."""
    losses, slopes, held = [], [], []
    for i, (sequence, logprob, old, a) in enumerate(rows):
        r = math.exp(logprob - old)
        if kind == "gspo":
            mates = [p - o for s, p, o, _ in rows if s == sequence]
            r = math.exp(sum(mates) / len(mates))
        limited = min(max(r, 1 - low), 1 + high)
        if kind in ("ppo", "gspo"):
            stopped = limited * a < r * a
            losses.append(-min(r * a, limited * a))
            slopes.append(0.0 if stopped else -r * a)
        elif kind == "cispo":
            stopped = limited != r
            losses.append(-limited * a * logprob)
            slopes.append(-limited * a)
        elif kind == "dppo":
            moved = math.exp(logprob) - math.exp(old)
            stopped = (a > 0 and moved > high) or (a < 0 and moved < -low)
            d = logprob - old
            losses.append(PENALTY * d * d - (0.0 if stopped else r * a))
            slopes.append(2 * PENALTY * d - (0.0 if stopped else r * a))
        else:
            stopped = not trusted[i]
            losses.append(0.0 if stopped else -r * a)
            slopes.append(losses[-1])
        held.append(stopped)
    return losses, slopes, held


def computed(kind, rows, low, high, trusted):
    batch = batch_of(rows)
    logprobs = torch.tensor([p for _, p, *_ in rows], dtype=torch.float32, requires_grad=True)
    old, a = batch.behavior_logprobs, batch.advantages
    sequences = torch.unique(batch.sequence_index, return_inverse=True)[1]
    if kind == "gspo":
        losses, held = gspo(logprobs, old, sequences, a, low, high)
    elif kind == "dppo":
        losses, held = dppo(logprobs, old, a, low, high, PENALTY)
    elif kind == "m2po":
        losses, held = m2po(logprobs, old, a, torch.tensor(trusted))
    else:
        losses, held = {"ppo": ppo, "cispo": cispo}[kind](logprobs, old, a, low, high)
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses, slopes, held


def near_a_kink(kind, rows, low, high) -> bool:
    """In float32 the other side of a bound may be taken there."""
    for sequence, p, o, _ in rows:
        mates = [x - y for s, x, y, _ in rows if s == sequence]
        r = math.exp(sum(mates) / len(mates)) if kind == "gspo" else math.exp(p - o)
        moved = math.exp(p) - math.exp(o)
        bounds = (moved - high, moved + low) if kind == "dppo" else (r - 1 - high, r - 1 + low)
        if min(map(abs, bounds)) < 1e-5:
            return True
    return False


logprob = st.floats(-4, 0, width=32)
tokens = st.tuples(st.integers(0, 2), logprob, logprob, st.floats(-3, 3, width=32), st.booleans())


@settings(deadline=None, max_examples=300)
@given(
    drawn=st.lists(tokens, min_size=1, max_size=10),
    kind=st.sampled_from(["ppo", "cispo", "gspo", "dppo", "m2po"]),
    clip=st.sampled_from([(0.2, 0.28), (1.0, 5.0), (3e-4, 4e-4), (0.5, 0.1)]),
)
def test_losses_and_gradients_are_those_of_a_loop(drawn, kind, clip):
    drawn = sorted(drawn)
    rows, trusted = [d[:4] for d in drawn], [d[4] for d in drawn]
    assume(not near_a_kink(kind, rows, *clip))
    losses, slopes, held = computed(kind, rows, *clip, trusted)
    expected, by_own, stopped = oracle(kind, rows, *clip, trusted)
    assert losses.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert slopes.tolist() == pytest.approx(by_own, rel=1e-4, abs=1e-5)
    # An advantage next to nothing comes to nothing in float32, on either side of the bound.
    matter = [abs(a) > 1e-30 for *_, a in rows]
    assert [h and m for h, m in zip(held.tolist(), matter, strict=True)] == [
        s and m for s, m in zip(stopped, matter, strict=True)
    ]


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo", "dppo", "m2po"])
def test_where_the_policies_agree_all_have_the_gradient_of_the_advantage(kind):
    """Ratio 1: nothing is held back, and -A·∇log π is left, also of a single token."""
    for rows in ([(0, -1.0, -1.0, 2.0)], [(0, -1.0, -1.0, 2.0), (0, -2.0, -2.0, 2.0), (1, -0.1, -0.1, -1.0)]):
        _, slopes, held = computed(kind, rows, 0.2, 0.2, [True] * len(rows))
        assert slopes.tolist() == pytest.approx([-a for *_, a in rows])
        assert not held.any()


def sequence_loss(rows, low, high):
    """GSPO as its equation 5 has it: one term a completion, its ratio with gradient through every token."""
    logprobs = torch.tensor([p for _, p, *_ in rows], dtype=torch.float64, requires_grad=True)
    terms = []
    for s in sorted({s for s, *_ in rows}):
        mine = [i for i, (other, *_) in enumerate(rows) if other == s]
        old, a = torch.tensor([rows[i][2] for i in mine], dtype=torch.float64), rows[mine[0]][3]
        ratio = (logprobs[mine] - old).mean().exp()
        terms.append(-torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a))
    loss = torch.stack(terms).mean()
    return float(loss), torch.autograd.grad(loss, logprobs)[0].tolist()


def test_gspo_is_the_papers_where_a_completion_has_one_advantage():
    rows = [(0, -1.0, -1.001, 2.0), (0, -2.0, -1.9996, 2.0), (1, -0.5, -0.7, -1.0), (1, -0.9, -0.8, -1.0),
            (2, -1.5, -1.7, 1.0), (2, -1.0, -1.0, 1.0), (2, -0.3, -0.2, 1.0)]  # fmt: skip
    algorithm = AlgorithmConfig.model_validate(
        {"loss": "gspo", "correction": {"weight": "none", "mask": "none"}}
    )
    batch = replace(batch_of(rows), proximal_logprobs=torch.tensor([o for _, _, o, _ in rows]))
    logprobs = torch.tensor([p for _, p, *_ in rows], requires_grad=True)
    loss, metrics = objective(logprobs, torch.zeros(7), batch, algorithm, Denominators(7, 3, 64), 0.0)
    loss.backward()
    expected, slopes = sequence_loss(rows, 3e-4, 4e-4)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-4)
    assert slopes[-1] == 0, "the third is past its clip, and asked to go further"
    assert float(metrics["clipped"]) == 3


def test_a_token_that_the_correction_masks_has_no_gradient_under_gspo_either():
    rows = [(0, -1.0, -1.0, 2.0), (0, -1.0, -9.0, 2.0)]
    algorithm = AlgorithmConfig.model_validate({"loss": "gspo", "clip_low": 0.9, "clip_high": 99.0})
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = objective(logprobs, torch.zeros(2), batch_of(rows), algorithm, Denominators(2, 1, 64), 0.0)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] != 0
    assert logprobs.grad[1] == 0


def test_dppo_holds_a_frequent_token_and_lets_a_rare_one_rise():
    """Ratios of 1.6 and 20: the first moves 0.3 of all probability, the second 0.02."""
    rows = [(0, math.log(0.8), math.log(0.5), 1.0), (0, math.log(0.021), math.log(0.001), 1.0)]
    _, slopes, held = computed("dppo", rows, 0.2, 0.2, None)
    assert held.tolist() == [True, False]
    assert float(slopes[0]) == pytest.approx(2 * PENALTY * math.log(1.6), rel=1e-5), (
        "the penalty draws it back"
    )
    assert computed("ppo", rows, 0.2, 0.2, None)[2].tolist() == [True, True]


@pytest.mark.parametrize("loss", ["dppo", "m2po"])
def test_losses_from_the_behavior_policy_are_weighed_once(loss):
    algorithm = AlgorithmConfig.model_validate({"loss": loss, "correction": {"kind": "bypass"}})
    rows = [(0, -1.3, -1.0, 2.0)]
    batch = replace(batch_of(rows), trusted=torch.tensor([True]))
    logprobs = torch.tensor([-1.3], requires_grad=True)
    value, _ = objective(logprobs, torch.zeros(1), batch, algorithm, Denominators(1, 1, 64), 0.0)
    value.backward()
    pull = 2 * algorithm.dppo.penalty * -0.3 if loss == "dppo" else 0.0
    assert float(logprobs.grad) == pytest.approx(pull - 2.0 * math.exp(-0.3), rel=1e-5)


def slow_trust(squares, second_moment) -> list[bool]:
    """Give up the largest, and with it its equals, until the mean of the others is small enough."""
    kept = list(squares)
    while kept and sum(kept) / len(kept) > second_moment:
        kept = [x for x in kept if x != max(kept)]
    return [x in kept for x in squares]


@given(
    squares=st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.05, 0.2, 1.0, 9.0]) | st.floats(0, 4), max_size=12),
    second_moment=st.sampled_from([0.0312, 0.0412, 0.5112]),
)
def test_the_furthest_off_are_given_up_until_the_second_moment_is_small(squares, second_moment):
    limit = trusted_limit(torch.tensor(squares, dtype=torch.float64), second_moment)
    assert [x <= limit for x in squares] == slow_trust(squares, second_moment)


def test_of_squares_all_too_large_or_of_none_nothing_is_trusted():
    assert trusted_limit(torch.tensor([1.0, 1.0]), SECOND_MOMENT) < 0
    assert trusted_limit(torch.tensor([]), SECOND_MOMENT) < 0
    assert trusted_limit(torch.tensor([0.0]), SECOND_MOMENT) == 0.0


@pytest.mark.parametrize("loss", ["cispo", "gspo", "dppo", "m2po"])
def test_everything_masked_or_nothing_there_gives_zero_and_no_nan(loss):
    kind = "bypass" if loss in ("dppo", "m2po") else "decoupled"
    correction = {"kind": kind, "mask": "token"}
    algorithm = AlgorithmConfig.model_validate({"loss": loss, "correction": correction})
    filling = replace(empty(), trusted=torch.tensor([True]))
    far_off = replace(batch_of([(0, -1.0, -60.0, 1.0), (1, -1.0, -90.0, -1.0)]), trusted=torch.ones(2).bool())
    for batch, current in ((filling, [-3.0]), (far_off, [-1.0, -1.0])):
        logprobs = torch.tensor(current, requires_grad=True)
        zeros = torch.zeros(len(current))
        value, metrics = objective(logprobs, zeros, batch, algorithm, Denominators(5, 2, 64), 0.0)
        value.backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [0.0] * len(current)
        assert float(metrics["loss"]) == 0
        assert all(torch.isfinite(m) for m in metrics.values())
