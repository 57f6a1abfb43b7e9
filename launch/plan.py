"""What an experiment takes in memory on every rank, and whether it fits: arithmetic on config.json, no torch.

    slipstream plan CONFIG --devices 8 --device-gib 80

Rank kinds: the learner's pipeline stages (global rank 0 apart, because it publishes), those of a reference
and of a value model on ranks of their own, and the engine ranks of scorers and of rollout servers.
`launch/plan_stages.py` plans offline stages and pipelines by the same arithmetic.
"""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from launch.experiment import WholeExperiment, read, reward_models
from launch.model_folder import unserved_on_cpu
from learner import budget, families
from learner.budget import Machine, MicroBatch
from learner.config import ParallelConfig, TrainingConfig, ValueConfig
from learner.families import Family
from learner.offline.config import OfflineExperiment
from rollout.config import EngineConfig, PredictionExperiment, runs_on_cpu
from rollout.scorer.folder import longest

GIB = 1 << 30
WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
RUNTIME_GIB = {"gpu": 2.0, "cpu": 0.8}
"""Assumed for what no formula tells: CUDA context, NCCL's buffers and the allocator's gaps; or libraries."""
BUCKET_MIB = {"gpu": 512, "cpu": 64}
"""As in sync/publisher.py where sync.bucket_mib is null."""
BUCKETS_IN_FLIGHT = 2
VLLM_BATCHED_TOKENS = 8192
"""Tokens of vLLM's largest forward pass, for its activations; an estimate."""
VLLM_VOCAB_MULTIPLE = 64
LINKS_GBIT = (10, 25, 100, 200, 400)


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold equally much."""

    name: str
    ranks: int
    held: dict[str, float]
    """Bytes on the device for as long as the run lasts, by what they are for."""
    moments: dict[str, dict[str, float]] = field(default_factory=dict)
    """What comes on top at times, one at a time: the largest counts."""
    host: dict[str, float] = field(default_factory=dict)
    """Bytes on the host beside a GPU."""
    notes: tuple[str, ...] = ()
    impossible: str | None = None
    """Why it could not even start."""

    @property
    def peak(self) -> str | None:
        """The moment at which most is taken."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()), default=None)

    @property
    def total(self) -> float:
        moment = sum(self.moments[self.peak].values()) if self.peak else 0.0
        return sum(self.held.values()) + moment


@dataclass(frozen=True, slots=True)
class Target:
    """What the experiment is to run on."""

    gpu: bool = True
    devices: int | None = None
    """How many there are; None only says how many are needed."""
    device_gib: float = 80.0
    """Of one GPU; on CPU of the machine, which every rank shares."""

    @classmethod
    def of(cls, gpu: bool, devices: int | None, device_gib: float | None) -> "Target":
        """With 80 GiB a GPU, or what this machine has, where nobody says how much."""
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return cls(gpu, devices, device_gib or (80.0 if gpu else round(own, 1)))


@dataclass(frozen=True, slots=True)
class Plan:
    experiment: WholeExperiment | OfflineExperiment | PredictionExperiment
    family: Family
    target: Target
    kinds: tuple[RankKind, ...]

    @property
    def devices(self) -> int:
        return sum(kind.ranks for kind in self.kinds)

    @property
    def total(self) -> float:
        """Bytes of all ranks, which on CPU share one memory."""
        return sum(kind.total * kind.ranks for kind in self.kinds)

    @property
    def server_host_bytes(self) -> float:
        """On the host of one rollout server, for all its engine ranks; 0 where there is none."""
        if not isinstance(self.experiment, WholeExperiment):
            return 0.0
        engine = self.experiment.rollout.engine
        return sum(self.kinds[-1].host.values()) * engine.tensor_parallel * engine.pipeline_parallel

    @property
    def model_bytes(self) -> int:
        """Of one version as it is published."""
        return budget.whole_parameters(self.family) * WEIGHT_BYTES[self.experiment.model.dtype]

    def publish_seconds(self) -> dict[int, float]:
        """By the sender's link in Gbit/s: a broadcast carries every byte over it once. Of what publishes."""
        if not isinstance(self.experiment, WholeExperiment):
            return {}
        return {gbit: self.model_bytes * 8 / (gbit * 1e9) for gbit in LINKS_GBIT}

    def reasons(self) -> list[str]:
        """Why it does not fit; nothing if it does."""
        target, limit = self.target, self.target.device_gib * GIB
        found = [f"{kind.name}: {kind.impossible}" for kind in self.kinds if kind.impossible]
        if target.gpu:
            # Of ranks of one job the largest speaks for all that are too large.
            largest: dict[str, RankKind] = {}
            for kind in sorted(self.kinds, key=lambda kind: kind.total):
                if kind.total > limit:
                    largest[kind.name.partition(",")[0]] = kind
            found += [
                f"{kind.name} takes {kind.total / GIB:.1f} GiB of {target.device_gib:g}"
                for kind in self.kinds
                if kind in largest.values()
            ]
            if target.devices is not None and self.devices > target.devices:
                found.append(f"{self.devices} devices are needed, {target.devices} are there")
        elif self.total > limit:
            found.append(f"all ranks take {self.total / GIB:.1f} GiB of the machine's {target.device_gib:g}")
        return found


