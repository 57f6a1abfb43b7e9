"""The rollout server's section of the experiment file."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from buffer.config import BufferConfig
from buffer.dotted import named
from buffer.experiment import (
    DataConfig,
    EvalConfig,
    Experiment,
    LoggingConfig,
    ModelConfig,
    Seconds,
    Section,
    SecurityConfig,
)
from buffer.processor import has_gpu, native_dtype
from sync.config import SyncConfig
from sync.sink import OnUpdate

OTHER_POLICY = (
    "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip
"""What engines offer that takes tokens away or moves their probabilities."""


class SamplingConfig(Section):
    """How training completions are sampled. Only temperature may change the distribution."""

    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The tokens of the text that did are kept and trained."""

    @model_validator(mode="before")
    @classmethod
    def _samples_the_policy(cls, given: Any) -> Any:
        others = [key for key in OTHER_POLICY if isinstance(given, dict) and key in given]
        if others:
            raise ValueError(
                f"with {', '.join(others)} the engine would sample from another distribution than the "
                "policy's, which the learner's logprobs are of, and no ratio between them would be right; "
                "only temperature is known to both; remove it"
            )
        return given


CORES = re.compile(r"auto|all|nobind|\d+(-\d+)?([,|]\d+(-\d+)?)*")


class EngineConfig(Section):
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    """On CPU with `enforce_eager` false only."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Of key-value cache on CPU; on GPU `gpu_memory_utilization` rules."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    max_num_seqs: int = Field(default=256, ge=1)
    """Completions decoded at a time."""
    cores: str | None = None
    """CPU only: each rank's cores as in VLLM_CPU_OMP_THREADS_BIND ("0-1", "0|1"); null takes all."""
    enforce_eager: bool = True

    @field_validator("cores")
    @classmethod
    def _are_cores(cls, value: str | None) -> str | None:
        if value is not None and not CORES.fullmatch(value):
            raise ValueError("expected cores such as 0-1 or 0,2, those of each rank behind a |")
        return value


def engine_faults(key: str, engine: EngineConfig) -> list[str]:
    """Why an engine cannot serve on this machine, one line each.

    No validator: a machine without a GPU may well plan an experiment, or hold the buffer of one, whose
    servers run elsewhere.

    Args:
        key: Of its section, for the lines.
        engine: Its layout.
    """
    if runs_on_cpu(engine) or has_gpu():
        return []
    return [
        f"{key}.pipeline_parallel={engine.pipeline_parallel}: this machine has no GPU, and vLLM's CPU build "
        f"dies at its first request with more than one stage and enforce_eager; set {key}.tensor_parallel in "
        f"its place, or {key}.enforce_eager=false"
    ]


def runs_on_cpu(engine: EngineConfig) -> bool:
    """Whether vLLM's CPU build can serve in this layout: what one pipeline stage receives of the one before
    has a place in memory only once the model was compiled."""
    return engine.pipeline_parallel == 1 or not engine.enforce_eager


def _reward_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", value):
        raise ValueError("expected a name of letters, digits, _ and -, 32 at most")
    return value


RewardName = Annotated[str, AfterValidator(_reward_name)]
"""Part of metric names, file names and service names."""


class _OfRows(Section):
    """A reward, of all rows or of some."""

    only: dict[str, tuple[str | int | float | bool, ...]] = Field(default_factory=dict)
    """The rows that it is for: those with this value, or with one of a list, under each of these keys. Of
    another row it is neither asked nor counted. {} is for every row."""

    @field_validator("only", mode="before")
    @classmethod
    def _as_lists(cls, given: object) -> object:
        if not isinstance(given, dict):
            raise ValueError("expected keys of rows with their values, such as {data_source: gsm8k}")
        found = {key: v if isinstance(v, list | tuple) else [v] for key, v in given.items()}
        for key, values in found.items():
            if not values or not all(isinstance(v, str | int | float) for v in values):
                raise ValueError(f"{key}: expected a text, a number, true or false, or a list of them")
        return found

    def is_for(self, row: dict[str, Any]) -> bool:
        """Whether this reward is asked about completions of the row."""
        return all(key in row and row[key] in values for key, values in self.only.items())


