"""The objective against a token-by-token loop written from the formulas, and at the edges."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import AlgorithmConfig
from learner.corrections import NonFiniteLogprob, ratio
from learner.losses import Denominators, aggregate, kl, objective
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


def oracle(logprobs, entropy, batch: MicroBatch, of: AlgorithmConfig) -> float:
    """The loss, one token after the other."""
    behavior, advantages = batch.behavior_logprobs.tolist(), batch.advantages.tolist()
    sequences = batch.sequence_index.tolist()
    proximal = logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs.tolist()
    total = 0.0
    for i, logprob in enumerate(logprobs):
        rho = math.exp(proximal[i] - behavior[i])
        mates = [j for j, s in enumerate(sequences) if s == sequences[i]]
        weight = keep = 1.0
        if of.correction.kind == "decoupled":
            lowest, highest = of.correction.band
            if not lowest <= rho <= highest:
                keep = 0.0
            if any(math.exp(proximal[j] - behavior[j]) < of.correction.veto_below for j in mates):
                keep = 0.0
            weight = rho * keep
        a = advantages[i]
        if of.loss == "ppo":
            r = math.exp(logprob - (proximal[i] if of.correction.kind == "decoupled" else behavior[i]))
            low, high = of.clip
            loss = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
        else:
            loss = -a * logprob
        loss = weight * loss - keep * of.entropy * entropy[i]
        if batch.reference_logprobs is not None:
            d = batch.reference_logprobs.tolist()[i] - logprob
            estimate = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[of.kl.estimator]
            loss += keep * of.kl.coefficient * estimate
        if of.aggregation == "token":
            total += loss / TOTAL.tokens
        if of.aggregation == "sequence":
            total += loss / len(mates) / TOTAL.sequences
        if of.aggregation == "constant":
            total += loss / (TOTAL.sequences * TOTAL.max_length)
    return total


logprob = st.floats(-12, 0, width=32)


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.tuples(logprob, logprob, logprob, logprob, st.floats(-3, 3, width=32), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    loss=st.sampled_from(["ppo", "reinforce"]),
    kind=st.sampled_from(["decoupled", "bypass"]),
    how=st.sampled_from(["token", "sequence", "constant"]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    first_pass=st.booleans(),
)
def test_against_a_loop(rows, loss, kind, how, estimator, first_pass):
    rows = sorted(rows, key=lambda r: r[5])
    current, behavior, proximal, reference, advantages, sequences = map(list, zip(*rows, strict=True))
    of = algorithm(
        loss=loss,
        aggregate=how,
        entropy=0.01,
        correction={"kind": kind},
        kl={"coefficient": 0.1, "estimator": estimator},
    )
    batch = micro_batch(behavior, advantages, sequences, None if first_pass else proximal, reference)
    entropy = [abs(x) for x in current]
    value, metrics = objective(
        torch.tensor(current), torch.tensor(entropy), batch, of, TOTAL, of.kl.coefficient
    )
    assert float(value) == pytest.approx(oracle(current, entropy, batch, of), rel=2e-4, abs=2e-5)
    assert float(metrics["tokens"]) == len(rows)


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


def test_a_huge_ratio_stays_finite_and_is_not_trained():
    got, metrics = gradient(micro_batch([-500.0], [1.0], [0]), algorithm(), [-0.1])
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


def test_the_whole_objective_passes_a_gradient_check():
    """Float64 through the formulas that take it, away from the kinks of the clip."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    x = torch.tensor([-1.05, -1.9, -0.55], dtype=torch.float64, requires_grad=True)

    def f(logprobs):
        return -(torch.exp(logprobs - old) * advantages).sum() + (0.1 * (old - logprobs) ** 2).sum()

    (expected,) = torch.autograd.grad(f(x), x)
    y = x.detach().float().requires_grad_()
    policy, _ = ppo(y, old.float(), advantages.float(), 0.2, 0.2)
    (got,) = torch.autograd.grad((policy + 0.2 * kl(y, old.float(), "k2")).sum(), y)
    assert torch.allclose(got.double(), expected, atol=1e-6)