def plan(config: Path, overrides: list[str], target: Target) -> Plan:
    """Read an experiment and plan it; of its model, its value model and its reward models only config.json
    must exist here.

    Raises:
        ConfigError: A mistake in the experiment.
        ValueError: The model is not supported, or the layout does not fit it.
    """
    experiment = read(config, overrides, [])
    family = families.read(experiment.model.path)
    return of(experiment, family, target)


def of(experiment: WholeExperiment, family: Family, target: Target) -> Plan:
    """The plan of an experiment that was read already."""
    family.check_layout(experiment.learner.parallel)
    family.check_length(experiment.model.max_length)
    if (value := experiment.learner.value) is not None:
        of, key = (value.ranks, value.ranks.KEY) if value.ranks else (experiment.learner, "learner")
        families.read(value.path, "score").check_layout(of.parallel, f"{key}.parallel")
    if (reference := experiment.learner.reference) is not None:
        family.check_layout(reference.parallel, "learner.reference.parallel")
    servers = (*scorers(experiment, target), _server(experiment, family, target))
    apart = (*_reference(experiment, family, target), *_value(experiment, target))
    kinds = (*_learner(experiment, family, target), *apart, *servers)
    return Plan(experiment, family, target, kinds)


@dataclass(frozen=True, slots=True)
class Training:
    """What the ranks of a training job hold and compute on."""

    family: Family
    learner: TrainingConfig
    machine: Machine
    batches: tuple[MicroBatch, ...]
    """Of those the one that takes most counts."""
    reference: bool = False
    """Whether the frozen reference is on the same ranks."""
    value: "Training | None" = None
    """PPO's value model on the same ranks."""
    called: str = "learner"


def machine_of(experiment: WholeExperiment | OfflineExperiment, gpu: bool) -> Machine:
    weight = WEIGHT_BYTES[experiment.model.dtype]
    # `layers.compute_dtype`: on CPU as if it had no bfloat16 instructions, the larger of the two.
    return Machine(gpu, weight, weight if gpu else budget.FLOAT32)


def micro_batch_of(experiment: WholeExperiment) -> MicroBatch:
    length, completion = experiment.model.max_length, experiment.rollout.sampling.max_tokens
    size, tokens = experiment.rollout.group_size, experiment.learner.tokens_per_microbatch
    if experiment.learner.algorithm.loss == "dpo":
        # Its pairs need a group whole, however long.
        tokens = max(tokens, length + (size - 1) * completion)
    return budget.largest_micro_batch(length, completion, size, tokens)


def _learner(experiment: WholeExperiment, family: Family, target: Target) -> list[RankKind]:
    learner = experiment.learner
    batches = [micro_batch_of(experiment)]
    if learner.ptx is not None:
        # Texts of the longest length: every token is a target but each one's first.
        longest = max(learner.tokens_per_microbatch, experiment.model.max_length)
        batches.append(MicroBatch(longest, longest, 0, longest))
    here = learner.algorithm.needs_reference and learner.lora is None and learner.reference is None
    of = learner.value
    value = None
    if of is not None and of.ranks is None:
        value = _value_training(experiment, of, learner.processes, learner.parallel, target)
    job = Training(family, learner, machine_of(experiment, target.gpu), tuple(batches), here, value)
    return training(job, _publishing(experiment, family, target.gpu))


@dataclass(frozen=True, slots=True)
class Publishing:
    """Bytes that global rank 0 takes to publish: from the first time on, and each time on top."""

    held: dict[str, float]
    moment: dict[str, float]


