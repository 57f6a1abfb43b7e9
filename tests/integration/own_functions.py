"""A user's functions that do what the built-in ones do."""

import os

import torch


def ppo(logprobs, old_logprobs, batch):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)


def loop(flow):
    for batch in flow.batches():
        report = flow.update(batch)
        flow.publish()
        if flow.save_due():
            flow.save()
        flow.report(batch, report, halves=0.5 * flow.version)


def rows_of_each_rank():
    """As a function would that draws without a seed, or goes through a set."""
    return [{"prompt": "a", "response": "b " * (1 + int(os.environ["RANK"]))}] * 8
