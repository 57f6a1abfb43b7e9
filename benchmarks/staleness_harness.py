"""Training in one process at an exact staleness: batch i is sampled by the policy of version i − s.

The learner's step is the product's own: Megatron model, packing, advantages, corrections, losses, optimizer
(`learner.step.Updater`). Only the services are left out: completions come from a Hugging Face model in this
process that holds an earlier version's weights, with the logprobs that it drew them with. So staleness is
exact, and a seed gives the same run every time.

The task: the digits of a prompt, backwards. Reward 1 if all are right and the end mark follows, else 0.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from buffer.records import Batch, Group, Trajectory
from learner import convert
from learner.config import LearnerExperiment
from learner.model import build_model
from learner.optimizer import make_trainable
from learner.step import Updater

DIGITS = 5
BOS, EOS, ANSWER, ZERO = 1, 2, 3, 4
VOCABULARY = ZERO + 10
PROMPT = DIGITS + 2
LENGTH = PROMPT + DIGITS + 1
HELD_OUT = 200
"""Prompts of an evaluation, one completion each."""
KNOWN = 400
"""Prompts whose right answer's probability is told."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a step is made of."""

    groups: int = 16
    group_size: int = 8
    updates: int = 2
    steps: int = 120
    evaluate_every: int = 6
    schedule: str = "constant"
    """Of the learning rate, behind five versions of warm-up."""


