"""Whether a run can go on from its checkpoint under the configuration of now.

Asked before anything starts, and again by the ranks before they load it. Imports no torch.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner import families
from learner.checkpoint_files import EMA, VALUE, found_in
from learner.config import LearnerConfig, TrainingConfig, ValueConfig
from learner.offline.config import DpoConfig, StageConfig

NO_PART = ("head", "has_score", "max_positions", "window")
"""Of a family, what a checkpoint's weights do not depend on."""
BACK = "set it back, or start again in another run_dir"


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


def measures_from_start(learner: TrainingConfig, stage: StageConfig | None) -> bool:
    """Whether a run looks at the weights that it started from: in its reference, or below its adapters.

    Args:
        stage: Of an offline one.
    """
    refers = isinstance(learner, LearnerConfig) and learner.algorithm.needs_reference
    return refers or isinstance(stage, DpoConfig) or learner.lora is not None


def sharded_apart(value: ValueConfig | None) -> bool | None:
    """Whether a value model on ranks of its own shards its optimizer; None where it has none."""
    return (
        value.ranks.parallel.distributed_optimizer if value is not None and value.ranks is not None else None
    )


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, if it has one."""
    found = found_in(run_dir / "checkpoints")
    return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Terms:
    """What this run has of what a checkpoint must agree with."""

    dtype: str
    distributed_optimizer: bool
    lora: dict[str, Any] | None = None
    """Of the adapters; None where every weight is trained."""
    shape: dict[str, Any] | None = None
    """`shape_of` the model."""
    start: str | None = None
    """Fingerprint of the weights that the run starts from, where it still measures from them."""
    start_at: str = ""
    """Where these lie."""
    value: bool = False
    """Whether there is a value model."""
    value_lora: dict[str, Any] | None = None
    """Of its adapters; None where every weight of it is trained."""
    value_start: str | None = None
    """Fingerprint of the weights below them."""
    value_distributed_optimizer: bool | None = None
    """Of ranks of its own; None: as the policy's."""
    ema: bool = False
    """Whether an average of the weights is kept."""


def obstacle(path: Path, meta: dict[str, Any], terms: Terms) -> str | None:
    """Why a run on these terms cannot go on from a checkpoint, and what to do; None when it can.

    Args:
        path: The checkpoint.
        meta: Its meta.json. What an older one does not tell is not compared.
        terms: This run's.
    """
    if meta.get("weights_only"):
        return (
            f"{path}: it was made by `slipstream convert` and has no optimizer to resume; move it out of "
            "the run's checkpoints and start from it with learner.init_from"
        )
    why = _of_policy(meta, terms)
    if why is None and terms.value:
        why = _of_value(meta, terms, (path / VALUE).is_dir())
    if why is None and terms.ema and not (path / EMA).is_dir():
        why = f"written without an average of the weights, this run has learner.ema; {BACK}"
    return None if why is None else f"{path}: {why}"


def _of_policy(meta: dict[str, Any], terms: Terms) -> str | None:
    for key, theirs, ours in (
        ("model.dtype", meta.get("dtype"), terms.dtype),
        (
            "learner.parallel.distributed_optimizer",
            meta.get("distributed_optimizer"),
            terms.distributed_optimizer,
        ),
        ("learner.lora", meta.get("lora"), terms.lora),
    ):
        if theirs != ours:
            return _differs(key, theirs, ours)
    theirs, shape = meta.get("shape"), terms.shape
    if shape is not None and theirs not in (None, shape):
        other = [f"{n} {theirs.get(n)} → {shape.get(n)}" for n in shape if theirs.get(n) != shape.get(n)]
        return f"written of another model than model.path has now ({', '.join(other)}); {BACK}"
    if terms.start and meta.get("start") not in (None, terms.start):
        return (
            f"its run started from other weights than {terms.start_at} has now, and still measures from "
            "them; bring them back, or start again in another run_dir"
        )
    return None


def _of_value(meta: dict[str, Any], terms: Terms, written: bool) -> str | None:
    """
    Args:
        written: Whether the checkpoint has a value model.
    """
    if not written:
        return f"written without a value model, this run has learner.value; {BACK}"
    if meta.get("value_lora") != terms.value_lora:
        return _differs("learner.value.lora", meta.get("value_lora"), terms.value_lora)
    if meta.get("value_start") not in (None, terms.value_start):
        return (
            "its value model's adapters are of other weights than learner.value.path has now; "
            "bring them back, or start again in another run_dir"
        )
    theirs = _sharded(meta.get("value_distributed_optimizer"), meta.get("distributed_optimizer"))
    ours = _sharded(terms.value_distributed_optimizer, terms.distributed_optimizer)
    if theirs != ours:
        return (
            f"its value model was written with distributed_optimizer={theirs}, this run's has {ours} "
            f"by learner.value.ranks.parallel, or learner.parallel where it shares the policy's ranks; {BACK}"
        )
    return None


def _sharded(value: bool | None, policy: bool | None) -> bool | None:
    return policy if value is None else value


def _differs(key: str, theirs: Any, ours: Any) -> str:
    return f"written with {key}={_told(theirs)}, this run has {_told(ours)}; {BACK}"


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return (
            f"{{rank: {value['rank']}, alpha: {value['alpha']:g}, modules: [{', '.join(value['modules'])}]}}"
        )
    return "null" if value is None else str(value)
