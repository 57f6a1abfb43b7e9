"""Weights, masks and the estimated proximal policy against loops over tokens, gradients and layouts."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import AlgorithmConfig
from learner.correction_config import CorrectionConfig
from learner.corrections import LOG_RATIO_LIMIT, at_level, correct, interpolated, proximal_share
from learner.losses import Denominators, objective
from learner.normalisers import weight_sums
from learner.packing import MicroBatch, empty

TOTAL = Denominators(tokens=7.0, sequences=3.0, max_length=64)


def micro_batch(rows, **fields) -> MicroBatch:
    """Of (sequence, log μ, advantage) a token."""
    sequences, behavior, advantages = map(list, zip(*rows, strict=True))
    n = len(rows)
    made = {name: torch.tensor(values, dtype=torch.float32) for name, values in fields.items()}
    return replace(
        empty(),
        target_ids=torch.arange(n),
        target_positions=torch.arange(n),
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.ones(n),
        sequence_index=torch.tensor(sequences),
        versions=torch.zeros(n, dtype=torch.int32),
        **made,
    )


def level_of(log_rho, sequences, i, level) -> float:
    """The ratio that stands for token i."""
    mates = [x for x, s in zip(log_rho, sequences, strict=True) if s == sequences[i]]
    logs = {"sequence": sum(mates), "geometric": sum(mates) / len(mates)}
    return math.exp(min(logs.get(level, log_rho[i]), LOG_RATIO_LIMIT))


def oracle(log_rho, advantages, sequences, of: CorrectionConfig, level) -> tuple[list[float], list[float]]:
    """Weight and keep of every token, one after the other."""
    weights, keeps = [], []
    for i, s in enumerate(sequences):
        low, high = of.band
        keep = low <= level_of(log_rho, sequences, i, of.mask_level) <= high
        keep = keep or (of.taper is True and advantages[i] > 0)
        mates = [x for x, other in zip(log_rho, sequences, strict=True) if other == s]
        keep = keep and not any(math.exp(x) < of.veto_below for x in mates)
        weight = 1.0 if level == "none" else level_of(log_rho, sequences, i, level)
        if of.taper:
            weight = 1.0 if advantages[i] > 0 else min(weight, 1.0)
        weight = weight if of.cap is None else min(weight, of.cap)
        weights.append(weight if keep else 0.0)
        keeps.append(float(keep))
    return weights, keeps


levels = st.sampled_from(["token", "sequence", "geometric", "none"])
tokens = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-3, 3, width=32), st.sampled_from([-2.0, 0.0, 0.5])),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(
    rows=tokens,
    weight=levels,
    taper=st.booleans(),
    mask=levels,
    cap=st.sampled_from([None, 1.0, 2.0, 4.0]),
    veto=st.sampled_from([None, 0.0, 0.2]),
    wide=st.booleans(),
)
def test_weights_and_masks_are_those_of_a_loop(rows, weight, taper, mask, cap, veto, wide):
    rows = sorted(rows)
    sequences, log_rho, advantages = map(list, zip(*rows, strict=True))
    bounds = {"mask_low": 0.3, "mask_high": 3.0} if wide and mask != "none" else {}
    of = CorrectionConfig.model_construct(taper=taper, mask=mask, cap=cap, veto=veto, **bounds)
    given = (torch.tensor(log_rho), torch.tensor(advantages), torch.tensor(sequences), of, weight)
    found = correct(*given)
    weights, keeps = oracle(log_rho, advantages, sequences, of, weight)
    assert found.weight.tolist() == pytest.approx(weights, rel=1e-5)
    assert found.keep.tolist() == keeps
    halved = correct(*given, mean_weight=2.0)
    assert halved.weight.tolist() == pytest.approx([w / 2 for w in weights], rel=1e-5)


@pytest.mark.parametrize(
    "settings_of",
    [
        {"cap": 1.5, "mask": "none", "veto": 0},
        {"weight": "sequence", "cap": 2.0},
        {"weight": "sequence", "mask": "sequence"},
        {"weight": "none", "mask": "geometric", "mask_low": 0.8, "mask_high": 1.3},
        {"weight": "geometric", "mask": "token"},
        {"taper": True},
        {"weight": "sequence", "taper": True, "mask": "geometric", "mask_low": 0.8, "mask_high": 1.3},
        {"kind": "bypass", "mask": "sequence"},
    ],
)
def test_a_weight_is_a_constant_also_where_the_pass_itself_is_the_proximal_policy(settings_of):
    """The gradient is w · A · ∇log π and has nothing of ∇w, though w is of this very π."""
    rows = [(0, -1.0, 2.0), (0, -2.0, 2.0), (0, -0.5, 2.0), (4, -1.5, -1.0), (4, -0.2, -1.0), (9, -3.0, 0.5)]
    current = [-0.8, -2.3, -0.55, -1.3, -0.6, -1.0]
    algorithm = AlgorithmConfig.model_validate({"loss": "reinforce", "correction": settings_of})
    logprobs = torch.tensor(current, requires_grad=True)
    loss, metrics = objective(logprobs, torch.zeros(6), micro_batch(rows), algorithm, TOTAL, 0.0)
    loss.backward()
    assert logprobs.grad is not None
    log_rho = [c - b for c, (_, b, _) in zip(current, rows, strict=True)]
    sequences, _, advantages = map(list, zip(*rows, strict=True))
    weights, keeps = oracle(log_rho, advantages, sequences, algorithm.correction, algorithm.weight_level)
    expected = [-w * a / TOTAL.tokens for w, (*_, a) in zip(weights, rows, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(set(weights)) > 1, "the case is to tell something"
    capped = [k * (level_of(log_rho, [s for s, *_ in rows], i, algorithm.weight_level) > cap)
              for i, k in enumerate(keeps)] if (cap := algorithm.correction.cap) else [0.0]  # fmt: skip
    assert float(metrics["capped"]) == sum(capped)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_equal_policies_weigh_one_and_mask_nothing(level):
    of = CorrectionConfig(weight=level, cap=1.2, mask=level if level != "sequence" else "token")
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    found = correct(torch.zeros(5), advantages, torch.tensor([0, 0, 1, 1, 1]), of, level)
    assert found.weight.tolist() == [1.0] * 5
    assert not (found.masked | found.vetoed | found.capped).any()


def test_a_single_token_has_one_ratio_whatever_the_level():
    log_rho, alone = torch.tensor([0.7]), torch.tensor([0])
    for level in ("token", "sequence", "geometric"):
        assert float(at_level(log_rho, alone, level)) == pytest.approx(0.7)


def test_a_product_over_thousands_of_tokens_is_exact_and_finite():
    sequences = torch.zeros(10_000, dtype=torch.int64)
    drift = torch.full((10_000,), 1e-4)
    assert float(at_level(drift, sequences, "sequence")[0]) == pytest.approx(1.0, rel=1e-6)
    assert float(at_level(drift, sequences, "geometric")[0]) == pytest.approx(1e-4, rel=1e-6)
    assert float(at_level(drift * 1e4, sequences, "sequence")[0].exp()) == pytest.approx(
        math.exp(40), rel=1e-5
    )
    assert float(at_level(drift * -1e6, sequences, "sequence")[0].exp()) == 0.0


def test_a_mask_of_sequences_drops_all_of_a_sequence_and_no_other():
    log_rho = torch.tensor([math.log(1.6), math.log(1.6), math.log(1.6)])
    of = CorrectionConfig(mask="sequence", veto=0)
    found = correct(log_rho, torch.ones(3), torch.tensor([0, 0, 1]), of, "token")
    assert found.masked.tolist() == [True, True, False]


def test_a_taper_lets_go_of_what_was_wrong_and_is_gone_already_and_of_nothing_that_was_right():
    """Three completions of two tokens, which the policy gives e^-6, e^-6 and e^6 times as often."""
    log_rho = torch.tensor([-2.0, -4.0, -2.0, -4.0, 3.0, 3.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    sequences = torch.tensor([0, 0, 1, 1, 2, 2])
    product = CorrectionConfig(weight="sequence", taper=True, mask="none", veto=0)
    found = correct(log_rho, advantages, sequences, product, "sequence")
    assert found.weight.tolist() == pytest.approx([1, 1, math.exp(-6), math.exp(-6), 1, 1])
    assert not (found.masked | found.vetoed | found.capped).any()
    found = correct(log_rho, advantages, sequences, CorrectionConfig(taper=True, veto=0), "token")
    assert found.weight.tolist() == [1, 1, 0, 0, 1, 1]
    assert found.masked.tolist() == [False, False, True, True, False, False]


NORMALISED = {"normalize": True, "cap": 2.0}
ROWS = [(0, -1.0, 2.0), (0, -2.0, 2.0), (1, -0.5, 1.0), (1, -0.7, 1.0), (2, -3.0, -1.0), (3, -9.0, 5.0)]
PROXIMAL = [-0.7, -2.3, -0.9, -0.1, -1.9, -0.1]
"""The last token's ρ is far beyond the band."""


