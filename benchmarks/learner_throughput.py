"""The learner's update against a plain Hugging Face + AdamW loop, on the same samples.

    python benchmarks/learner_throughput.py

Both train the same groups of the demo's shape with the same loss (policy gradient with PPO's ratio), in
the type this machine computes fast, alternating in one process, and are compared by samples a second. The
plain loop pads the samples into batches and computes logits of every position; it is timed without a
proximal forward, which most such loops also need. Writes benchmarks/results/learner_throughput.json.
"""

import argparse
import os
import statistics
import time

import numpy as np
import torch
from record import write_result
from transformers import AutoModelForCausalLM

from buffer.processor import native_dtype
from buffer.records import Batch, Group, Trajectory
from learner import parallel
from learner.config import LearnerExperiment
from learner.model import build_model
from learner.optimizer import make_trainable
from learner.step import Updater

MODEL = ".cache/models/SmolLM2-135M-Instruct"
DTYPE = getattr(torch, native_dtype())


def groups(count: int, size: int, prompt: int, completion: int) -> tuple[Group, ...]:
    """Groups whose completions are `completion` tokens long on average, half to one and a half of it."""
    draw = np.random.default_rng(0)
    made = []
    for g in range(count):
        head = draw.integers(3, 49000, prompt, dtype=np.int32)
        rows = []
        for i in range(size):
            length = int(draw.integers(completion // 2, completion + completion // 2 + 1))
            ids = np.concatenate([head, draw.integers(3, 49000, length, dtype=np.int32)])
            mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
            rows.append(
                Trajectory(
                    index=i,
                    token_ids=ids,
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, -11.0, 0.0).astype(np.float32),
                    versions=np.zeros(len(ids), np.int32),
                    reward=float(draw.integers(0, 2)),
                    reward_parts={},
                    finish_reason="stop",
                )
            )
        made.append(Group(f"g{g}", f"l{g}", f"0/{g}", "train", tuple(rows)))
    return tuple(made)


class PlainLoop:
    """What one would write first: padded batches, full logits, torch's AdamW."""

    def __init__(self, micro_batch: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.micro_batch = micro_batch

    def update(self, shard: tuple[Group, ...]) -> None:
        rows = [t for g in shard for t in g.trajectories]
        for at in range(0, len(rows), self.micro_batch):
            part = rows[at : at + self.micro_batch]
            length = max(len(t.token_ids) for t in part)
            ids = torch.zeros(len(part), length, dtype=torch.int64)
            mask = torch.zeros(len(part), length)
            attention = torch.zeros(len(part), length, dtype=torch.int64)
            old = torch.zeros(len(part), length)
            advantage = torch.tensor([t.reward - 0.5 for t in part])[:, None]
            for i, t in enumerate(part):
                n = len(t.token_ids)
                ids[i, :n] = torch.from_numpy(t.token_ids).long()
                mask[i, :n] = torch.from_numpy(t.loss_mask).float()
                old[i, :n] = torch.from_numpy(t.behavior_logprobs)
                attention[i, :n] = 1
            logits = self.model(ids, attention_mask=attention, use_cache=False).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage, clipped * advantage) * mask[:, 1:]
            (loss.sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=38)
    parser.add_argument("--completion", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    experiment = LearnerExperiment.model_validate(
        {"name": "bench", "run_dir": "runs/bench", "model": {"path": MODEL, "max_length": 128}}
    )
    learner = experiment.learner
    parallel.initialize(learner.parallel, 1)
    model = build_model(MODEL, learner.parallel, DTYPE, recompute=False)
    updater = Updater(experiment, make_trainable(model, learner.optimizer, learner.parallel), None)
    shard = groups(4, 8, args.prompt, args.completion)
    samples = sum(len(g.trajectories) for g in shard)
    ours: list[float] = []
    plain: dict[int, list[float]] = {8: [], 16: []}
    loops = {size: PlainLoop(size) for size in plain}
    for round_ in range(args.rounds + 1):
        batch = Batch(round_, shard, {})
        timed = [("learner", ours, lambda batch=batch: updater.update(batch))]
        for size, loop in loops.items():
            timed.append((f"plain {size}", plain[size], lambda loop=loop: loop.update(shard)))
        for name, seconds, update in timed:
            started = time.perf_counter()
            update()
            took = time.perf_counter() - started
            print(f"round {round_} {name}: {took:.2f} s", flush=True)
            if round_:  # the first one warms up
                seconds.append(took)
    best_size = min(plain, key=lambda size: statistics.median(plain[size]))
    seconds, plain_seconds = statistics.median(ours), statistics.median(plain[best_size])
    parallel.shutdown()
    write_result(
        "learner_throughput",
        {
            "dtype": str(DTYPE),
            "samples": samples,
            "prompt_tokens": args.prompt,
            "mean_completion_tokens": args.completion,
            "learner_samples_per_s": samples / seconds,
            "plain_samples_per_s": samples / plain_seconds,
            "plain_micro_batch": best_size,
            "ratio": plain_seconds / seconds,
            "target": 1.0,
        },
    )


if __name__ == "__main__":
    main()
