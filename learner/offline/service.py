"""An offline stage as a process: what it is made of, in which order it starts, and what ends it."""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from buffer.bounds import bounds_of
from buffer.experiment import DataConfig
from buffer.stacks import Stillness
from buffer.stream import open_stream
from buffer.tokenizers import load_tokenizer, tokenizer_digest
from learner import ending, parallel
from learner.checkpoint import Checkpoints
from learner.collectives import sum_over_data
from learner.metrics import Journal
from learner.offline.config import HeldOutConfig, OfflineExperiment, RewardConfig, SftConfig
from learner.offline.encoding import Encoder
from learner.offline.feed import RULES, ExampleFeed, check_shared, share
from learner.offline.loop import HeldOut, OfflineParts, resume, train
from learner.offline.reporting import OfflineReporter
from learner.offline.stages import Stage, make_stage
from learner.offline.trainer import Trainer
from learner.optimizer import make_trainable, warn_of_warmup
from learner.reference.fingerprint import fingerprint
from learner.schedule import CheckpointSchedule
from learner.service import (
    build,
    check_start,
    checkpoint_setup,
    export,
    hold_folder,
    reference_of,
    threads,
)
from learner.stop import StopFlag

logger = logging.getLogger(__name__)


def run(experiment: OfflineExperiment) -> None:
    """Train until the last step is made, or a signal comes; then leave a checkpoint and return.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        serve(experiment)
    except (ValueError, OSError) as error:
        logger.error("the stage stops: %s", error)
        sys.exit(1)
    except RuntimeError as error:
        if not parallel.is_of_others(error):
            raise
        # Which of them is gone, and of what, torchrun tells.
        logger.error("the stage stops: its other ranks are not heard any more: %s", error)
        sys.exit(1)


def serve(experiment: OfflineExperiment) -> None:
    """Everything of `run` but its last resort."""
    stop = StopFlag()
    stop.install()
    parallel.initialize(experiment.learner.parallel, experiment.seed)
    torch.set_num_threads(threads(experiment.learner.threads))
    stillness = Stillness(experiment.logging.stalled_s)
    with ExitStack() as stack:
        stack.callback(parallel.shutdown)
        stack.callback(stillness.end)
        stillness.see("loading")
        hold_folder(experiment.run_dir, stack)
        parts = _assemble(experiment, stop, stack)
        if not train(parts, stillness):
            logger.info("stopped after step %d: the same command goes on from there", parts.step)
            return
        if experiment.learner.checkpoint.export:
            stillness.see("exporting")
            export(experiment, parts.trainable)
        if parallel.rank() == 0:
            ending.write(Path(experiment.run_dir), end_of(parts))
        logger.info("finished after step %d", parts.step)


def _assemble(experiment: OfflineExperiment, stop: StopFlag, stack: ExitStack) -> OfflineParts:
    learner, run_dir = experiment.learner, Path(experiment.run_dir)
    stage = make_stage(experiment.stage)
    encoder = encoder_of(experiment)
    # The data is opened before the model: a mistake in it is told at once.
    feed = _feed(experiment, stage, encoder)
    check_start(experiment)
    model = build(experiment, learner.lora, stage.head)
    trainable = make_trainable(model, learner.optimizer, learner.parallel, learner.ema)
    reference = None
    if stage.needs_reference:
        reference = reference_of(trainable, learner, lambda: build(experiment, head=stage.head))
    setup = checkpoint_setup(experiment, fingerprint(experiment.model, learner.init_from))
    checkpoints = Checkpoints(run_dir, learner.checkpoint.keep, setup)
    step, tokenizer = checkpoints.resume(trainable), tokenizer_digest(experiment.model.path)
    if step:
        resume(feed, trainable, checkpoints.position(step), tokenizer)
    planned = min(n for n in (learner.steps, feed.steps(step)) if n is not None)
    if parallel.rank() == 0:
        warn_of_warmup(learner.optimizer, planned)
    trainer = Trainer(learner, stage, trainable, reference, planned)
    held_out = experiment.eval and _held_out(experiment, experiment.eval, encoder, stage, trainer)
    steps = step if feed.used_up else planned
    journal = None
    if parallel.rank() == 0:
        # What was measured before the first step is measured again.
        journal = Journal(run_dir, experiment.logging.tensorboard, step or -1, samples=False)
    reporter = OfflineReporter(journal)
    stack.callback(reporter.close)
    schedule = CheckpointSchedule(learner.checkpoint)
    return OfflineParts(
        experiment, trainable, trainer, feed, held_out, tokenizer, checkpoints, schedule, reporter, stop,
        step, steps,
    )  # fmt: skip


def _feed(experiment: OfflineExperiment, stage: Stage, encoder: Encoder) -> ExampleFeed:
    rows = open_stream(experiment.data, experiment.seed, experiment.stage.kind)
    check_shared(rows, "data.train")
    of = experiment.stage if isinstance(experiment.stage, RewardConfig) else RewardConfig(kind="reward")
    feed = ExampleFeed(
        rows, encoder, stage, experiment.learner.batch_size, experiment.data.epochs, of.responses, of.select,
        experiment.seed,
    )  # fmt: skip
    feed.check_first()
    return feed


def end_of(parts: OfflineParts) -> ending.End:
    experiment = parts.experiment
    return ending.End(
        step=parts.step,
        evaluated=experiment.eval is not None,
        exported=experiment.learner.checkpoint.export,
        epochs=experiment.data.epochs if parts.feed.used_up else None,
    )


def encoder_of(experiment: OfflineExperiment) -> Encoder:
    """What makes token ids of the stage's examples."""
    model, stage = experiment.model, experiment.stage
    every_turn = isinstance(stage, SftConfig) and stage.turns == "every"
    tokenizer = load_tokenizer("model.path", model.path)
    too_long, vocabulary = experiment.learner.too_long, bounds_of(model).vocabulary
    return Encoder(
        tokenizer, model.max_length, experiment.data.system_prompt, too_long, every_turn, vocabulary
    )


def _held_out(
    experiment: OfflineExperiment, held_out: HeldOutConfig, encoder: Encoder, stage: Stage, trainer: Trainer
) -> HeldOut:
    data = DataConfig(train=held_out.source, shuffle=False, epochs=1, on_bad_row=experiment.data.on_bad_row)
    stream = open_stream(data, experiment.seed, experiment.stage.kind)
    check_shared(stream, "eval.source")
    rows = stream.take(held_out.examples)
    found = share(rows, encoder, stage)
    prepared = trainer.prepare(found.examples)
    if not prepared.total:
        raise ValueError(f"eval.source: none of its {len(rows)} rows can be used")
    left_out = sum(map(int, sum_over_data([found.counts[rule] for rule in RULES])))
    if left_out and parallel.rank() == 0:
        logger.warning("eval.source: %d of its %d rows cannot be used", left_out, len(rows))
    return HeldOut(prepared, left_out)
