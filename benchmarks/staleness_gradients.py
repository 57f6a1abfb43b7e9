"""Why does one correction do better than another? Its gradient on old completions, against one on fresh ones.

    python benchmarks/staleness_gradients.py

Policies are taken from runs at a staleness of 0 (`staleness_harness.py`), some versions apart. The older one
samples, the newer one is about to be trained on that by each correction (the first update of a batch), and
what comes out is compared with the gradient on a large sample of its own. Told of each correction, as means:

    one batch      cosine of the gradient of one batch with the reference
    many           of the mean of `BATCHES` gradients: what is left is the correction's bias
    length         of that mean, over the reference's
    blame          of all that is pushed down in wrong answers, the share that falls on tokens that were right
    masked         share of tokens without a gradient

`fresh` is the newer policy on completions of its own: no correction can do better. A minute or two on one
core. Writes benchmarks/results/staleness_gradients.json.
"""

import statistics
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from record import write_result
from staleness_curves import METHODS, OPEN, START
from staleness_harness import DIGITS, EOS, PROMPT, Sampler, Size, answers, experiment, make_prompts, train
from torch import Tensor
from transformers import LlamaForCausalLM

from learner import parallel
from learner.advantages import grpo
from learner.algorithm import AlgorithmConfig
from learner.commandline import quiet_megatron
from learner.config import ParallelConfig
from learner.losses import Denominators, objective
from learner.normalisers import trusted_tokens
from learner.packing import MicroBatch, empty

RATE = 2e-4
AGES = (8,)
VERSIONS = (24, 48, 72)
SEEDS = (1, 2, 3)
BATCHES = 16
SIZE = Size()
CORRECTIONS = {
    **{name: of for name, of in METHODS.items() if name not in ("interpolated", "token cap 2, normalized")},
    "mask geometric, low side": {"correction": {"mask": "geometric", "mask_low": 0.8, "mask_high": 1e6}},
    "mask geometric, high side": {"correction": {"mask": "geometric", "mask_low": 0.0, "mask_high": 1.25}},
    "sequence weight and mask": {"correction": {"weight": "sequence", "mask": "sequence"}},
    "sequence cap 1": {"correction": {"weight": "sequence", "cap": 1.0, **OPEN}},
    "sequence weight, no cap": {"correction": {"weight": "sequence", **OPEN, "cap": 1e6}},
}


def main() -> None:
    torch.set_num_threads(1)
    quiet_megatron()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    parallel.initialize(ParallelConfig(), seed=1)
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    for seed in SEEDS:
        kept = policies(seed)
        for version in VERSIONS:
            for age in AGES:
                print(f"seed {seed}, version {version}, age {age}", flush=True)
                for name, found in compared(kept[version - age], kept[version], [seed, version]).items():
                    rows.setdefault((age, name), []).append(found)
    parallel.shutdown()
    table = [
        {"age": age, "correction": name}
        | {key: round(statistics.fmean(f[key] for f in found), 3) for key in found[0]}
        for (age, name), found in rows.items()
    ]
    write_result(
        "staleness_gradients",
        {
            "rate": RATE,
            "versions": list(VERSIONS),
            "seeds": list(SEEDS),
            "batch": f"{SIZE.groups} groups of {SIZE.group_size}",
            "batches": BATCHES,
            "table": table,
        },
    )


def policies(seed: int) -> dict[int, dict[str, Tensor]]:
    """Weights of the versions that are compared, of one run at a staleness of 0."""
    wanted = {v - age for v in VERSIONS for age in (0, *AGES)}
    kept: dict[int, dict[str, Tensor]] = {}

    def watch(version: int, weights: dict[str, Tensor]) -> None:
        if version in wanted:
            kept[version] = weights

    train(START, METHODS["decoupled"], RATE, 0, seed, replace(SIZE, steps=max(wanted) + 1), watch)
    return kept