def training(job: Training, publishing: Publishing | None = None) -> list[RankKind]:
    """The ranks of a training job, stage by stage.

    Args:
        publishing: What global rank 0 takes to publish; None for a job that does not.
    """
    pipeline = job.learner.parallel.pipeline
    per_stage = job.learner.processes // pipeline
    name = _stage_name(job, 0)
    kinds = [_stage(job, 0, name, per_stage - (publishing is not None))]
    if publishing is not None:
        first = f"{name}, rank 0" if per_stage > 1 else name
        kinds.insert(0, _stage(job, 0, first, 1, publishing))
    # Of middle stages with equally many layers the first keeps most micro-batches; all count as that one.
    layers = partial(budget.layers_of, job.family, job.learner.parallel)
    for _, stages in groupby(range(1, pipeline - 1), layers):
        alike = [*stages]
        kinds.append(_stage(job, alike[0], _stage_name(job, alike[0], alike[-1]), per_stage * len(alike)))
    if pipeline > 1:
        kinds.append(_stage(job, pipeline - 1, _stage_name(job, pipeline - 1), per_stage))
    return [kind for kind in kinds if kind.ranks]


def _stage_name(job: Training, first: int, last: int = 0) -> str:
    pipeline = job.learner.parallel.pipeline
    if last > first:
        return f"{job.called} stages {first + 1} to {last + 1}"
    return f"{job.called} stage {first + 1} of {pipeline}" if pipeline > 1 else job.called


def _stage(
    job: Training, stage: int, name: str, ranks: int, publishing: Publishing | None = None
) -> RankKind:
    family, learner, machine = job.family, job.learner, job.machine
    layout = learner.parallel
    held, parts = _trained(job, stage)
    optimizer, saved = held["optimizer"], held.get("adapters", held["weights"])
    if learner.ema is not None:
        held["average (EMA)"] = sum(number * budget.FLOAT32 / sharing for number, sharing in parts)
    if job.reference:
        held["reference model"] = held["weights"]
    gathered = [budget.gathered_optimizer_bytes(parts, machine.gpu)]
    if (value := job.value) is not None:
        of_value, parts_of_value = _trained(value, stage)
        held["value model"] = sum(of_value.values())
        gathered.append(budget.gathered_optimizer_bytes(parts_of_value, machine.gpu))
    held["runtime (assumed)"] = RUNTIME_GIB["gpu" if machine.gpu else "cpu"] * GIB
    taken = [budget.stage_activations(family, learner, stage, batch, machine) for batch in job.batches]
    most = max(taken, key=lambda items: sum(items.values()))
    moments = {"training": {k: float(v) for k, v in most.items()}}
    if value is not None:
        values = budget.stage_activations(value.family, value.learner, stage, value.batches[0], machine)
        moments["training of the value model"] = {k: float(v) for k, v in values.items()}
    if publishing is not None:
        held |= publishing.held
        moments["publishing"] = publishing.moment
    # A checkpoint is copied to the host before it is written; there, what is a part of a larger tensor is.
    host = {"checkpoint": saved + optimizer} if machine.gpu else {}
    if not machine.gpu:
        models = [job] if value is None else [job, value]
        moments["checkpoint"] = {"copies of gate and up": max(_gate_and_up(of, stage) for of in models)}
    if layout.distributed_optimizer:
        on_device, beside = max(gathered)
        moments["checkpoint"] = moments.get("checkpoint", {}) | {"gathered optimizer": on_device}
        host = {"checkpoint": saved + beside} if machine.gpu else {}
    return RankKind(name, ranks, held, moments, host)


def _gate_and_up(job: Training, stage: int) -> float:
    """Bytes of the projections that lie joined, and of their optimizer's state: a checkpoint has each apart.
    That of adapters has none."""
    if job.learner.lora is not None:
        return 0.0
    count = budget.joined_parameters(job.family, job.learner.parallel, stage)
    weight = job.machine.weight_bytes
    return float(count * weight + budget.optimizer_bytes(count, weight, 1))


def _trained(job: Training, stage: int) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """Bytes of one rank for a model that is trained, and its optimizers as `_optimizers` has them."""
    family, learner, machine = job.family, job.learner, job.machine
    count = trained = budget.parameters(family, learner.parallel, stage)
    parts = _optimizers(family, learner, stage)
    held = {"weights": float(count * machine.weight_bytes)}
    if learner.lora is not None:
        trained = budget.adapter_parameters(family, learner.lora, learner.parallel, stage)
        parts = _shared([(trained, _copies(learner))], learner)
        held["adapters"] = float(trained * machine.weight_bytes)
    held |= {"gradients": float(trained * budget.FLOAT32), "optimizer": _optimizer_bytes(parts, machine)}
    return held, parts


