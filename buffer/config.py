"""The buffer's section of the experiment file."""

from typing import Literal, Self

from pydantic import Field, model_validator

from buffer.experiment import DataConfig, EvalConfig, Experiment, LoggingConfig, Section


class BufferConfig(Section):
    address: str = "tcp://127.0.0.1:5701"
    """Where the buffer listens; off loopback only with keys."""
    groups_per_batch: int = Field(default=8, ge=1)
    """Groups the learner trains on per policy version."""
    max_staleness: int = Field(default=2, ge=0)
    """Oldest trained token, in policy versions before the learner's; 0 is synchronous on-policy training."""
    capacity: int = Field(default=4096, ge=1)
    """Groups stored or leased at most; past it no lease is granted."""
    policy: Literal["fifo", "freshest"] = "fifo"
    """Which stored groups the next batch takes."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, count them and ask for others (DAPO, arXiv 2503.14476)."""
    lease_timeout_s: float = Field(default=120.0, gt=0)
    """A lease not renewed for this long goes back to the queue."""
    max_message_mib: int = Field(default=256, ge=1)
    """A larger message is refused."""

    @model_validator(mode="after")
    def _roomy_enough(self) -> Self:
        need = (self.max_staleness + 1) * self.groups_per_batch
        if self.capacity < need:
            raise ValueError(
                f"capacity {self.capacity} is below (max_staleness + 1) · groups_per_batch = {need}: "
                "admission would never fill a batch"
            )
        return self


class BufferExperiment(Experiment):
    data: DataConfig
    buffer: BufferConfig = BufferConfig()
    eval: EvalConfig | None = None
    logging: LoggingConfig = LoggingConfig()
