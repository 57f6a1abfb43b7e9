"""The baseline: TRL's GRPO trainer on the demo's task, run by demo_against_trl.py in an environment of
its own.

Prints one JSON line: seconds of each step and samples a step.
"""

import argparse
import itertools
import json
import random
import re
import time

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rows(seed: int, count: int) -> list[dict]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    draw = random.Random(seed)
    drawn = [draw.choice(pairs) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b} for a, b in drawn
    ]


def reward(completions, answer, **_):
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"])
        scores.append(1.0 if numbers and numbers[-1] == str(expected) else 0.0)
    return scores


class Clock(TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_end(self, args, state, control, **_):
        self.times.append(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", required=True)
    parser.add_argument("--bf16", action="store_true", help="where the processor multiplies bfloat16 fast")
    args = parser.parse_args()
    clock = Clock()
    config = GRPOConfig(
        output_dir=args.out,
        use_cpu=True,
        bf16=args.bf16,  # autocast over fp32 weights: the setting in which TRL learns this task
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=48,
        max_steps=args.steps,
        learning_rate=1e-5,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=args.model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows(0, 512)),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
    )
    started = time.monotonic()
    trainer.train()
    ends = [started, *clock.times]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    print(json.dumps({"trl_step_seconds": seconds, "samples_per_step": 64}))


if __name__ == "__main__":
    main()