def start_model(folder: Path, enough: float = 0.25) -> float:
    """Make the policy that every run starts from: a Llama of two layers, taught by next-token loss until so
    many of the held-out prompts are answered right, one sample each. Returns how many."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32, bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    draw = np.random.default_rng(0)
    sampler, score = Sampler(model), 0.0
    while score < enough:
        for _ in range(5):
            prompts = make_prompts(draw, 64)
            ids = torch.cat([prompts, answers(prompts)], 1)
            logits = model(ids).logits[:, PROMPT - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = sampler.score(np.random.default_rng(1))
    model.save_pretrained(folder)
    return score


def make_prompts(draw: np.random.Generator, count: int) -> Tensor:
    """int64 [count, PROMPT]."""
    digits = torch.from_numpy(draw.integers(0, 10, (count, DIGITS)))
    ends = torch.tensor([[BOS]]), torch.tensor([[ANSWER]])
    return torch.cat([ends[0].expand(count, 1), digits + ZERO, ends[1].expand(count, 1)], 1)


def answers(prompts: Tensor) -> Tensor:
    """int64 [count, DIGITS + 1]: what is right."""
    return torch.cat([prompts[:, 1:-1].flip(1), torch.full((len(prompts), 1), EOS)], 1)


class Sampler:
    """Stands where the rollout servers are."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model.eval()  # which nothing in a Llama without dropout depends on

    @torch.no_grad()
    def sample(self, prompts: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids [N, DIGITS + 1] at temperature 1, and their logprobs."""
        ids, known = prompts, []
        cache = None
        fresh = prompts
        for _ in range(DIGITS + 1):
            made = self.model(fresh, past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            logprobs = made.logits[:, -1].log_softmax(-1)
            fresh = torch.multinomial(logprobs.exp(), 1, generator=chance)
            known.append(logprobs.gather(1, fresh))
            ids = torch.cat([ids, fresh], 1)
        return ids[:, PROMPT:], torch.cat(known, 1)

    def score(self, draw: np.random.Generator) -> float:
        """Share of held-out prompts answered right, one sample each."""
        prompts = make_prompts(draw, HELD_OUT)
        chance = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
        made, _ = self.sample(prompts, chance)
        return float((made == answers(prompts)).all(1).float().mean())

    @torch.no_grad()
    def chance(self) -> float:
        """Of a held-out prompt being answered right, the mean of `KNOWN`: a score that no draw is in."""
        prompts = make_prompts(np.random.default_rng(1 << 21), KNOWN)
        right = answers(prompts)
        logits = self.model(torch.cat([prompts, right], 1)).logits[:, PROMPT - 1 : -1]
        return float(logits.log_softmax(-1).gather(2, right[:, :, None])[..., 0].sum(1).exp().mean())

    def batch(self, index: int, version: int, seed: int, size: Size) -> Batch:
        """Batch `index`, sampled by what the model holds, which is `version`."""
        draw = np.random.default_rng([seed, index])
        prompts = make_prompts(draw, size.groups).repeat_interleave(size.group_size, 0)
        chance = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
        made, logprobs = self.sample(prompts, chance)
        rewards = (made == answers(prompts)).all(1).numpy()
        rows = [
            _trajectory(n % size.group_size, p, t, b, version, float(r))
            for n, (p, t, b, r) in enumerate(
                zip(prompts.numpy(), made.numpy(), logprobs.numpy(), rewards, strict=True)
            )
        ]
        groups = [
            Group(f"{index}/{g}", "", f"{index}/{g}", "train", tuple(rows[at : at + size.group_size]))
            for g, at in enumerate(range(0, len(rows), size.group_size))
        ]
        return Batch(index, tuple(groups), {})


def _trajectory(index: int, prompt: Any, made: Any, logprobs: Any, version: int, reward: float) -> Trajectory:
    ends = np.flatnonzero(made == EOS)
    length = int(ends[0]) + 1 if len(ends) else len(made)
    mask = np.array([0] * PROMPT + [1] * length, np.uint8)
    behavior = np.concatenate([np.zeros(PROMPT), logprobs[:length]]).astype(np.float32)
    return Trajectory(
        index=index,
        token_ids=np.concatenate([prompt, made[:length]]).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior,
        versions=mask.astype(np.int32) * version,
        reward=reward,
        reward_parts={},
        finish_reason="stop" if len(ends) else "length",
    )


def experiment(
    folder: Path, algorithm: dict[str, Any], rate: float, size: Size, seed: int
) -> LearnerExperiment:
    """`max_staleness` stays 0 here, whatever the batches are: what ignores age is refused above it."""
    return LearnerExperiment.model_validate(
        {
            "name": "staleness",
            "run_dir": "runs/staleness",
            "seed": seed,
            "model": {"path": str(folder), "dtype": "float32", "max_length": 32},
            "buffer": {"groups_per_batch": size.groups, "max_staleness": 0},
            "rollout": {"group_size": size.group_size, "sampling": {"max_tokens": DIGITS + 1}},
            "learner": {
                "steps": size.steps,
                "updates_per_batch": size.updates,
                "tokens_per_microbatch": 4096,
                "optimizer": {"lr": rate, "warmup_steps": 5, "schedule": size.schedule},
                "algorithm": algorithm,
            },
        }
    )


def train(
    folder: Path,
    algorithm: dict[str, Any],
    rate: float,
    staleness: int,
    seed: int,
    size: Size,
    watch: Callable[[int, dict[str, Tensor]], None] = lambda version, weights: None,
) -> dict[str, Any]:
    """One run. `learner.parallel.initialize` has been called.

    Args:
        watch: Called with each version and its weights by their Hugging Face names, before its batch.

    Returns:
        The held-out score every few versions, and means of the learner's own metrics.
    """
    started = time.perf_counter()
    of = experiment(folder, algorithm, rate, size, seed)
    model = build_model(folder, of.learner.parallel, torch.float32)
    updater = Updater(of, make_trainable(model, of.learner.optimizer, of.learner.parallel), None)
    sampler, newest = (Sampler(LlamaForCausalLM.from_pretrained(folder)) for _ in range(2))
    versions: deque[dict[str, Tensor]] = deque(maxlen=staleness + 1)
    scores, chances, rows = [newest.score(np.random.default_rng([seed, 1 << 20]))], [newest.chance()], []
    for index in range(size.steps):
        versions.append({name: tensor.detach().clone() for name, tensor in convert.export_hf(model)})
        watch(index, versions[-1])
        sampler.model.load_state_dict(versions[0], strict=False)
        report = updater.update(sampler.batch(index, max(0, index - staleness), seed, size))
        rows.append(report.row())
        if (index + 1) % size.evaluate_every == 0:
            newest.model.load_state_dict(dict(convert.export_hf(model)), strict=False)
            scores.append(newest.score(np.random.default_rng([seed, 1 << 20, index])))
            chances.append(newest.chance())
    return {
        "curve": [round(s, 3) for s in scores],
        "chance": [round(c, 4) for c in chances],
        "ess": _mean(rows, "rho/ess"),
        "rho_max": max(r["rho/max"] for r in rows),
        "mask_fraction": _mean(rows, "mask_fraction"),
        "clip_fraction": _mean(rows, "clip_fraction"),
        "kl_k3": _mean(rows, "kl/k3"),
        "entropy": rows[-1]["entropy"],
        "grad_norm_max": max(r["grad_norm"] for r in rows),
        "seconds": time.perf_counter() - started,
    }


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    found = [r[key] for r in rows if r[key] is not None]
    return sum(found) / max(len(found), 1)