def test_normalised_weights_have_mean_one_over_the_tokens_that_are_kept():
    algorithm = AlgorithmConfig.model_validate({"correction": NORMALISED})
    batch = micro_batch(ROWS, proximal_logprobs=PROXIMAL)
    weights, kept = weight_sums([batch], algorithm)
    log_rho = [p - b for p, (_, b, _) in zip(PROXIMAL, ROWS, strict=True)]
    sequences, _, advantages = map(list, zip(*ROWS, strict=True))
    expected, keeps = oracle(log_rho, advantages, sequences, algorithm.correction, "token")
    assert (weights, kept) == (pytest.approx(sum(expected), rel=1e-6), sum(keeps))
    assert kept == 5
    given = (torch.tensor(log_rho), batch.advantages, batch.sequence_index, algorithm.correction, "token")
    found = correct(*given, weights / kept)
    assert float(found.weight.sum()) == pytest.approx(kept)


@pytest.mark.parametrize("cuts", [[2], [4], [2, 4, 5]])
@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_normalised_loss_and_gradient_are_the_same_however_the_batch_is_split(cuts, how):
    algorithm = AlgorithmConfig.model_validate({"correction": NORMALISED, "aggregate": how})

    def trained(bounds) -> tuple[float, list[float]]:
        parts = [slice(a, b) for a, b in zip([0, *bounds], [*bounds, len(ROWS)], strict=True)]
        batches = [micro_batch(ROWS[p], proximal_logprobs=PROXIMAL[p]) for p in parts]
        sums = [weight_sums([batch], algorithm) for batch in [*batches, filling]]
        mean = sum(w for w, _ in sums) / sum(k for _, k in sums)
        logprobs = torch.tensor([p + 0.1 for p in PROXIMAL], requires_grad=True)
        total = replace(TOTAL, mean_weight=mean)
        pairs = zip(parts, batches, strict=True)
        losses = [
            objective(logprobs[p], torch.zeros(len(ROWS[p])), b, algorithm, total, 0.0)[0] for p, b in pairs
        ]
        sum(losses).backward()
        return float(sum(losses)), logprobs.grad.tolist()

    filling = replace(empty(), proximal_logprobs=torch.tensor([-3.0]))
    loss, gradient = trained([])
    again, split = trained(cuts)
    assert again == pytest.approx(loss, rel=1e-6)
    assert split == pytest.approx(gradient, rel=1e-6)


