"""The objective against a token-by-token loop written from the formulas, and at the edges."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import BYPASSING, LOSSES, AlgorithmConfig
from learner.correction_config import CAP
from learner.corrections import LOG_RATIO_LIMIT, NonFiniteLogprob, ratio
from learner.losses import Denominators, aggregate, divergence, kl, objective
from learner.packing import MicroBatch, empty
from learner.policy_losses import ppo

TOTAL = Denominators(tokens=50.0, sequences=9.0, max_length=64)


def micro_batch(behavior, advantages, sequences, proximal=None, reference=None) -> MicroBatch:
    n = len(behavior)
    return replace(
        empty(),
        target_ids=torch.arange(n),
        target_positions=torch.arange(n),
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.ones(n),
        sequence_index=torch.tensor(sequences),
        versions=torch.zeros(n, dtype=torch.int32),
        proximal_logprobs=None if proximal is None else torch.tensor(proximal, dtype=torch.float32),
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float32),
    )


def algorithm(**changes) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(changes)


def lost(of: AlgorithmConfig, logprob, old, moved, a, trusted):
    """The policy loss of one token; `moved` is log π / π_old of its whole completion."""
    r = (logprob - old).exp()
    if of.loss == "reinforce":
        return -a * logprob
    if of.loss == "m2po":
        return -a * r if trusted else 0 * logprob
    low, high = of.clip
    if of.loss == "dppo":
        gone = math.exp(logprob.item()) - math.exp(old)
        stopped = (a > 0 and gone > high) or (a < 0 and gone < -low)
        return of.dppo.penalty * (logprob - old) ** 2 - (0 if stopped else a * r)
    if of.loss == "cispo":
        return -min(max(r.item(), 1 - low), 1 + high) * a * logprob
    if of.loss == "gspo":
        r = math.exp(sum(moved) / len(moved)) * (logprob - logprob.item()).exp()
    limited = min(max(r.item(), 1 - low), 1 + high) * a
    return 0 * logprob - limited if limited < r.item() * a else -r * a


def oracle(logprobs, entropy, batch: MicroBatch, of: AlgorithmConfig) -> list[torch.Tensor]:
    """What each token adds to the loss, one after the other.

    Args:
        logprobs: Scalars in float64, through which gradients flow.
        entropy: The same.
    """
    behavior, advantages = batch.behavior_logprobs.tolist(), batch.advantages.tolist()
    sequences, now = batch.sequence_index.tolist(), [x.item() for x in logprobs]
    proximal = now if batch.proximal_logprobs is None else batch.proximal_logprobs.tolist()
    trusted = [None] * len(now) if batch.trusted is None else batch.trusted.tolist()
    old = proximal if of.correction.kind == "decoupled" else behavior
    terms = []
    for i, logprob in enumerate(logprobs):
        mates = [j for j, s in enumerate(sequences) if s == sequences[i]]
        logs = [proximal[j] - behavior[j] for j in mates]
        log_rhos = {
            "none": 0.0,
            "token": proximal[i] - behavior[i],
            "sequence": sum(logs),
            "geometric": sum(logs) / len(logs),
        }
        rhos = {level: math.exp(min(log_rho, LOG_RATIO_LIMIT)) for level, log_rho in log_rhos.items()}
        praised = bool(of.correction.taper) and advantages[i] > 0
        lowest, highest = of.correction.band
        inside = praised or lowest <= rhos[of.correction.mask_level] <= highest
        keep = float(inside and math.exp(min(logs)) >= of.correction.veto_below)
        weight = 1.0 if praised else rhos[of.weight_level]
        weight = min(weight, 1.0) if of.correction.taper else weight
        weight = min(weight, of.correction.cap or math.inf)
        moved = [now[j] - old[j] for j in mates]
        policy = lost(of, logprob, old[i], moved, advantages[i], trusted[i])
        loss = keep * weight * policy - keep * of.entropy * entropy[i]
        if batch.reference_logprobs is not None:
            d = batch.reference_logprobs.tolist()[i] - logprob
            estimate = {"k2": d * d / 2, "k3": d.exp() - d - 1}[of.kl.estimate]
            sampled = min(math.exp(min(now[i] - behavior[i], LOG_RATIO_LIMIT)), of.correction.cap or CAP)
            loss = loss + keep * sampled * of.kl.coefficient * estimate
        share = {
            "token": 1 / TOTAL.tokens,
            "sequence": 1 / len(mates) / TOTAL.sequences,
            "constant": 1 / (TOTAL.sequences * TOTAL.max_length),
        }
        terms.append(loss * share[of.aggregation])
    return terms


def scalars(numbers) -> list[torch.Tensor]:
    """As float32 has them."""
    numbers = torch.tensor(numbers, dtype=torch.float32).tolist()
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in numbers]


POLICY_LOSSES = [loss for loss in LOSSES if loss != "dpo"]
"""Of these the objective is made; pairs have theirs."""


def settings_of(loss: str, correction: dict) -> dict:
    clips = {"clip_low": 0.2, "clip_high": 0.3} if loss == "gspo" and correction["kind"] == "bypass" else {}
    return {"loss": loss, "correction": correction, **clips}


CORRECTIONS = [{"kind": "decoupled"}, {"kind": "bypass"}, {"kind": "bypass", "mask": "token", "veto": 1e-4}]
WEIGHED = [
    {"cap": 1.5, "mask": "none"},
    {"weight": "sequence", "cap": 5.0},
    {"weight": "none", "mask": "sequence"},
    {"weight": "geometric", "mask": "geometric", "mask_low": 0.8, "mask_high": 1.25},
    {"taper": True},
    {"weight": "sequence", "taper": True, "mask": "none"},
]
OBJECTIVES = [
    settings_of(loss, correction)
    for loss in POLICY_LOSSES
    for correction in CORRECTIONS
    if loss not in BYPASSING or correction["kind"] == "bypass"
]
OBJECTIVES += [
    settings_of(loss, {"kind": "decoupled", **weighed})
    for loss in ("ppo", "gspo", "cispo", "reinforce")
    for weighed in WEIGHED
]
logprob = st.floats(-12, 0, width=32)


@settings(deadline=None, max_examples=400)
@given(
    rows=st.lists(
        st.tuples(
            *(logprob, logprob, logprob, logprob),
            *(st.floats(-3, 3, width=32), st.integers(0, 3), st.booleans()),
        ),
        min_size=1,
        max_size=12,
    ),
    made=st.sampled_from(OBJECTIVES),
    how=st.sampled_from(["token", "sequence", "constant"]),
    estimator=st.sampled_from(["k2", "k3"]),
    first_pass=st.booleans(),
)
def test_against_a_loop(rows, made, how, estimator, first_pass):
    rows = sorted(rows, key=lambda r: r[5])
    current, behavior, proximal, reference, advantages, sequences, trusted = map(
        list, zip(*rows, strict=True)
    )
    of = algorithm(aggregate=how, entropy=0.01, kl={"coefficient": 0.1, "estimator": estimator}, **made)
    batch = micro_batch(behavior, advantages, sequences, None if first_pass else proximal, reference)
    batch = replace(batch, trusted=torch.tensor(trusted))
    entropy = [abs(x) for x in current]
    value, metrics = objective(
        torch.tensor(current), torch.tensor(entropy), batch, of, TOTAL, of.kl.coefficient
    )
    terms = [x.item() for x in oracle(scalars(current), scalars(entropy), batch, of)]
    # Large terms of either sign may cancel.
    rounding = 2e-5 * (1 + sum(map(abs, terms)))
    assert float(value) == pytest.approx(sum(terms), abs=rounding)
    assert float(metrics["tokens"]) == len(rows)


POINTS = [
    # sequence, log π, log μ, log π_prox, log π_ref, A, whether m2po trusts it
    (0, -1.0, -1.2, -1.0, -1.0, 2.0, True),  # r = 1, and equal to the reference
    (0, -0.7, -0.8, -1.2, -1.5, 2.0, False),  # above the clip, and asked to go up
    (0, -1.5, -1.4, -1.1, -1.2, 2.0, True),  # below, and asked to come up
    (0, -1.0, -1.1, -1.05, -0.5, 2.0, True),
    (3, -0.9, -1.0, -1.4, -0.9, -1.5, True),  # above, and asked to come down
    (3, -2.0, -1.7, -1.5, -2.5, -1.5, False),  # below, and asked to go down
    (3, -0.3, -4.0, -0.4, -0.6, -1.5, True),  # masked: ρ is e^3.6, and as large between π and μ
    (4, -1.0, -1.0, -1.1, -1.3, 0.5, True),  # vetoed by the next
    (4, -12.0, -1.0, -12.1, -9.0, 0.5, True),
    (7, -2.0, -2.0, -2.0, -1.9, -0.7, True),  # the same under all policies
    (8, -1.0, -1.1, -1.0001, -1.2, 1.0, True),  # inside even gspo's clip
    (9, -0.1, -2.0, -2.1, -0.2, 1.0, False),  # above even cispo's
    (9, -0.2, -2.1, -2.2, -0.1, -1.0, True),
    (10, -1.6, -1.0, -1.5, -1.2, -1.0, True),  # left already by what is to make it rarer
]


@pytest.mark.parametrize("first_pass", [True, False])
@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("entropy", [0.0, 0.01])
@pytest.mark.parametrize("kl", [None, "k2", "k3"])
@pytest.mark.parametrize(
    "made", OBJECTIVES, ids=lambda made: "-".join([made["loss"], *map(str, made["correction"].values())])
)
def test_the_gradient_is_that_of_the_loop(made, kl, entropy, how, first_pass):
    """Of logprobs and of entropies, at every kind of point that a loss or a correction tells from others."""
    sequences, current, behavior, proximal, reference, advantages, trusted = map(
        list, zip(*POINTS, strict=True)
    )
    distance = {"coefficient": 0.1, "estimator": kl} if kl else {}
    of = algorithm(aggregate=how, entropy=entropy, kl=distance, **made)
    batch = micro_batch(
        behavior, advantages, sequences, None if first_pass else proximal, reference if kl else None
    )
    batch = replace(batch, trusted=torch.tensor(trusted))
    spread = [0.5 + abs(x) for x in current]
    inputs = torch.tensor(current, requires_grad=True), torch.tensor(spread, requires_grad=True)
    value, metrics = objective(*inputs, batch, of, TOTAL, of.kl.coefficient)
    if not first_pass:
        assert (metrics["clipped"] > 0) == (of.loss != "reinforce"), "the points are to tell something"
        assert (metrics["masked"] > 0) == (of.correction.mask_level != "none")
        assert (metrics["vetoed"] > 0) == (of.correction.veto_below > 0)
    found = torch.autograd.grad(value, inputs, materialize_grads=True)
    slow = scalars(current), scalars(spread)
    expected = torch.autograd.grad(sum(oracle(*slow, batch, of)), [*slow[0], *slow[1]], allow_unused=True)
    numbers = [0.0 if x is None else float(x) for x in expected]
    assert torch.cat(found).tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("first_pass", [True, False])
@pytest.mark.parametrize(
    "made", OBJECTIVES, ids=lambda made: "-".join([made["loss"], *map(str, made["correction"].values())])
)
def test_the_weights_that_are_told_are_those_of_the_gradient(made, first_pass):
    """Of -A·∇log π at every token, whatever stops, caps or tapers it."""
    sequences, current, behavior, proximal, _, advantages, trusted = map(list, zip(*POINTS, strict=True))
    plain = {"dppo": {"penalty": 0.0}} if made["loss"] == "dppo" else {}
    of = algorithm(aggregate="token", **made, **plain)
    batch = micro_batch(behavior, advantages, sequences, None if first_pass else proximal)
    got, metrics = gradient(replace(batch, trusted=torch.tensor(trusted)), of, current)
    weights = -got.double() * TOTAL.tokens / batch.advantages
    assert float(metrics["weight"]) == pytest.approx(float(weights.sum()), rel=1e-5)
    assert float(metrics["weight_squares"]) == pytest.approx(float((weights**2).sum()), rel=1e-5)


def gradient(batch, of, current):
    logprobs = torch.tensor(current, requires_grad=True)
    value, metrics = objective(logprobs, torch.zeros(len(current)), batch, of, TOTAL, of.kl.coefficient)
    value.backward()
    return logprobs.grad, metrics


def test_the_first_pass_has_ratio_one_and_gradient_rho_times_advantage():
    batch = micro_batch([-1.0, -2.0], [2.0, -1.0], [0, 1])
    got, metrics = gradient(batch, algorithm(), [-1.3, -1.7])
    rho = torch.exp(torch.tensor([-0.3, 0.3]))
    assert torch.allclose(got, -rho * torch.tensor([2.0, -1.0]) / TOTAL.tokens)
    assert float(metrics["clipped"]) == 0


def test_reinforce_has_the_same_gradient_as_decoupled_ppo_on_the_first_pass():
    batch = micro_batch([-1.0, -2.0], [2.0, -1.0], [0, 1])
    one, _ = gradient(batch, algorithm(loss="ppo"), [-1.3, -1.7])
    two, _ = gradient(batch, algorithm(loss="reinforce"), [-1.3, -1.7])
    assert torch.allclose(one, two)


def test_bypass_counts_the_distance_to_the_sampler_once():
    """Its gradient is π/μ · A wherever that is not clipped; ρ on top would square it."""
    of = algorithm(correction={"kind": "bypass"}, clip_low=0.9, clip_high=9.0)
    got, _ = gradient(micro_batch([-2.0], [1.0], [0]), of, [-1.0])
    assert float(got) == pytest.approx(-math.e / TOTAL.tokens)
    later, _ = gradient(micro_batch([-2.0], [1.0], [0], proximal=[-1.5]), of, [-1.0])
    assert float(later) == pytest.approx(float(got)), "the proximal policy plays no part"


def test_the_ratio_is_exp_exactly():
    """A second-order Taylor polynomial gives 2.5 at -3."""
    assert float(ratio(torch.tensor([-5.0]), torch.tensor([-2.0]))) == pytest.approx(math.exp(-3), rel=1e-6)
    r, _ = ppo(torch.tensor([-5.0]), torch.tensor([-2.0]), torch.tensor([1.0]), 0.2, 0.2)
    assert float(r) == pytest.approx(-math.exp(-3), rel=1e-6)


def test_a_huge_ratio_and_a_tiny_one_stay_finite_and_are_not_trained():
    for behavior, current in ((-500.0, -0.1), (-0.1, -500.0)):
        got, metrics = gradient(micro_batch([behavior], [1.0], [0]), algorithm(), [current])
        assert got.tolist() == [0.0]
        assert all(torch.isfinite(m) for m in metrics.values())
        assert float(metrics["masked"]) == 1


def test_clipping_stops_the_gradient_on_the_far_side_only():
    def at(advantage, old):
        return float(gradient(micro_batch([old], [advantage], [0], proximal=[old]), algorithm(), [-1.0])[0])

    assert at(1.0, -2.0) == 0, "already far above, and asked to go up"
    assert at(-1.0, -0.5) == 0, "already far below, and asked to go down"
    assert at(-1.0, -2.0) > 0, "far above, and asked to come down"
    assert at(1.0, -0.5) < 0, "far below, and asked to come up"


@pytest.mark.parametrize("ratio", [2.0, 20.0, 2000.0])
def test_a_bad_token_is_pushed_down_however_far_it_has_risen(ratio):
    """A cap of the loss, min(-A · r, 3), would leave those without gradient that need it most."""
    old = -1.0 - math.log(ratio)
    got, metrics = gradient(micro_batch([old], [-1.0], [0], proximal=[old]), algorithm(), [-1.0])
    assert float(got) == pytest.approx(ratio / TOTAL.tokens, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(ratio / TOTAL.tokens, rel=1e-5)


def test_a_veto_stops_its_whole_sequence_and_no_other():
    batch = micro_batch([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0, 0, 1], proximal=[-1.0, -11.0, -1.0])
    got, metrics = gradient(batch, algorithm(), [-1.0, -11.0, -1.0])
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[2] != 0
    assert float(metrics["vetoed"]) == 2


def test_everything_masked_gives_zero_and_no_nan():
    got, metrics = gradient(micro_batch([-9.0, -9.0], [1.0, -1.0], [0, 0]), algorithm(), [-1.0, -2.0])
    assert got.tolist() == [0.0, 0.0]
    assert float(metrics["loss"]) == 0


def test_an_empty_micro_batch_adds_nothing():
    logprobs = torch.tensor([-3.0], requires_grad=True)
    value, metrics = objective(logprobs, torch.ones(1), empty(), algorithm(entropy=0.1), TOTAL, 0.0)
    value.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == 0
    assert {k: float(v) for k, v in metrics.items() if v != 0} == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whose", ["behavior", "learner", "proximal", "reference"])
def test_a_logprob_that_is_not_finite_is_refused_with_its_place(bad, whose):
    values = {w: [-1.0, -1.0, -1.0] for w in ("behavior", "learner", "proximal", "reference")}
    values[whose][2] = bad
    batch = micro_batch(values["behavior"], [1.0] * 3, [4, 4, 7], values["proximal"], values["reference"])
    with pytest.raises(NonFiniteLogprob, match=f"{whose} logprob of token 2 in sequence 7"):
        objective(torch.tensor(values["learner"]), torch.zeros(3), batch, algorithm(), TOTAL, 0.0)


def test_effective_sample_size_and_distances_come_from_the_sums():
    _, m = gradient(micro_batch([-1.0, -2.0], [1.0, 1.0], [0, 0]), algorithm(), [-1.5, -1.5])
    rho = [math.exp(-0.5), math.exp(0.5)]
    assert float(m["rho"]) == pytest.approx(sum(rho))
    assert float(m["rho_squares"]) == pytest.approx(sum(x * x for x in rho))
    assert float(m["rho_max"]) == pytest.approx(max(rho))
    assert 1 / float(m["inverse_rho_max"]) == pytest.approx(min(rho))
    assert float(m["behavior_k1"]) == pytest.approx(0, abs=1e-6)
    assert float(m["behavior_k3"]) == pytest.approx(sum(x - 1 - math.log(x) for x in rho), rel=1e-5)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_parts_add_up_whatever_the_micro_batches(how):
    values, sequences = (
        torch.randn(10, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0] * 4 + [1] * 6),
    )
    total = Denominators(10, 2, 32)
    whole = aggregate(values, torch.ones(10), sequences, how, total)
    parts = [
        aggregate(values[:4], torch.ones(4), torch.zeros(4, dtype=torch.int64), how, total),
        aggregate(values[4:], torch.ones(6), torch.zeros(6, dtype=torch.int64), how, total),
    ]
    assert float(whole) == pytest.approx(float(sum(parts)))


def test_kl_estimators_are_zero_at_equal_policies_and_k3_is_never_negative():
    x = torch.linspace(-4, 0, 9)
    for estimator in ("k1", "k2", "k3"):
        assert float(kl(x, x, estimator).abs().max()) == 0
    assert float(kl(x, torch.flip(x, (0,)), "k3").min()) >= 0


EXACT = {
    "decoupled": {"loss": "ppo"},
    "weighed by completions": {
        "correction": {"weight": "sequence", "mask": "sequence", "mask_low": 0.1, "mask_high": 9}
    },
    "masked alone": {"correction": {"weight": "none", "mask": "sequence", "mask_low": 0.1, "mask_high": 9}},
    "gspo": {"loss": "gspo"},
    "taper": {"correction": {"taper": True}},
    "bypass": {"correction": {"kind": "bypass"}},
    "cispo": {"loss": "cispo", "correction": {"kind": "bypass"}},
    "dppo": {"loss": "dppo", "correction": {"kind": "bypass"}},
}


@pytest.mark.parametrize("first_pass", [True, False])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("made", EXACT)
def test_the_distance_in_the_loss_pulls_as_the_policys_own_does_whoever_sampled(made, estimator, first_pass):
    """In the mean over what μ samples: k2 along the gradient of KL(π ‖ π_ref), k3 of KL(π_ref ‖ π)."""
    shift = torch.tensor([1.1, -0.1, 0.05, 0.6, 0.0, -0.05])
    logits = torch.tensor([-1.0, 0.8, 0.4, -0.5, 1.2, 0.1])
    behavior, reference = logits.log_softmax(0), torch.linspace(1, -1, 6).log_softmax(0)
    halfway = None if first_pass else (logits + shift / 2).log_softmax(0).tolist()
    batch = micro_batch(
        behavior.tolist(), [1.0, -1.0, 2.0, -0.5, -1.0, 1.0], range(6), halfway, reference.tolist()
    )
    batch = replace(batch, weights=behavior.exp())

    def pull(coefficient):
        leaf = (logits + shift).requires_grad_()
        distance = {"coefficient": 1.0, "estimator": estimator}
        of, one = algorithm(aggregate="token", kl=distance, **EXACT[made]), Denominators(1.0, 1.0, 1)
        loss, metrics = objective(leaf.log_softmax(0), torch.zeros(6), batch, of, one, coefficient)
        assert metrics["masked"] + metrics["vetoed"] == 0, "of all that is sampled"
        return torch.autograd.grad(loss, leaf)[0]

    found = pull(1.0) - pull(0.0)
    leaf = (logits + shift).requires_grad_()
    logprobs = leaf.log_softmax(0)
    of, to = (logprobs, reference) if estimator == "k2" else (reference, logprobs)
    (expected,) = torch.autograd.grad((of.exp() * (of - to)).sum(), leaf)
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.9999
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(("cap", "most"), [(None, CAP), (1.5, 1.5)])
def test_the_weight_of_the_distance_is_bounded(cap, most):
    """A token that μ all but never samples would have a weight of thousands."""
    kl = {"coefficient": 1.0, "estimator": "k2"}
    of = algorithm(kl=kl, correction={"mask": "none"} | ({"cap": cap} if cap else {}))
    got, _ = gradient(micro_batch([-9.0], [0.0], [0], reference=[-2.0]), of, [-1.0])
    assert float(got) == pytest.approx(most / TOTAL.tokens)


def test_the_divergence_from_the_reference_is_that_of_the_policy_whoever_sampled():
    """In the mean over what μ samples it is Σ π log π / π_ref, also where μ still is π_ref."""
    policy, sampler = (torch.randn(50, generator=torch.Generator().manual_seed(n)).softmax(0) for n in (1, 2))
    for reference in (sampler, torch.full((50,), 0.02)):
        mean = (sampler * divergence(policy.log(), sampler.log(), reference.log())).sum()
        expected = sum(p * math.log(p / r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True))
        assert mean == pytest.approx(expected, rel=1e-5)
        assert mean > 0
