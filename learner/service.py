"""The learner as a process: what it is made of, in which order it starts, and what ends it."""

import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from buffer.bounds import bounds_of
from buffer.client import FOR_EVER, BufferClient
from buffer.dotted import is_dotted, resolve
from buffer.errors import FolderInUse
from buffer.experiment import DataConfig
from buffer.keys import client_keys, server_keys
from buffer.run_lock import RunLock
from buffer.stacks import Stillness
from buffer.stream import open_stream
from buffer.tokenizers import load_tokenizer
from buffer.whole_file import write_whole
from learner import checkpoint, collectives, convert, ending, families, parallel
from learner.alone import sleep_through
from learner.apart.client import ApartClient
from learner.apart.waiting import asks
from learner.apart.wire import REFERENCE, VALUE
from learner.checkpoint import Checkpoints, Setup, ValueState
from learner.config import (
    DATA_END,
    LearnerConfig,
    LearnerExperiment,
    LoraConfig,
    ParallelConfig,
    TrainingConfig,
)
from learner.critic import Critic, ValueModel
from learner.families import Head
from learner.feed import BufferLine, Feed, NoBatch
from learner.flow import Flow
from learner.line import Line
from learner.loop import train
from learner.metrics import Journal
from learner.offline.config import OfflineExperiment
from learner.offline.feed import check_shared
from learner.optimizer import Trainable, make_trainable, prepare_schedule, warn_of_warmup
from learner.ptx import Texts
from learner.publishing import Publishing, WeightSender
from learner.reference.fingerprint import fingerprint
from learner.reference.local import Reference, ReferenceModel
from learner.reference.ranks import ReferenceRanks
from learner.reporting import Reporter
from learner.resuming import measures_from_start, shape_of, sharded_apart
from learner.step import Updater
from learner.stop import Abandoned, StopFlag
from learner.value.client import ValueClient
from learner.value.ranks import CriticRanks
from learner.value.start import start_of_value, weights_of_value
from sync.errors import SyncError
from sync.publisher import Publisher

logger = logging.getLogger(__name__)

Connect = Callable[[LearnerExperiment], Any]
"""Makes the buffer's client, an async context manager around a BatchSource."""
OpenSender = Callable[[LearnerExperiment], Any]
"""Makes a context manager around a WeightSender."""


def run(experiment: LearnerExperiment) -> None:
    """Train until the last version is made, or a signal comes; then leave a checkpoint and return.

    Raises:
        SystemExit: With status 1, after one line in the log that says what failed.
    """
    try:
        serve(experiment, buffer_client, publisher)
    except (ValueError, NoBatch, OSError, SyncError) as error:
        logger.error("the learner stops: %s", error)
        sys.exit(1)
    except RuntimeError as error:
        if not parallel.is_of_others(error):
            raise
        # Which of them is gone, and of what, torchrun tells.
        logger.error("the learner stops: its other ranks are not heard any more: %s", error)
        sys.exit(1)


def serve(experiment: LearnerExperiment, connect: Connect, open_sender: OpenSender) -> None:
    """Everything of `run` but its last resort; the two seams are the caller's."""
    stop = StopFlag()
    stop.install()
    parallel.initialize(experiment.learner.parallel, experiment.seed)
    torch.set_num_threads(threads(experiment.learner.threads))
    stillness = Stillness(experiment.logging.stalled_s)
    with ExitStack() as stack:
        stack.callback(parallel.shutdown)
        stack.callback(stillness.end)
        stillness.see("loading")
        if _tell_finished(experiment):
            return
        hold_folder(experiment.run_dir, stack)
        if _export_alone(experiment, stop, stack, stillness):
            return
        loop = _own_functions(experiment.learner)
        try:
            flow = _assemble(experiment, stop, connect, open_sender, stack)
        except Abandoned as why:
            logger.info("%s", why)
            return
        flow.open()
        logger.info("the learner is up at step %d", flow.version)
        try:
            loop(flow)
            flow.check_returned()
        except Abandoned as why:
            logger.info("%s", why)
            flow.abandon()
        flow.close()
        if flow.interrupted:
            logger.info("stopped after step %d: the same command goes on from there", flow.version)
            return
        learner = experiment.learner
        if flow.data_ended:
            _tell_data_end(Path(experiment.run_dir), flow)
        if learner.checkpoint.export:
            stillness.see("exporting")
            export_value(experiment, flow.updater.value_state)
            export(experiment, flow.trainable)
            stillness.end()
        # Of the model before the buffer is told: while it evaluates, this may be killed, and it end.
        _tell_end(experiment, flow, over=False)
        if flow.finish():
            _tell_end(experiment, flow, over=True)
        logger.info("finished after step %d", flow.version)


