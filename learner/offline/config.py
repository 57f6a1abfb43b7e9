"""An offline stage's experiment file: what is learned, from which rows, with which settings."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buffer.experiment import DataConfig, Experiment, LoggingConfig, ModelConfig, PromptSource, Section
from learner.algorithm import PairLossConfig
from learner.config import TrainingConfig

Select = Literal["random", "first", "best"]


class SftConfig(Section):
    """Imitate the responses."""

    kind: Literal["sft"]
    turns: Literal["every", "last"] = "every"
    """Which answers of a conversation are learned."""


class RewardConfig(Section):
    """Score responses in the order in which the data scores them."""

    kind: Literal["reward"]
    responses: int | None = Field(default=None, ge=2)
    """Of a row with more, so many are trained each time it comes; null trains all."""
    select: Select = "random"
    """Which ones. random: drawn by the seed, others each time. first: as they stand in the row. best: those
    with the highest scores, of equal ones the first."""

    @model_validator(mode="after")
    def _selects_of_some(self) -> Self:
        if self.select != "random" and self.responses is None:
            raise ValueError(
                f"select={self.select} would do nothing: all responses are trained; set responses to how many"
            )
        return self


class DpoConfig(PairLossConfig):
    """Prefer the better response, measured from the initial model."""

    kind: Literal["dpo"]


StageConfig = Annotated[SftConfig | RewardConfig | DpoConfig, Field(discriminator="kind")]


class OfflineLearnerConfig(TrainingConfig):
    """An example lies wholly in one micro-batch; one longer than `tokens_per_microbatch` goes alone."""

    steps: int | None = Field(default=None, ge=1)
    """Batches to train at most; null goes through the data `data.epochs` times."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of a step, over all ranks."""
    too_long: Literal["drop", "cut"] = "drop"
    """What happens to more than model.max_length tokens. drop: the response is left out and counted, and the
    example when nothing is left to learn from. cut: the prompt loses its beginning, down to half of
    max_length, then the response its end and its end mark."""


class HeldOutConfig(Section):
    source: PromptSource
    """Rows of the same shapes as data.train's; all of them belong to the stage."""
    examples: int = Field(default=256, ge=1)
    """The first so many of them."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; null evaluates only before the first and after the last step."""


class OfflineExperiment(Experiment):
    model: ModelConfig
    data: DataConfig
    stage: StageConfig
    learner: OfflineLearnerConfig = OfflineLearnerConfig()
    eval: HeldOutConfig | None = None
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.learner.steps is None and self.data.epochs is None:
            raise ValueError("neither learner.steps nor data.epochs says when it ends; set one of them")
        return self
