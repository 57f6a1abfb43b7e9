"""Whether a run can go on from its checkpoint under the configuration of now.

Asked before anything starts, and again by the ranks before they load it. Imports no torch.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner import families
from learner.checkpoint_files import EMA, VALUE, found_in
from learner.config import LearnerConfig, TrainingConfig, ValueConfig

NO_PART = ("head", "has_score", "max_positions", "window")
"""Of a family, what a checkpoint's weights do not depend on."""


def shape_of(model: str) -> dict[str, Any]:
    """What the weights of a Hugging Face folder's model are the weights of, in JSON's words.

    Raises:
        ValueError: It is none, or not one that is trained here.
    """
    facts = asdict(families.read(model, families.own_head(model)))
    return _plain({name: value for name, value in facts.items() if name not in NO_PART})


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def measures_from_start(learner: TrainingConfig) -> bool:
    """Whether a run looks at the weights that it started from: in its reference, or below its adapters."""
    refers = isinstance(learner, LearnerConfig) and learner.algorithm.needs_reference
    return refers or learner.lora is not None


def sharded_apart(value: ValueConfig | None) -> bool | None:
    """Whether a value model on ranks of its own shards its optimizer; None where it has none."""
    return (
        value.ranks.parallel.distributed_optimizer if value is not None and value.ranks is not None else None
    )


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, if it has one."""
    found = found_in(run_dir / "checkpoints")
    return found[-1] if found else None


def obstacle(
    path: Path,
    meta: dict[str, Any],
    *,
    dtype: str,
    distributed_optimizer: bool,
    lora: dict[str, Any] | None,
    shape: dict[str, Any] | None,
    start: str | None,
    start_at: str,
    value: bool,
    value_lora: dict[str, Any] | None,
    value_start: str | None,
    value_distributed_optimizer: bool | None,
    ema: bool,
) -> str | None:
    """Why this configuration cannot go on from a checkpoint, and what to do; None when it can.

    Args:
        path: The checkpoint.
        meta: Its meta.json. What an older one does not tell is not compared.
        dtype: `model.dtype`.
        lora: Of the adapters, None where every weight is trained.
        shape: `shape_of` the model.
        start: Fingerprint of the weights that the run starts from, where it still measures from them.
        start_at: Where these lie.
        value: Whether there is a value model.
        value_lora: Of its adapters, None where every weight of it is trained.
        value_start: Fingerprint of the weights below them.
        value_distributed_optimizer: Of ranks of its own; None: as the policy's.
        ema: Whether an average of the weights is kept.
    """
    back = "set it back, or start again in another run_dir"
    if meta.get("weights_only"):
        return (
            f"{path}: it was made by `slipstream convert` and has no optimizer to resume; move it out of "
            "the run's checkpoints and start from it with learner.init_from"
        )
    for key, theirs, ours in (
        ("model.dtype", meta.get("dtype"), dtype),
        (
            "learner.parallel.distributed_optimizer",
            meta.get("distributed_optimizer"),
            distributed_optimizer,
        ),
    ):
        if theirs != ours:
            return f"{path}: written with {key}={theirs}, this run has {ours}; {back}"
    pairs = [("learner.lora", meta.get("lora"), lora)]
    if value and (path / VALUE).is_dir():
        pairs.append(("learner.value.lora", meta.get("value_lora"), value_lora))
    for key, theirs, ours in pairs:
        if theirs != ours:
            return f"{path}: written with {key}={told(theirs)}, this run has {told(ours)}; {back}"
    if shape is not None and meta.get("shape") not in (None, shape):
        theirs = meta["shape"]
        other = [f"{n} {theirs.get(n)} → {shape.get(n)}" for n in shape if theirs.get(n) != shape.get(n)]
        return f"{path}: written of another model than model.path has now ({', '.join(other)}); {back}"
    if start and meta.get("start") not in (None, start):
        return (
            f"{path}: its run started from other weights than {start_at} has now, and still measures from "
            "them; bring them back, or start again in another run_dir"
        )
    if value and meta.get("value_start") not in (None, value_start):
        return (
            f"{path}: its value model's adapters are of other weights than learner.value.path has now; "
            "bring them back, or start again in another run_dir"
        )
    if value and not (path / VALUE).is_dir():
        return f"{path}: written without a value model, this run has learner.value; {back}"
    sharded = meta.get("value_distributed_optimizer")
    theirs = meta.get("distributed_optimizer") if sharded is None else sharded
    ours = distributed_optimizer if value_distributed_optimizer is None else value_distributed_optimizer
    if value and theirs != ours:
        return (
            f"{path}: its value model was written with distributed_optimizer={theirs}, this run's has {ours} "
            f"by learner.value.ranks.parallel, or learner.parallel where it shares the policy's ranks; {back}"
        )
    if ema and not (path / EMA).is_dir():
        return f"{path}: written without an average of the weights, this run has learner.ema; {back}"
    return None


def told(lora: dict[str, Any] | None) -> str:
    if lora is None:
        return "null"
    return f"{{rank: {lora['rank']}, alpha: {lora['alpha']:g}, modules: [{', '.join(lora['modules'])}]}}"