def hold_folder(run_dir: str, stack: ExitStack) -> None:
    """Keep every other learner out of it, until the stack ends. Collective.

    Raises:
        FolderInUse: One is at work there.
    """
    refused: FolderInUse | None = None
    if parallel.rank() == 0:
        try:
            stack.callback(RunLock(Path(run_dir), "learner").release)
        except FolderInUse as error:
            refused = error
    if collectives.broadcast_numbers([refused is not None])[0]:
        raise refused or FolderInUse(f"{run_dir}: in use by another learner, as rank 0 says")


def _tell_finished(experiment: LearnerExperiment) -> bool:
    """Whether the run is over, on all ranks: there is nobody then to wait for."""
    (step,) = collectives.broadcast_numbers([ending.finished_step(experiment) if parallel.rank() == 0 else 0])
    if step and parallel.rank() == 0:
        enough = step >= experiment.learner.steps
        more = f"learner.steps (such as learner.steps={2 * step})" if enough else "data.epochs"
        logger.info(
            "%s is finished, with step %d; to train on, raise %s, to start afresh, take another run_dir",
            experiment.run_dir, step, more,
        )  # fmt: skip
    return bool(step)


def _export_alone(
    experiment: LearnerExperiment, stop: StopFlag, stack: ExitStack, stillness: Stillness
) -> bool:
    """Export the model of a run that is over but for that: there is no buffer to wait for then.

    Returns:
        Whether it is such a run, on all ranks.

    Raises:
        ValueError: The checkpoint of its last step is not whole.
    """
    asked = ending.unexported_step(experiment) if parallel.rank() == 0 else 0
    (step,) = collectives.broadcast_numbers([asked])
    if not step:
        return False
    trained = _trained(experiment, stop, stack)
    run_dir = Path(experiment.run_dir)
    if trained.checkpoints.resume(trained.policy, trained.value) != step:
        raise ValueError(
            f"{run_dir}: the run is over and its model is to be exported, but the checkpoint of step {step} "
            "is damaged; restore it, or raise learner.steps to train on from the one before"
        )
    stillness.see("exporting")
    export_value(experiment, trained.value)
    export(experiment, trained.policy)
    stillness.end()
    end = ending.read(run_dir)
    if parallel.rank() == 0 and end is not None:
        ending.write(run_dir, replace(end, exported=True))
    logger.info("exported the model of step %d, with which the run was finished", step)
    return True


def _tell_end(experiment: LearnerExperiment, flow: Flow, over: bool) -> None:
    """
    Args:
        over: Whether the buffer said that it is, which ends with the last evaluation.
    """
    if parallel.rank() == 0:
        end = ending.End(
            step=flow.version,
            evaluated=over and experiment.eval is not None,
            exported=experiment.learner.checkpoint.export,
            epochs=experiment.data.epochs if flow.data_ended else None,
            over=over,
        )
        ending.write(Path(experiment.run_dir), end)


def _tell_data_end(run_dir: Path, flow: Flow) -> None:
    """For whoever expects `learner.steps` of them."""
    if parallel.rank() == 0:
        write_whole(run_dir / DATA_END, json.dumps({"step": flow.version}))
        logger.info("the data ended after %d of %d steps", flow.version, flow.steps)


def _own_functions(learner: LearnerConfig) -> Callable[[Flow], object]:
    """The loop; the user's functions are imported now, and not only when they are called.

    Raises:
        ValueError: One cannot be.
    """
    for path in (learner.algorithm.advantage, learner.algorithm.loss):
        if is_dotted(path):
            resolve(path)
    if learner.idle_s is not None:
        return sleep_through
    return resolve(learner.loop) if learner.loop else train