class FunctionReward(_OfRows):
    """Computed by a function, in processes of its own."""

    function: str
    """`package.module:function` called as f(completion_text, row) -> float or dict of named parts."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """In the total; 0 does not compute it."""
    timeout_s: Seconds = 5.0
    """A completion whose reward takes longer fails, and with it its group; the prompt is queued again."""
    workers: int = Field(default=1, ge=1)
    """Processes that compute rewards."""
    memory_mib: int = Field(default=4096, ge=16)
    """Of address space one reward process may take beyond what its imports did."""


class ModelReward(_OfRows):
    """Scored by a reward model, which a scorer serves (`slipstream scorer`)."""

    model: str
    """Hugging Face folder of a `…ForSequenceClassification` with one label."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """In the total; 0 does not compute it, and needs no scorer."""
    address: str = "tcp://127.0.0.1:5703"
    """Where its scorer listens, each reward model's at another; beyond loopback only with security.keys."""
    dtype: Literal["bfloat16", "float32"] = Field(default_factory=native_dtype)
    """Of the weights; the score itself is computed in float32."""
    max_length: int | None = Field(default=None, ge=8)
    """Longest sequence in tokens, prompt and completion together; null takes the policy's."""
    clip: float | None = Field(default=None, gt=0)
    """The score is clipped to [-clip, clip]; null leaves it as it is."""
    timeout_s: Seconds = 300.0
    """A completion not scored by then is given up, and its prompt queued again: long enough for a scorer that
    died to be started again."""
    engine: EngineConfig = EngineConfig()

    @field_validator("dtype", mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        return native_dtype() if value == "auto" else value


def _kind_of_reward(value: Any) -> str | None:
    given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    kinds = [kind for kind in ("function", "model") if kind in given]
    return kinds[0] if len(kinds) == 1 else None


Reward = Annotated[
    Annotated[FunctionReward, Tag("function")] | Annotated[ModelReward, Tag("model")],
    Discriminator(
        _kind_of_reward,
        custom_error_type="kind_of_reward",
        custom_error_message="expected one of `function` and `model`",
    ),
]


class RolloutConfig(Section):
    servers: int = Field(default=1, ge=1, le=256)
    """How many servers `slipstream run` starts."""
    group_size: int = Field(default=8, ge=1)
    """Completions per prompt."""
    max_groups: int = Field(default=16, ge=1)
    """Groups one server works on at a time."""
    group_timeout_s: Seconds = 600.0
    """A group not finished by then is given up and its prompt goes back to the queue."""
    on_update: OnUpdate = "keep"
    """What becomes of running completions when a version comes in: `keep` goes on with the key-value cache of
    the old weights, `recompute` has the new ones compute it again, `abort` starts them anew and counts their
    tokens as wasted. Each token is labelled with the version that sampled it in any case."""
    sampling: SamplingConfig = SamplingConfig()
    episode: Annotated[str, AfterValidator(named())] | None = None
    """`package.module:function` of your own, called as `await f(row, chat)` for every completion: it makes a
    conversation of it (`rollout.episodes`), each turn of at most sampling.max_tokens. null asks once."""
    recorded: str | None = None
    """Folder of groups that a server gives out, round and round, in the place of generating any: measures
    the learner alone (docs/tuning.md). null generates."""
    engine: EngineConfig = EngineConfig()
    rewards: dict[RewardName, Reward] = Field(
        default_factory=lambda: {"answer": FunctionReward(function="rollout.rewards:exact_number")}
    )
    """By name. The reward of a completion is the sum of each one's value times its weight."""

    @field_validator("rewards")
    @classmethod
    def _some_reward(cls, rewards: dict[str, Reward]) -> dict[str, Reward]:
        if all(reward.weight == 0 for reward in rewards.values()):
            raise ValueError("expected at least one reward whose weight is not 0")
        return rewards


class RolloutExperiment(Experiment):
    model: ModelConfig
    data: DataConfig
    buffer: BufferConfig = BufferConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig | None = None
    security: SecurityConfig = SecurityConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _generates_evaluations(self) -> Self:
        if self.rollout.recorded is not None and self.eval is not None:
            raise ValueError("rollout.recorded generates nothing to evaluate; set eval: null")
        return self


class PredictionExperiment(Experiment):
    """What offline generation and evaluation read of an experiment file: no buffer, no learner."""

    model: ModelConfig
    data: DataConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig | None = None
    logging: LoggingConfig = LoggingConfig()
