"""How ranks share a model, and the ranks of their own that reference and value model may have."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from buffer.experiment import Section

LONGEST_WAIT_S = 1500.0
"""Below the time after which ranks that stand in a collective give up (`parallel.COLLECTIVE_S`)."""


class ParallelConfig(Section):
    """Megatron's layout; the data-parallel size is what is left of the world size."""

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer, each holding its own whole; they are neighbours among the
    tensor- and data-parallel ranks of a pipeline stage."""
    distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""

    def check(self, processes: int, key: str) -> None:
        """Refuse a number of ranks that this layout does not divide.

        Args:
            key: The section of both, for the message.

        Raises:
            ValueError: Says what to set.
        """
        cells = self.tensor * self.pipeline
        if processes % cells:
            raise ValueError(
                f"processes {processes} is not a multiple of tensor · pipeline = {cells}; "
                f"set {key}.processes={cells} or change {key}.parallel"
            )
        if processes // self.pipeline % self.expert:
            raise ValueError(
                f"a pipeline stage's {processes // self.pipeline} ranks are not a multiple of "
                f"parallel.expert = {self.expert}; change processes or {key}.parallel"
            )


class OwnRanks(Section):
    """One more torchrun job, which holds a model and answers the learner."""

    KEY: ClassVar[str]
    """Of the section, for messages."""

    processes: int = Field(default=1, ge=1)
    """How many ranks are started on this machine."""
    threads: int | None = Field(default=None, ge=1)
    """As of the learner."""
    parallel: ParallelConfig = ParallelConfig()
    """Any that divides the model, whatever the learner's is."""
    address: str
    """Where its rank 0 listens; beyond loopback only with security.keys."""
    timeout_s: float = Field(default=1200.0, gt=0, le=LONGEST_WAIT_S)
    """The learner ends when it has heard nothing for so long: long enough for a job that died to be started
    again, and for its first start."""

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        self.parallel.check(self.processes, self.KEY)
        return self


class ReferenceConfig(OwnRanks):
    """Ranks of its own for the frozen reference."""

    KEY = "learner.reference"

    address: str = "tcp://127.0.0.1:5704"

    @model_validator(mode="after")
    def _trains_nothing(self) -> Self:
        if self.parallel.distributed_optimizer:
            raise ValueError("parallel.distributed_optimizer: a frozen model has no optimizer; remove it")
        return self


class ValueRanksConfig(OwnRanks):
    """Ranks of its own for the value model: they hold its weights and its optimizer, and write their part of
    every checkpoint, so that they see the same run_dir as the learner does."""

    KEY = "learner.value.ranks"

    address: str = "tcp://127.0.0.1:5705"
