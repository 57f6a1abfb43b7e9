"""The offline stages' main loop, the same on every rank."""

from dataclasses import dataclass
from typing import Any

from buffer.stacks import Stillness
from learner import collectives
from learner.checkpoint import Checkpoints
from learner.offline.config import OfflineExperiment
from learner.offline.feed import ExampleFeed
from learner.offline.reporting import OfflineReporter
from learner.offline.trainer import Prepared, Trainer
from learner.optimizer import Trainable
from learner.schedule import CheckpointSchedule
from learner.stop import StopFlag

TOKENIZER = "tokenizer"
"""Beside the place in the data, in a checkpoint: `tokenizer_digest` of the model's folder."""
UPDATES = "updates"
"""Beside the place in the data, in a checkpoint: the optimizer steps that changed the weights."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    prepared: Prepared
    left_out: int
    """Of its rows, over all ranks, those that cannot be used."""


@dataclass(slots=True)
class OfflineParts:
    """What the loop names; made by `learner/offline/service.py`."""

    experiment: OfflineExperiment
    trainable: Trainable
    trainer: Trainer
    feed: ExampleFeed
    held_out: HeldOut | None
    tokenizer: str
    """`tokenizer_digest` of the model's folder."""
    checkpoints: Checkpoints
    schedule: CheckpointSchedule
    reporter: OfflineReporter
    stop: StopFlag
    step: int
    """Where the run starts or resumes; then how many steps are made."""
    steps: int
    """How many there will be."""


def train(parts: OfflineParts, stillness: Stillness) -> bool:
    """Make steps until there are `learner.steps` of them or the data's last epoch ends.

    Consumes: `learner.batch_size` rows of the data a step.
    Waits for: nothing but the data's files.
    Unblocked by: a signal, which ends it after the step it is in.

    Returns:
        Whether it is finished; not after a signal. A checkpoint holds the last step either way.

    Raises:
        ValueError: It ends as it began.
    """
    saved = parts.step
    stillness.see(parts.step)
    if parts.step >= parts.steps:
        # Made by an earlier start, which may not have been asked to evaluate.
        refuse_if_untrained(parts)
        parts.reporter.amend(parts.step, evaluation(parts))
    elif parts.step == 0 and parts.held_out is not None:
        parts.reporter.write(0, parts.steps, evaluation(parts))
    while parts.step < parts.steps and not stopping(parts):
        with parts.reporter.timed("data"):
            share = parts.feed.next()
        with parts.reporter.timed("update"):
            row = parts.trainer.update(parts.step, parts.trainer.prepare(share.examples))
        parts.step += 1
        if parts.feed.used_up:
            parts.steps = parts.step
        if parts.step == parts.steps:
            refuse_if_untrained(parts)
        if parts.step == parts.steps or is_due(parts):
            row |= evaluation(parts)
        parts.reporter.write(parts.step, parts.steps, row, share)
        stillness.see(parts.step)
        if parts.schedule.is_due(parts.step, last=parts.step == parts.steps):
            with parts.reporter.timed("checkpoint"):
                saved = save(parts)
    if saved != parts.step:
        stillness.see("closing")
        save(parts)
    return parts.step >= parts.steps


def refuse_if_untrained(parts: OfflineParts) -> None:
    """What was never updated, by this process or those before it that were stopped, must not pass for a
    trained model, nor be what a next stage starts from."""
    if not parts.trainable.updates.made:
        raise ValueError(
            f"not one of {parts.step} steps changed the weights: either no row had anything to train on "
            "(left_out in metrics.jsonl counts why), or no gradient was finite; nothing is exported"
        )


def stopping(parts: OfflineParts) -> bool:
    """Whether rank 0 was told to stop."""
    return bool(collectives.broadcast_numbers([parts.stop.is_set])[0])


def is_due(parts: OfflineParts) -> bool:
    every = parts.experiment.eval and parts.experiment.eval.every
    return every is not None and parts.step % every == 0


def evaluation(parts: OfflineParts) -> dict[str, object]:
    """What the held-out examples say; nothing where there are none."""
    if parts.held_out is None:
        return {}
    with parts.reporter.timed("eval"):
        found = parts.trainer.evaluate(parts.held_out.prepared)
    return {**found, "eval/left_out": parts.held_out.left_out}


def save(parts: OfflineParts) -> int:
    """Checkpoint model, optimizer, the place in the data, and how many updates were made."""
    told = {UPDATES: parts.trainable.updates.made, TOKENIZER: parts.tokenizer}
    position = parts.feed.position | told
    parts.checkpoints.save(parts.step, parts.trainable, position)
    parts.schedule.saved()
    return parts.step


def resume(feed: ExampleFeed, trainable: Trainable, position: dict[str, Any], tokenizer: str) -> None:
    """Go on from where `save` was. An older checkpoint does not tell its updates, of which some are assumed,
    nor its tokenizer.

    Args:
        tokenizer: `tokenizer_digest` of the model's folder as it is now.

    Raises:
        ValueError: It is a place in other data, or other tokens would be made of the same rows.
    """
    if position.get(TOKENIZER, tokenizer) != tokenizer:
        raise ValueError(
            "model.path: the tokenizer or the chat template in it is not what this run began with, so that "
            "the same rows would be other tokens; put it back, or use another run_dir"
        )
    feed.seek(position)
    trainable.updates.made = int(position.get(UPDATES, 1))
