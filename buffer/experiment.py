"""One YAML file is one experiment: how it is read, and the parts of it that every service needs.

A service declares which sections it reads as fields of an `Experiment` subclass; `load` merges overrides,
interpolates, checks, and turns every mistake into one line that names the key. Imports no torch, so that a
typo is told at once.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from buffer.config_errors import ConfigError, bad_setting, explain_all, nearest, placed
from buffer.experiment_file import merged
from buffer.order import parse_split
from buffer.processor import native_dtype

SECTIONS = (
    "name", "run_dir", "seed", "model", "data", "stage", "rollout", "buffer", "learner", "sync", "eval",
    "security", "logging",
)  # fmt: skip
"""Every top-level key an experiment file may have, whoever reads it."""


LARGEST_NUMBER = 2**31 - 1
"""Of a setting that counts: more fits neither the store nor the wire."""


Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""Of a deadline: eleven days at most, which timers that count milliseconds in 31 bits still hold."""


class Section(BaseModel):
    """Base of every config section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: object) -> object:
        """To pydantic a true is a 1, and YAML makes one of `yes` and `on`."""
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _types(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, bool) and kinds & {int, float} and bool not in kinds:
                    raise bad_setting(name, "float_type" if float in kinds else "int_type", value)
                # YAML's 1e10 is a float, of which pydantic makes a whole number where one is wanted.
                made = isinstance(item, float) and item.is_integer() and float not in kinds
                if (isinstance(item, int) or made) and int in kinds and abs(item) > LARGEST_NUMBER:
                    raise bad_setting(name, "less_than_equal", value, le=LARGEST_NUMBER)
        return values


def _types(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, down to the single ones."""
    arguments = get_args(annotation)
    if arguments:
        return set().union(*map(_types, arguments))
    return {annotation} if isinstance(annotation, type) else set()


def folder_name(value: str) -> str:
    """A check for configurations: something that is the name of one folder, and of nothing beside it.

    Raises:
        ValueError: It is not.
    """
    if not re.fullmatch(r"\w(?:[\w .+-]{0,126}[\w.+-])?", value):
        raise ValueError("expected one folder name of up to 128 letters, digits, _ - + . and no / in it")
    return value


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


class _Rows(Section):
    adapter: str = "auto"
    """How a row is read: a name of docs/data.md, `package.module:function` of your own, or `auto` to tell by
    the keys of the first rows."""


class JsonlSource(_Rows):
    kind: Literal["jsonl"]
    path: str
    """A file of one JSON object a line, of any shape of docs/data.md."""


class FilesSource(_Rows):
    kind: Literal["files"]
    path: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """A file, or several that are read as one: JSONL, a JSON array, parquet, arrow, or a folder that Hugging
    Face `datasets` saved."""

    @field_validator("path", mode="before")
    @classmethod
    def _paths(cls, value: object) -> object:
        paths = value if isinstance(value, list | tuple) else [value]
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ValueError("expected a path or a list of paths")
        return value


class FunctionSource(_Rows):
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
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draws from the most probable tokens that make up this share of the probability."""
    top_k: int | None = Field(default=None, ge=1)
    """Draws from so many of the most probable tokens; null draws from all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """null takes the rollout's."""
    target: float | None = None
    """Mean score the last evaluation should reach; the summary says whether it did."""


class SecurityConfig(Section):
    keys: str | None = Field(default=None, min_length=1)
    """Folder of `slipstream keys`, or what this host needs of it. null leaves every service on loopback,
    where nobody is asked who he is."""


DEFAULT_STEPS = 100


class RunLength(Section):
    """Of the learner's section what others need; it is checked by the learner."""

    model_config = ConfigDict(extra="ignore")

    steps: int = DEFAULT_STEPS
    """Policy versions to make."""


class LoggingConfig(Section):
    tensorboard: bool = True
    samples_every: int = Field(default=10, ge=1)
    """Steps between the rollouts written to `samples.jsonl`."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    stalled_s: Seconds = 600.0
    """When a service achieved nothing for so long, its log gets the stacks of its threads; `slipstream run`
    tells who waits for whom too."""


class Experiment(Section):
    """What every service reads; a service's own class adds its sections."""

    name: Annotated[str, AfterValidator(folder_name)]
    run_dir: str
    """Everything the run writes lies here."""
    seed: int = Field(default=1, ge=0)

    @field_validator("run_dir")
    @classmethod
    def _is_somewhere(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError("expected a folder")
        return value


S_ = TypeVar("S_", bound=Section)


def load(path: str | Path, overrides: list[str], schema: type[S_], sections: Sequence[str] = SECTIONS) -> S_:
    """Read an experiment file.

    Args:
        path: The YAML file; `base: other.yaml` in it, relative to it, is read first and merged under it
            (a section whose `kind` changes, or that is {}, takes nothing from under it).
        overrides: `section.key=value` texts, in OmegaConf's dotlist syntax; they win over the file.
        schema: The sections to check; known sections that it lacks are left unread.
        sections: The top-level keys that are known.

    Raises:
        ConfigError: One line per mistake: file, key, what was expected.
    """
    found = merged(Path(path), overrides)
    for key in found:
        if key not in sections:
            reason = f"{key}: unknown section{nearest(str(key), sections)}"
            raise ConfigError(placed(path, overrides, reason))
    wanted = {key: found[key] for key in schema.model_fields if key in found}
    try:
        return schema.model_validate(wanted)
    except ValidationError as error:
        raise ConfigError(explain_all(path, overrides, error.errors(), schema)) from None
