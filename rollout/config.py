"""The rollout server's section of the experiment file."""

from pydantic import Field

from buffer.config import BufferConfig
from buffer.experiment import DataConfig, EvalConfig, Experiment, LoggingConfig, ModelConfig, Section
from sync.config import SyncConfig


class SamplingConfig(Section):
    """How training completions are sampled.

    Only temperature may change the distribution: with top-p or top-k the engine would sample from another
    policy than the one the learner's logprobs are of, so those are not offered.
    """

    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The tokens of the text that did are kept and trained."""


class EngineConfig(Section):
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Of key-value cache on CPU; on GPU `gpu_memory_utilization` rules."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    max_num_seqs: int = Field(default=256, ge=1)
    """Completions decoded at a time."""
    cores: str | None = None
    """CPU only: each rank's cores as in VLLM_CPU_OMP_THREADS_BIND ("0-1", "0|1"); null takes all."""
    enforce_eager: bool = True


class RewardConfig(Section):
    function: str = "rollout.rewards:exact_number"
    """`package.module:function` called as f(completion_text, row) -> float or dict of named parts."""
    timeout_s: float = Field(default=5.0, gt=0)
    """A completion whose reward takes longer is dropped and counted."""
    workers: int = Field(default=1, ge=1)
    """Processes that compute rewards."""
    memory_mib: int = Field(default=4096, ge=16)
    """Of address space one reward process may take beyond what its imports did."""


class RolloutConfig(Section):
    servers: int = Field(default=1, ge=1)
    """How many servers `slipstream run` starts."""
    group_size: int = Field(default=8, ge=1)
    """Completions per prompt."""
    max_groups: int = Field(default=16, ge=1)
    """Groups one server works on at a time."""
    group_timeout_s: float = Field(default=600.0, gt=0)
    """A group not finished by then is given up and its prompt goes back to the queue."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()


class RolloutExperiment(Experiment):
    model: ModelConfig
    data: DataConfig
    buffer: BufferConfig = BufferConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig | None = None
    logging: LoggingConfig = LoggingConfig()


class PredictionExperiment(Experiment):
    """What offline generation and evaluation read of an experiment file: no buffer, no learner."""

    model: ModelConfig
    data: DataConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig | None = None
    logging: LoggingConfig = LoggingConfig()
