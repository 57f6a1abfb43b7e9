"""An offline stage's experiment file: what is learned, from which rows, with which settings."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buffer.experiment import DataConfig, Experiment, LoggingConfig, ModelConfig, PromptSource, Section
from learner.config import TrainingConfig


class SftConfig(Section):
    """Imitate the responses."""

    kind: Literal["sft"]


class RewardConfig(Section):
    """Score responses in the order in which the data scores them."""

    kind: Literal["reward"]


class DpoConfig(Section):
    """Prefer the better response, measured from the initial model."""

    kind: Literal["dpo"]
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290); ipo: squared distance to a margin of 1 / 2β (arXiv 2310.12036)."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Chance that a preference is the wrong way round (cDPO); for the sigmoid loss."""

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("loss ipo has no labels to smooth; remove label_smoothing or take loss sigmoid")
        return self


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
