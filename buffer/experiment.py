"""One YAML file is one experiment: how it is read, and the parts of it that every service needs.

A service declares which sections it reads as fields of an `Experiment` subclass; `load` merges overrides,
interpolates, checks, and turns every mistake into one line that names the key. Imports no torch, so that a
typo is told at once.
"""

import difflib
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from buffer.order import parse_split
from buffer.processor import native_dtype

SECTIONS = (
    "name", "run_dir", "seed", "model", "data", "stage", "rollout", "buffer", "learner", "sync", "eval",
    "security", "logging",
)  # fmt: skip
"""Every top-level key an experiment file may have, whoever reads it."""


class ConfigError(ValueError):
    """A mistake in an experiment file or an override; its text is one line per mistake, fit to print."""


class Section(BaseModel):
    """Base of every config section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    max_length: int = Field(default=1024, ge=8)
    """Longest sequence in tokens, prompt and completion together."""
    dtype: Literal["bfloat16", "float32"] = Field(default_factory=native_dtype)
    """Of the weights in the engine and in the learner's forward pass; master weights are always float32.
    `auto`, the default, is what this machine computes fast."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return native_dtype() if value == "auto" else value


class JsonlSource(Section):
    kind: Literal["jsonl"]
    path: str
    """A file of one JSON object a line, of any shape of docs/data.md."""


class FilesSource(Section):
    kind: Literal["files"]
    path: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """A file, or several that are read as one: JSONL, a JSON array, parquet, arrow, or a folder that Hugging
    Face `datasets` saved."""
    adapter: str = "auto"
    """How a row is read: a name of docs/data.md, `package.module:function` of your own, or `auto` to tell by
    the keys of the first rows."""


class FunctionSource(Section):
    kind: Literal["function"]
    path: str
    """`package.module:function`; called with `args`, returns a list of rows of any shape of docs/data.md."""
    args: dict[str, Any] = {}


class ReasoningGymSource(Section):
    kind: Literal["reasoning_gym"]
    dataset: str
    """Name of a reasoning-gym dataset; rows are scored by the dataset's own verifier."""
    size: int = Field(default=1000, ge=1)
    args: dict[str, Any] = {}


SingleSource = Annotated[
    JsonlSource | FilesSource | FunctionSource | ReasoningGymSource, Field(discriminator="kind")
]


class BlendPart(Section):
    source: SingleSource
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Share of the draws, relative to the other parts'."""


class BlendSource(Section):
    kind: Literal["blend"]
    parts: tuple[BlendPart, ...] = Field(min_length=1)


PromptSource = Annotated[
    JsonlSource | FilesSource | FunctionSource | ReasoningGymSource | BlendSource,
    Field(discriminator="kind"),
]


class DataConfig(Section):
    train: PromptSource
    split: str | None = None
    """Disjoint shares of the rows for the stages: SFT, then reward model or DPO, then RL. "2,4,4" is 20, 40
    and 40 %; null gives every stage all rows."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be read ends the start, with its place and the reason, or is left out and counted."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows (for a blend: as many draws as its sources have rows); null goes round until the
    learner has made its steps."""
    shuffle: bool = True
    """Each pass in an order of its own."""
    system_prompt: str | None = None
    """Put before every chat prompt that has no system message of its own."""

    @field_validator("split")
    @classmethod
    def _three_shares(cls, value: str | None) -> str | None:
        if value is not None:
            parse_split(value)
        return value


class EvalConfig(Section):
    source: PromptSource
    samples: int = Field(default=4, ge=1)
    """Completions per prompt."""
    every: int | None = Field(default=None, ge=1)
    """Policy versions between evaluations; null evaluates only before the first and after the last step."""
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    """null takes the rollout's."""
    target: float | None = None
    """Mean score the last evaluation should reach; the summary says whether it did."""


class SecurityConfig(Section):
    keys: str | None = Field(default=None, min_length=1)
    """Folder of `slipstream keys`, or what this host needs of it. null leaves every service on loopback,
    where nobody is asked who he is."""


class LoggingConfig(Section):
    tensorboard: bool = True
    samples_every: int = Field(default=10, ge=1)
    """Steps between the rollouts written to `samples.jsonl`."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    stalled_s: float = Field(default=600.0, gt=0)
    """When nothing was generated, trained or evaluated for so long, `slipstream run` tells who waits for
    whom, and where every thread is."""


class Experiment(Section):
    """What every service reads; a service's own class adds its sections."""

    name: str
    run_dir: str
    """Everything the run writes lies here."""
    seed: int = 1


