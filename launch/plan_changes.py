"""What to set when a plan does not fit: the least change that does, found by trying them."""

import itertools
from collections.abc import Iterator
from typing import Any

from launch.experiment import WholeExperiment
from launch.plan import Plan
from launch.plan_stages import of_experiment
from learner.offline.config import OfflineExperiment
from rollout.config import runs_on_cpu

MOST_TENSOR = 8
"""Tensor-parallel ranks talk in every layer: more than one host's are not proposed."""
MOST_TIMES = 64
"""By how many times the learner's ranks may grow."""

Settings = dict[str, Any]


def changes(plan: Plan) -> list[str]:
    """Overrides that make it fit, one line a service, each complete; then what they do not reach."""
    if not plan.reasons():
        return []
    found: list[str] = []
    settings: Settings = {}
    for part, tries in (("learner", _learner_tries(plan)), ("rollout server", _server_tries(plan))):
        if not _too_large(plan, part):
            continue
        best = next((s for s in tries if _fits(plan, s, part)), None)
        if best is None:
            found.append(f"{part}: no layout tried fits; take devices of more memory or a smaller model")
            continue
        settings |= best
        told = " ".join(f"{key}={_text(value)}" for key, value in best.items())
        takes = max(kind.total for kind in _kinds(_changed(plan, best), part))
        found.append(f"{part}: set {told}; its fullest rank then takes {takes / 2**30:.1f} GiB")
    return found + _devices(_changed(plan, settings))


def _kinds(plan: Plan, part: str) -> list[Any]:
    return [kind for kind in plan.kinds if kind.name.startswith(part)]


def _too_large(plan: Plan, part: str) -> bool:
    limit = plan.target.device_gib * 2**30
    kinds = _kinds(plan, part)
    if not kinds:
        return False
    if not plan.target.gpu:
        # One machine for all: what the other service takes is not there.
        limit -= sum(kind.total * kind.ranks for kind in plan.kinds if kind not in kinds)
        too_much = sum(kind.total * kind.ranks for kind in kinds) > limit
        return too_much or any(kind.impossible for kind in kinds)
    return any(kind.impossible or kind.total > limit for kind in kinds)


def _fits(plan: Plan, settings: Settings, part: str) -> bool:
    try:
        return not _too_large(_changed(plan, settings), part)
    except ValueError:  # another model of the experiment, PPO's value model say, cannot be cut this way
        return False


def _changed(plan: Plan, settings: Settings) -> Plan:
    fields = plan.experiment.model_dump()
    for key, value in settings.items():
        *path, last = key.split(".")
        section = fields
        for part in path:
            section = section[part]
        section[last] = value
    return of_experiment(type(plan.experiment).model_validate(fields), plan.target)


def _learner_tries(plan: Plan) -> Iterator[Settings]:
    """From the cheapest: recomputing costs a third more arithmetic, a split costs communication, devices cost
    money."""
    experiment, family = plan.experiment, plan.family
    if isinstance(experiment, WholeExperiment):
        learner, divided_by = experiment.learner, experiment.buffer.groups_per_batch
    elif isinstance(experiment, OfflineExperiment):
        learner, divided_by = experiment.learner, experiment.learner.batch_size
    else:
        return iter(())
    tensors = [n for n in family.tensor_sizes(MOST_TENSOR) if n >= learner.parallel.tensor]
    count = family.mixture.experts if family.mixture else 1
    experts = [n for n in range(learner.parallel.expert, count + 1) if count % n == 0]
    shortest = max(64, plan.experiment.model.max_length)
    budgets = [learner.tokens_per_microbatch]
    while budgets[-1] // 2 >= shortest:
        budgets.append(budgets[-1] // 2)
    times = [2**n for n in range(MOST_TIMES.bit_length()) if plan.target.gpu or n == 0]
    most = learner.processes * times[-1]
    pipelines = [n for n in range(learner.parallel.pipeline, family.layers + 1) if most % n == 0]
    tries: list[tuple[float, Settings]] = []
    for tensor, pipeline, expert, recompute, (halvings, budget), sharded, more in itertools.product(
        tensors, pipelines, experts, (False, True), enumerate(budgets), (False, True), times
    ):
        ranks = learner.processes * more
        wanted = {
            "learner.processes": (learner.processes, ranks),
            "learner.parallel.tensor": (learner.parallel.tensor, tensor),
            "learner.parallel.pipeline": (learner.parallel.pipeline, pipeline),
            "learner.parallel.expert": (learner.parallel.expert, expert),
            "learner.parallel.distributed_optimizer": (learner.parallel.distributed_optimizer, sharded),
            "learner.recompute": (learner.recompute, recompute),
            "learner.tokens_per_microbatch": (learner.tokens_per_microbatch, budget),
        }
        turned_off = (learner.recompute, learner.parallel.distributed_optimizer) > (recompute, sharded)
        copies = ranks // (tensor * pipeline)
        divided = not ranks % (tensor * pipeline) and not ranks // pipeline % expert
        if not divided or turned_off or copies > divided_by:
            continue
        splits = 3.0 * (tensor / learner.parallel.tensor - 1) + 4.0 * (
            pipeline / learner.parallel.pipeline - 1
        )
        splits += 0.25 * (expert / learner.parallel.expert - 1)
        cost = 2.0 * recompute + halvings + 0.5 * sharded + splits + 20.0 * (more.bit_length() - 1)
        tries.append((cost, {key: new for key, (old, new) in wanted.items() if new != old}))
    return (settings for _, settings in sorted(tries, key=lambda one: one[0]))


def _server_tries(plan: Plan) -> Iterator[Settings]:
    if not isinstance(plan.experiment, WholeExperiment):
        return
    engine = plan.experiment.rollout.engine
    for ranks in (1, 2, 4, 8, 16, 32):
        tensor, pipeline = min(ranks, MOST_TENSOR), max(1, ranks // MOST_TENSOR)
        if ranks > engine.tensor_parallel * engine.pipeline_parallel and plan.target.gpu:
            wanted = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
            yield {f"rollout.engine.{k}": v for k, v in wanted.items() if v != getattr(engine, k)}
    if not plan.target.gpu:
        whole: Settings = {}
        if not runs_on_cpu(engine):
            yield (whole := {"rollout.engine.pipeline_parallel": 1})
        starved = not whole and any(kind.impossible for kind in _kinds(plan, "rollout server"))
        for power in range(1, 8):
            gib = engine.kv_cache_gib * 2.0 ** (power if starved else -power)
            yield whole | {"rollout.engine.kv_cache_gib": gib}


def _devices(plan: Plan) -> list[str]:
    """What the number of devices asks for once each rank fits."""
    there = plan.target.devices
    if not plan.target.gpu or there is None or plan.devices <= there:
        return []
    if not isinstance(plan.experiment, WholeExperiment):
        return [f"devices: take {plan.devices}"]
    engine, learner = plan.experiment.rollout.engine, plan.experiment.learner.processes
    each = engine.tensor_parallel * engine.pipeline_parallel
    parts = {"the learner": learner}
    others = ("the reference", "the value model", "the scorers")
    for name, part in zip(others, ("reference", "value model", "scorer"), strict=True):
        if ranks := sum(kind.ranks for kind in _kinds(plan, part)):
            parts[name] = ranks
    servers = (there - sum(parts.values())) // each
    if servers >= 1:
        return [f"devices: set rollout.servers={servers}, or take {plan.devices} devices"]
    needs = ", ".join(f"{ranks} for {name}" for name, ranks in parts.items())
    least = sum(parts.values()) + each
    return [f"devices: take {least} at least, {needs} and {each} for one server"]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