def compared(old: dict[str, Tensor], new: dict[str, Tensor], seed: list[int]) -> dict[str, dict[str, float]]:
    """Of each correction, and of fresh completions, what the table tells."""
    sampler, policy = (Sampler(LlamaForCausalLM.from_pretrained(START)) for _ in range(2))
    sampler.model.load_state_dict(old, strict=False)
    policy.model.load_state_dict(new, strict=False)
    plain = {"fresh": METHODS["none"]}
    reference = gradients(policy, policy, plain, [*seed, 1])["fresh"][0].mean(0)
    told = {}
    for from_whom, corrections, draw in ((policy, plain, 2), (sampler, CORRECTIONS, 3)):
        for name, (rows, blame, masked) in gradients(from_whom, policy, corrections, [*seed, draw]).items():
            mean = rows.mean(0)
            told[name] = {
                "one batch": statistics.fmean(cosine(row, reference) for row in rows),
                "many": cosine(mean, reference),
                "length": float(mean.norm() / reference.norm()),
                "blame": blame,
                "masked": masked,
            }
    return told


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def gradients(
    sampler: Sampler, policy: Sampler, corrections: dict[str, dict[str, Any]], seed: list[int]
) -> dict[str, tuple[Tensor, float, float]]:
    """Of each correction: gradients [BATCHES, weights], blame, share masked."""
    draw, chance = np.random.default_rng(seed), torch.Generator().manual_seed(sum(seed) * 7919)
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    rows: dict[str, list[Tensor]] = {name: [] for name in corrections}
    sums = {name: np.zeros(4) for name in corrections}
    for _ in range(BATCHES):
        batch, ids, places, right = stale_batch(sampler, draw, chance)
        logprobs = policy.model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        logprobs = logprobs.gather(2, ids[:, PROMPT:, None])[..., 0][places]
        total = Denominators(float(places.sum()), float(len(ids)), 32)
        for name, settings in corrections.items():
            slopes = slopes_of(settings, logprobs.detach(), batch, total)
            made = torch.autograd.grad(logprobs, weights, slopes, retain_graph=True)
            rows[name].append(torch.cat([of.flatten() for of in made]))
            pushed = slopes * (batch.advantages < 0)
            moving = batch.advantages != 0
            idle = ((slopes == 0) & moving).sum()
            sums[name] += [float(x) for x in (pushed[right].sum(), pushed.sum(), idle, moving.sum())]
    return {n: (torch.stack(rows[n]), s[0] / max(s[1], 1e-9), s[2] / s[3]) for n, s in sums.items()}


def slopes_of(settings: dict[str, Any], logprobs: Tensor, batch: MicroBatch, total: Denominators) -> Tensor:
    """Derivative of the loss by each token's log π, [N]."""
    algorithm: AlgorithmConfig = experiment(START, settings, RATE, SIZE, 1).learner.algorithm
    if algorithm.loss == "m2po":
        limit = algorithm.m2po.second_moment
        batch = replace(batch, trusted=trusted_tokens([batch], [logprobs], limit)[0])
    leaf = logprobs.clone().requires_grad_()
    batch = replace(batch, proximal_logprobs=logprobs)
    loss, _ = objective(leaf, torch.zeros_like(leaf), batch, algorithm, total, 0.0)
    return torch.autograd.grad(loss, leaf)[0]


def stale_batch(
    sampler: Sampler, draw: np.random.Generator, chance: torch.Generator
) -> tuple[MicroBatch, Tensor, Tensor, Tensor]:
    """A batch; its token ids [B, PROMPT + DIGITS + 1]; which of the answers' tokens are trained, bool
    [B, DIGITS + 1]; which of those N were right, bool [N]."""
    prompts = make_prompts(draw, SIZE.groups).repeat_interleave(SIZE.group_size, 0)
    made, behavior = sampler.sample(prompts, chance)
    right = made == answers(prompts)
    rewards = right.all(1).numpy().astype(np.float64).reshape(SIZE.groups, SIZE.group_size)
    advantages = torch.from_numpy(np.concatenate([grpo(of) for of in rewards])).float()
    ended = (made == EOS).int()
    places = ended.cumsum(1) - ended == 0
    sequences = torch.arange(len(made))[:, None].expand(-1, DIGITS + 1)[places]
    batch = replace(
        empty(),
        target_ids=made[places],
        target_positions=sequences,
        behavior_logprobs=behavior[places],
        advantages=advantages[sequences],
        weights=torch.ones(len(sequences)),
        sequence_index=sequences,
        versions=torch.zeros(len(sequences), dtype=torch.int32),
    )
    return batch, torch.cat([prompts, made], 1), places, right[places]


if __name__ == "__main__":
    main()