S_ = TypeVar("S_", bound=Section)


def load(path: str | Path, overrides: list[str], schema: type[S_], sections: Sequence[str] = SECTIONS) -> S_:
    """Read an experiment file.

    Args:
        path: The YAML file; `base: other.yaml` in it, relative to it, is read first and merged under it
            (a section whose `kind` changes takes nothing from under it).
        overrides: `section.key=value` texts, in OmegaConf's dotlist syntax; they win over the file.
        schema: The sections to check; known sections that it lacks are left unread.
        sections: The top-level keys that are known.

    Raises:
        ConfigError: One line per mistake: file, key, what was expected.
    """
    merged = _merge(Path(path), overrides)
    for key in merged:
        if key not in sections:
            raise ConfigError(f"{path}: {key}: unknown section{_nearest(str(key), sections)}")
    wanted = {key: merged[key] for key in schema.model_fields if key in merged}
    try:
        return schema.model_validate(wanted)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, e, schema) for e in error.errors())) from None


def _merge(path: Path, overrides: list[str]) -> dict[str, Any]:
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"override {text!r}: expected section.key=value")
    try:
        layers = [*(OmegaConf.load(p) for p in _chain(path)), OmegaConf.from_dotlist(overrides)]
        merged = reduce(_over, (OmegaConf.to_container(layer) for layer in layers))
        resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except FileNotFoundError as error:
        missing = "" if Path(error.filename) == path else f"base: {error.filename}: "
        raise ConfigError(f"{path}: {missing}no such file") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(resolved, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(resolved).__name__}")
    return {str(k): v for k, v in resolved.items() if k != "base"}


def _over(lower: Any, upper: Any) -> Any:
    """Mappings are merged, anything else is replaced; so is a mapping whose `kind` changes, because the keys
    of one kind mean nothing to another."""
    if not isinstance(lower, dict) or not isinstance(upper, dict):
        return upper
    kinds = [layer["kind"] for layer in (lower, upper) if isinstance(layer.get("kind"), str)]
    if len(set(kinds)) > 1:
        return upper
    return {**lower, **{key: _over(lower[key], v) if key in lower else v for key, v in upper.items()}}


def _chain(path: Path) -> list[Path]:
    """The files to merge, base first. Refuses a ring of bases."""
    chain = [path]
    while True:
        raw = yaml.safe_load(chain[0].read_text())
        base = raw.get("base") if isinstance(raw, dict) else None
        if base is None:
            return chain
        parent = chain[0].parent / str(base)
        if parent in chain:
            raise ConfigError(f"{path}: base: {parent} includes itself")
        chain.insert(0, parent)


def _explain(path: str | Path, error: Any, schema: type[BaseModel]) -> str:
    keys, siblings = _locate(error["loc"], schema)
    where = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return f"{path}: {where}: unknown key{_nearest(keys[-1], siblings)}"
    # A section's own check names its values itself; the whole section's input would bury the line.
    told = error["type"] == "missing" or isinstance(error["input"], dict)
    given = "" if told else f", got {error['input']!r}"
    reason = error["msg"].removeprefix("Value error, ")
    return f"{path}: {where}{': ' if where else ''}{reason}{given}"


def _locate(loc: tuple[Any, ...], schema: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The keys down to a mistake, and those that were allowed where the last of them stands.

    A place also names each union's arm on the way, by its `kind` or by a key that only that arm has.
    """
    models: list[Any] = [schema]
    keys: list[str] = []
    for part in loc[:-1]:
        having = [m for m in models if part in m.model_fields]
        below = [arm for m in having for arm in _arms(m.model_fields[part].annotation)]
        arms = [m for m in models if part == _tag(m)] or having
        if below or len(models) == 1 or not arms:
            keys.append(str(part))
            models = below or models
        else:
            models = arms
    return [*keys, *map(str, loc[-1:])], sorted({key for model in models for key in model.model_fields})


def _arms(annotation: Any) -> list[Any]:
    """The models in an annotation: itself, or the arms of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arm in getattr(annotation, "__args__", ()) for m in _arms(arm)]


def _tag(model: type[BaseModel]) -> Any:
    kind = model.model_fields.get("kind")
    return getattr(kind.annotation, "__args__", (None,))[0] if kind else None


def _nearest(key: str, known: Any) -> str:
    known = list(known)
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known here: {', '.join(sorted(known))}"