def _assemble(
    experiment: LearnerExperiment,
    stop: StopFlag,
    connect: Connect,
    open_sender: OpenSender,
    stack: ExitStack,
) -> Flow:
    learner, run_dir = experiment.learner, Path(experiment.run_dir)
    if parallel.dp_size() > experiment.buffer.groups_per_batch:
        raise ValueError(
            f"{parallel.dp_size()} data-parallel ranks share buffer.groups_per_batch="
            f"{experiment.buffer.groups_per_batch} groups; expected at least one group each"
        )
    if parallel.rank() == 0:
        warn_of_warmup(learner.optimizer, learner.steps)
    # The data is opened before the model: a mistake in it is told at once.
    texts = _texts(experiment)
    trained = _trained(experiment, stop, stack)
    trainable, checkpoints = trained.policy, trained.checkpoints
    reference = _reference(experiment, trainable, trained.start, stop, stack)
    updater = Updater(experiment, trainable, reference, trained.critic, texts)
    version = checkpoints.resume(trainable, trained.value)
    if version:
        updater.restore(checkpoints.position(version))
    is_source = parallel.rank() == parallel.model_parallel_source()
    to_buffer = BufferLine(lambda: connect(experiment), lambda: stop.is_set)
    line = stack.enter_context(to_buffer) if is_source else None
    is_first = parallel.rank() == 0
    sender: WeightSender | None = stack.enter_context(open_sender(experiment)) if is_first else None
    feed = Feed(line, learner.batch_timeout_s, bounds_of(experiment.model))
    publishing = Publishing(trainable.model.module, sender, line, experiment.sync.join_timeout_s)
    stack.callback(publishing.close)
    journal = Journal(run_dir, experiment.logging.tensorboard, version) if is_first else None
    counted = sender.counted if sender is not None else dict[str, float]
    reporter = Reporter(journal, experiment, counted, feed.wasted)
    stack.callback(reporter.close)
    return Flow(experiment, trainable, updater, feed, publishing, checkpoints, reporter, stop, version)


@dataclass(frozen=True)
class _Trained:
    """What a run trains, and what holds it."""

    policy: Trainable
    critic: ValueModel | None
    checkpoints: Checkpoints
    start: str
    """Fingerprint of the weights that the policy starts from."""

    @property
    def value(self) -> ValueState | None:
        """What the checkpoints hold of the value model."""
        return self.critic.state if self.critic is not None else None


def _trained(experiment: LearnerExperiment, stop: StopFlag, stack: ExitStack) -> _Trained:
    """As at the run's start; what a checkpoint holds is still to be read.

    Raises:
        ValueError: What `check_start` refuses, and `build_model`.
    """
    check_start(experiment)
    learner = experiment.learner
    policy = build(experiment, learner.lora)
    trainable = make_trainable(policy, learner.optimizer, learner.parallel, learner.ema)
    critic = _critic(experiment, stop, stack)
    start = fingerprint(experiment.model, learner.init_from)
    setup = checkpoint_setup(experiment, start)
    checkpoints = Checkpoints(Path(experiment.run_dir), learner.checkpoint.keep, setup)
    return _Trained(trainable, critic, checkpoints, start)


def check_start(experiment: LearnerExperiment | OfflineExperiment) -> None:
    """What can be told before the weights are read.

    Raises:
        ValueError: A setting is for models with experts and this is none, sequences go beyond its window, or
            the checkpoint that the weights are to start from is damaged.
    """
    learner, path = experiment.learner, experiment.model.path
    family = families.read(path, families.own_head(path))
    family.check_length(experiment.model.max_length)
    if learner.expert_balance and family.mixture is None:
        raise ValueError(
            f"learner.expert_balance={learner.expert_balance:g} would do nothing: {family.architecture} has "
            "no experts; remove it"
        )
    if learner.init_from:
        checkpoint.check_start(Path(learner.init_from))
        if parallel.rank() == 0:
            logger.info("the weights start from %s", learner.init_from)


