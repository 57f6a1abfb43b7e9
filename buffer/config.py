"""The buffer's section of the experiment file."""

from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from buffer.dotted import named
from buffer.experiment import (
    DataConfig,
    EvalConfig,
    Experiment,
    LoggingConfig,
    ModelConfig,
    RunLength,
    Seconds,
    Section,
    SecurityConfig,
)
from buffer.staleness import Policy, Rules


class BufferConfig(Section):
    address: str = "tcp://127.0.0.1:5701"
    """Where the buffer listens; beyond loopback only with security.keys."""
    groups_per_batch: int = Field(default=8, ge=1)
    """Groups the learner trains on per policy version."""
    max_staleness: int = Field(default=2, ge=0)
    """Oldest trained token, in policy versions before the learner's; 0 is synchronous on-policy training."""
    capacity: int = Field(default=4096, ge=1)
    """Groups stored or leased at most; past it no lease is granted."""
    policy: Policy = "fifo"
    """Which stored groups the next batch takes: the oldest leases, the newest tokens, those of the highest
    `priority`, or drawn evenly. docs/staleness.md says what holds under each."""
    priority: Annotated[str, AfterValidator(named("advantage"))] | None = None
    """Of a group, under policy `priority`; the highest goes first. `advantage`, which null stands for, is the
    mean distance of its rewards from their mean; `package.module:function` of your own is called as
    f(rewards, metadata), two lists with an entry for each completion."""
    max_uses: int = Field(default=1, ge=1)
    """Batches that may train a group while it is young enough; above 1 the learner fills up with groups that
    it trained before."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, count them and ask for others (DAPO, arXiv 2503.14476,
    section 3.2)."""
    lease_timeout_s: Seconds = 120.0
    """A lease not renewed for this long goes back to the queue."""
    max_message_mib: int = Field(default=256, ge=1)
    """A larger message is refused."""

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        rules = self.rules
        if self.priority is not None and self.policy != "priority":
            raise ValueError(
                f"priority={self.priority} has no effect under policy={self.policy}; expected policy=priority"
            )
        if self.policy in ("priority", "uniform") and self.max_staleness < 2:
            raise ValueError(
                f"policy={self.policy} has nothing to choose from at max_staleness={self.max_staleness}: "
                "every group in flight is due in the next batch; expected 2 or more, or policy=fifo"
            )
        if self.max_uses > rules.ahead + 1:
            raise ValueError(
                f"max_uses={self.max_uses} cannot come about at max_staleness={self.max_staleness} under "
                f"policy={self.policy}; expected at most {rules.ahead + 1}"
            )
        need = rules.window + rules.kept
        if self.capacity < need:
            raise ValueError(
                f"capacity {self.capacity} is below the {need} groups that max_staleness and "
                "groups_per_batch keep in flight: admission would never fill a batch"
            )
        return self

    @property
    def rules(self) -> Rules:
        return Rules(self.groups_per_batch, self.max_staleness, self.policy, self.max_uses)


class Sampling(Section):
    model_config = ConfigDict(extra="ignore")

    temperature: float = Field(default=1.0, gt=0)


class SampledAt(Section):
    """Of the rollout section what stored logprobs are of; it is checked by the servers."""

    model_config = ConfigDict(extra="ignore")

    sampling: Sampling = Sampling()


class BufferExperiment(Experiment):
    model: ModelConfig | None = None
    """Bounds what is taken of rollout servers; the buffer itself needs no model."""
    data: DataConfig
    buffer: BufferConfig = BufferConfig()
    rollout: SampledAt = SampledAt()
    learner: RunLength = RunLength()
    eval: EvalConfig | None = None
    security: SecurityConfig = SecurityConfig()
    logging: LoggingConfig = LoggingConfig()