def _reference(experiment: WholeExperiment, family: Family, target: Target) -> list[RankKind]:
    """Ranks of its own of the frozen reference, stage by stage: weights, and passes without gradients."""
    of, machine = experiment.learner.reference, machine_of(experiment, target.gpu)
    if of is None:
        return []
    layout, batch = of.parallel, micro_batch_of(experiment)
    kinds: list[RankKind] = []
    for stage in range(layout.pipeline):
        last = stage == layout.pipeline - 1
        taken = budget.forward_bytes(family, layout.tensor, last, batch, machine)
        held = {
            "weights": float(budget.parameters(family, layout, stage) * machine.weight_bytes),
            "runtime (assumed)": RUNTIME_GIB["gpu" if target.gpu else "cpu"] * GIB,
        }
        name = f"reference stage {stage + 1} of {layout.pipeline}" if layout.pipeline > 1 else "reference"
        moments = {"forward pass": {item: float(size) for item, size in taken.items()}}
        kinds.append(RankKind(name, of.processes // layout.pipeline, held, moments))
    return kinds


def _value(experiment: WholeExperiment, target: Target) -> list[RankKind]:
    """Ranks of its own of PPO's value model: all that training it takes, and nothing of the policy."""
    value = experiment.learner.value
    if value is None or value.ranks is None:
        return []
    return training(_value_training(experiment, value, value.ranks.processes, value.ranks.parallel, target))


def _value_training(
    experiment: WholeExperiment, value: ValueConfig, processes: int, layout: ParallelConfig, target: Target
) -> Training:
    """Of a value model in a layout. It has adapters of its own or none, whatever the policy has, and no
    average is kept of it."""
    changes = {"processes": processes, "parallel": layout, "lora": value.lora, "ema": None}
    family, machine = families.read(value.path, "score"), machine_of(experiment, target.gpu)
    job = experiment.learner.model_copy(update=changes)
    return Training(family, job, machine, (micro_batch_of(experiment),), called="value model")


def _optimizers(family: Family, learner: TrainingConfig, stage: int) -> list[tuple[int, int]]:
    """Weights of each of Megatron's optimizers on one rank, and how many ranks share its state.

    Experts have their own: a rank's are copied on those ranks of its stage alone that hold the same ones.
    """
    layout = learner.parallel
    count, experts = (of(family, layout, stage) for of in (budget.parameters, budget.expert_parameters))
    parts = [(count - experts, _copies(learner))]
    if experts:
        parts.append((experts, learner.processes // layout.pipeline // layout.expert))
    return _shared(parts, learner)


def _copies(learner: TrainingConfig) -> int:
    """Data-parallel ranks."""
    return learner.processes // learner.parallel.pipeline // learner.parallel.tensor


def _shared(parts: list[tuple[int, int]], learner: TrainingConfig) -> list[tuple[int, int]]:
    return parts if learner.parallel.distributed_optimizer else [(weights, 1) for weights, _ in parts]


def _optimizer_bytes(parts: list[tuple[int, int]], machine: Machine) -> float:
    return sum(budget.optimizer_bytes(count, machine.weight_bytes, ranks) for count, ranks in parts)


def _publishing(experiment: WholeExperiment, family: Family, gpu: bool) -> Publishing:
    """On global rank 0: bucket buffers, and one parameter gathered from its shards and joined; on one machine
    without GPUs in place of buffers a whole version, which the servers read where it lies."""
    size = WEIGHT_BYTES[experiment.model.dtype]
    layout = experiment.learner.parallel
    largest = family.hidden * max(family.vocab, 2 * family.ffn) * size
    copies = 2 if layout.tensor * layout.pipeline * layout.expert > 1 else 1
    gathered = {"gathered tensor": float(copies * largest)}
    if not gpu and experiment.sync.shared_memory:
        return Publishing({"published version": float(budget.whole_parameters(family) * size)}, gathered)
    buckets = float(BUCKETS_IN_FLIGHT * _bucket_bytes(experiment, gpu))
    return Publishing({}, {"publish buckets": buckets} | gathered)


def _bucket_bytes(experiment: WholeExperiment, gpu: bool) -> int:
    return (experiment.sync.bucket_mib or BUCKET_MIB["gpu" if gpu else "cpu"]) << 20


def server_parameters(family: Family, engine: EngineConfig) -> int:
    """Of vLLM's fullest rank: the vocabulary padded to 64, key-value heads never cut below one, layers of the
    longest stage, and on one pipeline rank or more the embedding or the output layer, as tables go."""
    tensor, pipeline = engine.tensor_parallel, engine.pipeline_parallel
    head = family.head_dim * family.hidden
    kv_heads = max(1, family.kv_heads // tensor)
    attention = 2 * head * family.heads // tensor + 2 * head * kv_heads
    mlps = 3 * family.hidden * family.ffn // tensor
    if family.mixture is not None:
        # Unless told otherwise vLLM cuts every expert, and keeps routers whole.
        mlps = family.mixture.experts * (mlps + family.hidden)
    layer = attention + mlps + 2 * family.hidden
    multiple = VLLM_VOCAB_MULTIPLE
    table = -(-family.vocab // multiple) * multiple * family.hidden // tensor
    # A reward model has a row in the place of its output layer.
    tables = 1 if family.tied or pipeline > 1 or family.head == "score" else 2
    return layer * -(-family.layers // pipeline) + tables * table + family.hidden


def kv_bytes_per_token(family: Family, engine: EngineConfig, element_bytes: int) -> int:
    """Keys and values of one token on one engine rank: 2 · layers · heads · head size."""
    heads = max(1, family.kv_heads // engine.tensor_parallel)
    return 2 * -(-family.layers // engine.pipeline_parallel) * heads * family.head_dim * element_bytes


def _server(experiment: WholeExperiment, family: Family, target: Target) -> RankKind:
    engine, length = experiment.rollout.engine, experiment.model.max_length
    size = WEIGHT_BYTES[experiment.model.dtype]
    kind = engine_ranks(
        "rollout server rank", experiment.rollout.servers, family, engine, size, length, target
    )
    staging = float(budget.whole_parameters(family) * size)
    if target.gpu:
        landing = {"landing bucket": float(_bucket_bytes(experiment, True))}
        return replace(kind, held=kind.held | landing, host={"staging (pinned)": staging})
    return replace(kind, held=kind.held | {"staging": staging})


def scorers(experiment: WholeExperiment | PredictionExperiment, target: Target) -> list[RankKind]:
    """One engine of each reward model; nothing is published to it."""
    return [
        engine_ranks(
            f"scorer {name} rank",
            1,
            families.read(reward.model, "score"),
            reward.engine,
            WEIGHT_BYTES[reward.dtype],
            longest(experiment.model, reward),
            target,
        )
        for name, reward in reward_models(experiment).items()
    ]


def engine_ranks(
    name: str, engines: int, family: Family, engine: EngineConfig, size: int, length: int, target: Target
) -> RankKind:
    """Ranks of so many vLLMs that hold a model.

    Args:
        size: Bytes of a weight, and of a number in the cache.
        length: Longest sequence in tokens.
    """
    weights = float(server_parameters(family, engine) * size)
    forward = float(_forward_pass(family, engine, size))
    held = {"weights": weights, "forward pass (estimate)": forward}
    if target.gpu:
        # vLLM gives its cache whatever its share of the device leaves.
        cache = engine.gpu_memory_utilization * target.device_gib * GIB - weights - forward
        held["KV cache"] = max(0.0, cache)
    else:
        cache = engine.kv_cache_gib * GIB
        held |= {"KV cache": cache, "runtime (assumed)": RUNTIME_GIB["cpu"] * GIB}
    tokens = int(max(0.0, cache) // kv_bytes_per_token(family, engine, size))
    at_once = tokens // length
    notes = (f"{tokens:,} tokens of KV cache, {at_once} sequences of {length} at once",)
    impossible = None
    if family.heads % engine.tensor_parallel:
        impossible = f"{family.heads} attention heads do not divide by {engine.tensor_parallel}"
    elif family.kv_heads % engine.tensor_parallel and engine.tensor_parallel % family.kv_heads:
        heads = f"its {family.kv_heads} key-value heads"
        impossible = f"{engine.tensor_parallel} ranks neither divide {heads} nor are a multiple of them"
    elif not target.gpu and not runs_on_cpu(engine):
        impossible = "vLLM's CPU build cannot serve with pipeline_parallel above 1 and enforce_eager"
    elif not target.gpu and (why := unserved_on_cpu(family.head_dim)):
        impossible = why
    elif at_once == 0:
        impossible = f"no room for the KV cache of one sequence of {length} tokens"
    ranks = engines * engine.tensor_parallel * engine.pipeline_parallel
    return RankKind(name, ranks, held, notes=notes, impossible=impossible)


def _forward_pass(family: Family, engine: EngineConfig, element_bytes: int) -> int:
    """Hidden states and the MLP's inner ones of the largest pass, or the logits of every sequence."""
    inner = 3 * family.ffn // engine.tensor_parallel
    if family.mixture is not None:
        inner = family.mixture.chosen * (inner + family.hidden)
    layer = VLLM_BATCHED_TOKENS * (4 * family.hidden + inner) * element_bytes
    if family.head == "score":
        return layer
    logits = engine.max_num_seqs * family.vocab * (element_bytes + 2 * budget.FLOAT32)
    return max(layer, logits)