def _texts(experiment: LearnerExperiment) -> Texts | None:
    """What is mixed into reinforcement learning, where the configuration says so."""
    ptx = experiment.learner.ptx
    if ptx is None:
        return None
    data = DataConfig(train=ptx.data, on_bad_row=ptx.on_bad_row)
    rows = open_stream(data, experiment.seed, "pretraining")
    check_shared(rows, "learner.ptx.data")
    tokenizer = load_tokenizer("model.path", experiment.model.path)
    budget = experiment.learner.tokens_per_microbatch
    bounds = bounds_of(experiment.model)
    return Texts(ptx, rows, tokenizer, experiment.model.max_length, budget, bounds.vocabulary)


def build(
    experiment: LearnerExperiment | OfflineExperiment,
    adapters: LoraConfig | None = None,
    head: Head = "vocabulary",
) -> Any:
    """The model that a training job starts from, on its ranks."""
    # Megatron is imported late: the CPU backend is in place by now.
    from learner.model import build_model

    learner = experiment.learner
    dtype = getattr(torch, experiment.model.dtype)
    return build_model(
        experiment.model.path,
        learner.parallel,
        dtype,
        learner.recompute,
        learner.init_from,
        head=head,
        adapters=adapters,
    )


def _reference(
    experiment: LearnerExperiment, policy: Trainable, weights: str, stop: StopFlag, stack: ExitStack
) -> ReferenceModel | None:
    """The initial policy, frozen, here or on ranks of its own; None when the loss does not look at it."""
    of = experiment.learner.reference
    if not experiment.learner.algorithm.needs_reference:
        return None
    if of is None:
        return reference_of(policy, experiment.learner, lambda: build(experiment))

    def connect() -> ApartClient:
        keys = client_keys(experiment.security.keys, "learner", "reference")
        name = f"learner-{parallel.dp_rank()}"
        return ApartClient(REFERENCE, of.address, experiment.name, weights, name, of.timeout_s, keys)

    line = stack.enter_context(Line[ApartClient](connect)) if asks() else None
    return ReferenceRanks(line, lambda: stop.is_set)


def reference_of(policy: Trainable, learner: TrainingConfig, build: Callable[[], Any]) -> Reference:
    """Of adapters the policy without them; otherwise a second model, which `build` makes."""
    from megatron.core.utils import get_model_config

    if learner.lora is not None:
        return Reference(policy.model, is_policy=True)
    model = build().requires_grad_(False)
    prepare_schedule(get_model_config(model))
    return Reference(model)


def value_model(experiment: LearnerExperiment, layout: ParallelConfig) -> Critic:
    """The value model on this job's ranks, as the run starts with it."""
    from learner.model import build_model

    learner, of = experiment.learner, experiment.learner.value
    assert of is not None
    family = families.read(of.path, "score")
    family.check_length(experiment.model.max_length)
    if of.lora is not None:
        family.check_adapters(of.lora, "learner.value.lora")
    dtype = getattr(torch, experiment.model.dtype)
    model = build_model(of.path, layout, dtype, learner.recompute, head="score", adapters=of.lora)
    return Critic(of, make_trainable(model, of.optimizer, layout), learner.steps)


def _critic(experiment: LearnerExperiment, stop: StopFlag, stack: ExitStack) -> ValueModel | None:
    """The value model, here or on ranks of its own, where the advantage needs one.

    Raises:
        ValueError: It knows fewer tokens than the policy, beside what `build_model` refuses.
    """
    learner, of = experiment.learner, experiment.learner.value
    if of is None:
        return None
    known, needed = families.read(of.path, "score").vocab, families.read(experiment.model.path).vocab
    if known < needed:
        raise ValueError(
            f"learner.value.path={of.path}: its vocabulary has {known} tokens and the policy's "
            f"{needed}; expected a model with the policy's tokenizer"
        )
    if of.ranks is None:
        return value_model(experiment, learner.parallel)
    apart, about = of.ranks, start_of_value(experiment)

    def connect() -> ValueClient:
        keys = client_keys(experiment.security.keys, "learner", "value")
        name = f"learner-{parallel.dp_rank()}"
        return ValueClient(VALUE, apart.address, experiment.name, about, name, apart.timeout_s, keys)

    line = stack.enter_context(Line[ValueClient](connect)) if asks() else None
    # Of this start of the learner, the same on all ranks.
    session = collectives.broadcast_numbers([secrets.randbits(62)])[0]
    return CriticRanks(of, line, lambda: stop.is_set, f"{session:016x}", learner.steps)