def test_normalising_nothing_leaves_nothing():
    algorithm = AlgorithmConfig.model_validate({"correction": NORMALISED})
    assert weight_sums([micro_batch(ROWS[-1:], proximal_logprobs=PROXIMAL[-1:])], algorithm) == (0.0, 0.0)
    assert weight_sums([], algorithm) == (0.0, 0.0)


@given(
    index=st.integers(0, 12), age=st.integers(0, 10), progress=st.floats(0.05, 0.95), logs=st.tuples(
        st.floats(-9, 0, width=32), st.floats(-9, 0, width=32))
)  # fmt: skip
def test_the_estimated_proximal_policy_lies_where_the_versions_say(index, age, progress, logs):
    mu, pi = logs
    version = index - age
    alpha = (index - version) / (index + progress - version)
    share = proximal_share(torch.tensor([version], dtype=torch.int32), index, progress)
    assert float(share) == pytest.approx(alpha, rel=1e-5)
    found = interpolated(torch.tensor([pi]), torch.tensor([mu]), share)
    assert float(found) == pytest.approx(mu + alpha * (pi - mu), abs=1e-5)
    if age == 0:
        assert float(found) == mu, "the same weights sampled it: μ is the proximal policy"


def test_with_an_estimated_proximal_policy_the_gradient_is_that_of_the_whole_ratio():
    """ρ · r is π / μ wherever the proximal policy lies; where it lies decides only what is clipped."""
    rows = [(0, -1.0, 2.0), (1, -1.2, -1.0), (2, -1.0, 1.0)]
    current = [-0.8, -1.1, -0.2]
    share = [0.5, 0.9, 0.5]
    algorithm = AlgorithmConfig.model_validate({"correction": {"proximal": "interpolated"}})
    logprobs = torch.tensor(current, requires_grad=True)
    batch = micro_batch(rows, proximal_share=share)
    loss, metrics = objective(logprobs, torch.zeros(3), batch, algorithm, TOTAL, 0.0)
    loss.backward()
    ratios = [math.exp(c - b) for c, (_, b, _) in zip(current, rows, strict=True)]
    assert logprobs.grad is not None
    # r of the last is e^0.4, beyond the clip, and its advantage asks for more.
    expected = [-ratios[0] * 2.0 / 7, ratios[1] / 7, 0.0]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert float(metrics["clipped"]) == 1
    rho = [math.exp(a * (c - b)) for a, c, (_, b, _) in zip(share, current, rows, strict=True)]
    assert float(metrics["rho"]) == pytest.approx(sum(rho), rel=1e-5)
