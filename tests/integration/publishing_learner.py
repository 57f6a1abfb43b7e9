"""A real learner that does what it is told: a program, an order in JSON a line in, an answer a line out.

    python publishing_learner.py

Orders, by `do`: `build` a policy and open its publisher (the last one is closed), `train` on a group of
samples, `publish` a version, `save` the policy as a Hugging Face folder, `gap` between the policy's logprobs
of samples and those they came with. Everything is the learner's own but the buffer, which only takes notes.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripted_learner import ScriptedBuffer

from buffer.records import Batch, Group, Trajectory
from learner import convert, parallel
from learner.config import LearnerExperiment, ParallelConfig
from learner.feed import BufferLine
from learner.model import build_model
from learner.optimizer import make_trainable
from learner.packing import pack
from learner.publishing import Publishing
from learner.service import publisher
from learner.step import Updater


def group(version: int, prompt: list[int], samples: list[dict[str, Any]]) -> Group:
    """The samples as a rollout server delivers them, with made-up rewards."""
    trajectories = []
    for index, sample in enumerate(samples):
        mask = np.array([0] * len(prompt) + [1] * len(sample["token_ids"]), np.uint8)
        trajectories.append(
            Trajectory(
                index=index,
                token_ids=np.array(prompt + sample["token_ids"], np.int32),
                loss_mask=mask,
                behavior_logprobs=np.array([0.0] * len(prompt) + sample["logprobs"], np.float32),
                versions=mask.astype(np.int32) * np.int32(version),
                reward=float(index % 3),
                reward_parts={},
                finish_reason="length",
            )
        )
    return Group(f"group-{version}", "lease", "prompt", "train", tuple(trajectories))


class Learner:
    """One policy, its optimizer and its publisher, for as long as `stack` is open."""

    def __init__(self, settings: dict[str, Any], stack: contextlib.ExitStack) -> None:
        experiment = LearnerExperiment.model_validate(settings)
        dtype = getattr(torch, experiment.model.dtype)
        self._source = experiment.model.path
        self._temperature = experiment.rollout.sampling.temperature
        policy = build_model(self._source, ParallelConfig(), dtype, adapters=experiment.learner.lora)
        self._trainable = make_trainable(policy, experiment.learner.optimizer, ParallelConfig())
        self._updater = Updater(experiment, self._trainable, None)
        notes = Path(experiment.run_dir)
        notes.mkdir(parents=True)
        line = stack.enter_context(BufferLine(lambda: ScriptedBuffer(notes, {})))
        sender = stack.enter_context(publisher(experiment))
        self._publishing = Publishing(policy, sender, line, join_timeout_s=60)
        stack.callback(self._publishing.close)

    def train(self, version: int, prompt: list[int], samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make version + 1 of it."""
        groups = (group(version, prompt, samples),)
        report = self._updater.update(Batch(version, groups, {"groups": 1, "tokens": groups[0].num_tokens}))
        row = report.row()
        return {"trained_tokens": row["tokens"], "rho_max": row["rho/max"]}

    def publish(self, version: int) -> dict[str, Any]:
        if self._publishing.is_first:
            assert self._publishing.await_member(lambda: False)
        self._publishing.publish(version)
        self._publishing.settle()
        assert self._publishing.last is not None
        return {"members": self._publishing.last.members}

    def save(self, folder: str) -> dict[str, Any]:
        convert.save_hf(self._trainable.model.module, self._source, folder)
        return {}

    @torch.no_grad()
    def gap(self, prompt: list[int], samples: list[dict[str, Any]]) -> dict[str, Any]:
        """|Δ| of every sampled token, as the trainer's forward pass packs them."""
        gaps: list[float] = []
        for batch in pack([group(0, prompt, samples)], [np.zeros(len(samples))], 4096):
            logprobs, _ = self._trainable.model(batch, self._temperature)
            gaps += (logprobs - batch.behavior_logprobs).abs().tolist()
        return {"gaps": gaps}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    parallel.initialize(ParallelConfig())
    with contextlib.ExitStack() as stack:
        learner: Any = None
        for line in sys.stdin:
            order = json.loads(line)
            what = order.pop("do")
            if what == "build":
                stack.close()
                learner, answer = Learner(order["settings"], stack), {}
            else:
                answer = getattr(learner, what)(**order)
            print(json.dumps(answer), file=answers, flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