def export(experiment: LearnerExperiment | OfflineExperiment, trainable: Trainable) -> None:
    """Write the trained model, and the average of its weights where there is one, as Hugging Face folders;
    of adapters also them alone."""
    run_dir, source, model = Path(experiment.run_dir), experiment.model.path, trainable.model.module
    convert.save_hf(model, source, run_dir / "model")
    if (adapters := experiment.learner.lora) is not None:
        convert.save_adapter(model, adapters, source, run_dir / "adapter")
    if trainable.ema is not None:
        with trainable.ema.in_place():
            convert.save_hf(model, source, run_dir / "ema_model")


def export_value(experiment: LearnerExperiment, value: ValueState | None) -> None:
    """Write the trained value model, where there is one, as a Hugging Face folder."""
    of = experiment.learner.value
    if isinstance(value, Trainable) and of is not None:
        convert.save_hf(value.model.module, of.path, Path(experiment.run_dir) / "value_model")
    elif isinstance(value, CriticRanks):
        value.export()


def checkpoint_setup(experiment: LearnerExperiment | OfflineExperiment, start: str | None = None) -> Setup:
    """What this run's checkpoints agree with.

    Args:
        start: Fingerprint of the weights that the run starts from, where a resume is to compare them.
    """
    learner = experiment.learner
    layout = learner.parallel
    value = learner.value if isinstance(learner, LearnerConfig) else None
    stage = experiment.stage if isinstance(experiment, OfflineExperiment) else None
    port = {"address"}  # a free one may be another at each start: that changes nothing
    told = experiment.model_dump_json(
        include={"model", "data", "stage", "buffer", "learner", "seed"},
        exclude={"buffer": port, "learner": {"reference": port, "value": {"ranks": port}}},
    )
    return Setup(
        dtype=experiment.model.dtype,
        distributed_optimizer=layout.distributed_optimizer,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        data=parallel.dp_size(),
        config_digest=hashlib.blake2b(told.encode(), digest_size=16).hexdigest(),
        model=experiment.model.path,
        lora=learner.lora.model_dump(mode="json") if learner.lora is not None else None,
        init_from=learner.init_from,
        value_model=value.path if value is not None else None,
        value_lora=value.lora.model_dump(mode="json") if value is not None and value.lora else None,
        value_start=start_below_adapters(experiment),
        value_distributed_optimizer=sharded_apart(value),
        start=start,
        needs_start=measures_from_start(learner, stage),
        shape=shape_of(experiment.model.path),
    )


def start_below_adapters(experiment: LearnerExperiment | OfflineExperiment) -> str | None:
    """Fingerprint of the weights that a value model's adapters are trained on, where it has any."""
    value = experiment.learner.value if isinstance(experiment.learner, LearnerConfig) else None
    if value is None or value.lora is None:
        return None
    return weights_of_value(value.path, experiment.model)


def threads(configured: int | None) -> int:
    """Of this rank: as configured, or an equal part of the cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    return configured or max(1, cores // here)


def buffer_client(experiment: LearnerExperiment) -> BufferClient:
    keys = client_keys(experiment.security.keys, "learner", "buffer")
    name = f"learner-{parallel.dp_rank()}"
    return BufferClient(experiment.buffer.address, "learner", experiment.name, name, FOR_EVER, keys)


@contextmanager
def publisher(experiment: LearnerExperiment) -> Iterator[WeightSender]:
    keys = server_keys(experiment.security.keys, "learner")
    opened = Publisher(experiment.sync, experiment.name, parallel.device(), keys)
    opened.start()
    try:
        yield opened
    finally:
        opened.close()
