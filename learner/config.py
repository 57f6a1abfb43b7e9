"""The learner's section of the experiment file."""

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from buffer.config import BufferConfig
from buffer.dotted import named
from buffer.experiment import (
    DEFAULT_STEPS,
    EvalConfig,
    Experiment,
    LoggingConfig,
    ModelConfig,
    PromptSource,
    Seconds,
    Section,
    SecurityConfig,
)
from learner.algorithm import AlgorithmConfig
from learner.correction_config import FARTHEST, VETO, changed
from learner.layout_config import OwnRanks as OwnRanks
from learner.layout_config import ParallelConfig as ParallelConfig
from learner.layout_config import ReferenceConfig as ReferenceConfig
from learner.layout_config import ValueRanksConfig as ValueRanksConfig
from sync.config import SyncConfig

INTERPOLATED_STALENESS = 10
"""Versions over which the proximal policy may be interpolated (arXiv 2512.06547 tried up to 8)."""

RECORDED = "recorded"
"""Folder in the run's, under `learner.idle_s`: for each data-parallel rank a file of the groups it got."""
DATA_END = "data_end.json"
"""Written into the folder of a run whose data ended before its last step: {"step": how many were made}."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0, le=100)
    min_lr: float = Field(default=0.0, ge=0)
    """Where the schedule would be behind the last step."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Of the learner's steps, over which the rate rises to `lr`."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm; 0 does not clip."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; expected at most lr")
        return self


Adapted = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linears of a layer that may have adapters, by Hugging Face's names."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): W + alpha / rank · B · A with W frozen. There is no dropout: it
    would train another policy than the one that sampled."""

    rank: int = Field(default=16, ge=1, le=4096)
    alpha: float = Field(default=32.0, gt=0)
    modules: tuple[Adapted, ...] = get_args(Adapted)

    @field_validator("modules")
    @classmethod
    def _once_each(cls, value: tuple[Adapted, ...]) -> tuple[Adapted, ...]:
        if not value:
            raise ValueError("expected at least one")
        return tuple(sorted(set(value), key=get_args(Adapted).index))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ValueConfig(Section):
    """PPO's fourth model: V(s_t), what reward is still to come before token t is drawn. Its own optimizer
    makes a step wherever the policy's does."""

    path: str
    """Folder it starts from: a reward model, as `slipstream reward` writes it, or a language model, which
    gets a new score row from the run's seed."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of one token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """0: one-step advantages; 1: the whole return less the value (arXiv 1506.02438)."""
    targets: Literal["gae", "vtrace"] = "gae"
    """What V is trained towards: the returns of the policy that sampled, or V-trace's, of one nearer to the
    proximal policy (arXiv 1802.01561), which takes a pass before the updates."""
    rho_bar: float = Field(default=1.0, gt=0)
    """Of V-trace: where ρ is truncated that weighs a step's error; whose values are learned."""
    c_bar: float = Field(default=1.0, gt=0)
    """Of V-trace: where ρ is truncated that carries an error back; at most rho_bar."""
    clip: float = Field(default=0.2, gt=0)
    """How far from its value at the start of the batch a state's value may go with profit."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6)
    lora: LoraConfig | None = None
    """null trains all its weights; with adapters its score row is trained whole beside them."""
    ranks: ValueRanksConfig | None = None
    """null keeps it on the policy's ranks and in their layout."""

    @model_validator(mode="after")
    def _truncates_as_vtrace_does(self) -> Self:
        idle = changed(self, "rho_bar", "c_bar")
        if self.targets == "gae" and idle:
            raise ValueError(f"targets gae have no ρ, so {', '.join(idle)} would do nothing; use vtrace")
        if self.c_bar > self.rho_bar:
            raise ValueError(
                f"c_bar {self.c_bar:g} is above rho_bar {self.rho_bar:g}: V-trace would carry back more of "
                "an error than it corrects; expected rho_bar ≥ c_bar"
            )
        return self


class PtxConfig(Section):
    """Text whose next-token loss is added to every optimizer step of the policy, so that it does not unlearn
    what it knew (PPO-ptx, arXiv 2203.02155)."""

    data: PromptSource
    """Rows with a `text`; round and round, each pass in an order of its own."""
    coefficient: float = Field(default=27.8, gt=0)
    """γ, of the mean over the texts' tokens; 27.8 is InstructGPT's."""
    batch_size: int = Field(default=32, ge=1)
    """Texts of an optimizer step, over all ranks; one longer than model.max_length loses its end."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """As in section data."""


class CheckpointConfig(Section):
    every: int | None = Field(default=10, ge=1)
    """Steps between checkpoints; null leaves it to `every_s`. The last step always has one."""
    every_s: Seconds | None = None
    """Seconds after the last one, at which the step that is being made gets one too; by rank 0's clock."""
    keep: int = Field(default=2, ge=1)
    export: bool = True
    """Write the trained model as a Hugging Face folder at the end."""

    @model_validator(mode="after")
    def _comes(self) -> Self:
        if self.every is None and self.every_s is None:
            raise ValueError(
                "neither every nor every_s says when one is written, so a run that dies would start again; "
                "set one of them"
            )
        return self


class EmaConfig(Section):
    """The moving average of the trained weights, which is written to RUN_DIR/ema_model at the end."""

    decay: float = Field(default=0.992, gt=0, lt=1)
    """How much of the average stays at each optimizer step; 0.992 is DeepSpeed-Chat's."""


class TrainingConfig(Section):
    """What every training job has, of reinforcement learning and of the offline stages."""

    tokens_per_microbatch: int = Field(default=4096, ge=64)
    """Tokens of one forward pass, completions packed behind their shared prompt."""
    processes: int = Field(default=1, ge=1)
    """How many ranks are started on this machine."""
    threads: int | None = Field(default=None, ge=1)
    """CPU only: threads of each rank; null takes every core divided by the ranks."""
    recompute: bool = False
    """Recompute activations in the backward pass (gradient checkpointing)."""
    expert_balance: float = Field(default=0.0, ge=0)
    """Of models with experts: coefficient of each layer's loss that evens out how many tokens its experts get
    (arXiv 2101.03961, equation 4); 0, as is usual in reinforcement learning, adds none."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = None
    """null keeps no average."""
    lora: LoraConfig | None = None
    """null trains every weight. A value model's adapters are `learner.value.lora`."""
    init_from: str | None = None
    """A Megatron checkpoint whose weights the model and its reference start from, of `slipstream convert
    hf-to-megatron` or of another run, under whatever layout; model.path still gives config and tokenizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        self.parallel.check(self.processes, "learner")
        return self


class LearnerConfig(TrainingConfig):
    """A group larger than `tokens_per_microbatch` is split between its completions, but under loss dpo, whose
    pairs need it whole; a longer completion goes alone, and so does such a group."""

    steps: int = Field(default=DEFAULT_STEPS, ge=1)
    """Policy versions to make."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps per batch, each on its share of the groups."""
    loop: Annotated[str, AfterValidator(named())] | None = None
    """`package.module:function` of your own in the place of the main loop, called as f(flow) on every rank
    and written in the verbs of `learner.flow.Flow`."""
    idle_s: float | None = Field(default=None, ge=0, le=1e6)
    """Sleep for so long in the place of training on a batch, and record it under RUN_DIR/recorded: measures
    the servers alone (docs/tuning.md). null trains."""
    batch_timeout_s: Seconds = 3600.0
    """No batch for this long, while no group is delivered nor evaluated, ends the run with a diagnosis."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    value: ValueConfig | None = None
    """Of advantage gae, and of it alone."""
    ptx: PtxConfig | None = None
    """null mixes no text in."""
    reference: ReferenceConfig | None = None
    """null keeps the frozen reference, where there is one, on the learner's own ranks and in their layout."""

    @property
    def proximal_pass(self) -> bool:
        """Whether π_proximal is found by a pass without gradients before the batch's updates, and not by the
        first of them."""
        of = self.algorithm
        if of.loss == "dpo":
            return False
        measured = of.correction.kind == "decoupled" and of.correction.proximal == "computed"
        several = self.updates_per_batch > 1 and measured
        return several or of.rewards_proximal or of.correction.normalize or self._traces

    @property
    def _traces(self) -> bool:
        return self.value is not None and self.value.targets == "vtrace"

    @model_validator(mode="after")
    def _needs_the_proximal_policy(self) -> Self:
        interpolated = self.algorithm.correction.proximal == "interpolated"
        if interpolated and self._traces:
            raise ValueError(
                "value.targets vtrace takes the pass that algorithm.correction.proximal interpolated is "
                "there to save; use computed"
            )
        if interpolated and self.updates_per_batch == 1:
            raise ValueError(
                "algorithm.correction.proximal interpolated saves a pass, and updates_per_batch 1 makes "
                "none: its one update is the proximal policy's own; use computed, or more updates"
            )
        return self

    @model_validator(mode="after")
    def _counts_its_own_updates(self) -> Self:
        if self.algorithm.loss == "reinforce" and self.updates_per_batch > 1:
            raise ValueError(
                "algorithm.loss reinforce has no ratio to the policy that the batch began with, so "
                f"updates_per_batch={self.updates_per_batch} would train the later ones as though the first "
                "had changed nothing; use 1, or loss cispo or ppo"
            )
        return self

    @model_validator(mode="after")
    def _has_one_loop(self) -> Self:
        if self.idle_s is not None and self.loop is not None:
            raise ValueError("idle_s sleeps in the place of the loop, so loop would do nothing; remove one")
        return self

    @model_validator(mode="after")
    def _has_a_reference_to_place(self) -> Self:
        if self.reference is None:
            return self
        if self.lora is not None:
            raise ValueError(
                "with lora the reference is the policy's own frozen weights, with the adapters switched off, "
                "and takes no memory; remove reference"
            )
        if not self.algorithm.needs_reference:
            raise ValueError(
                "algorithm has no reference (kl.coefficient is 0 and loss is not dpo), so reference would "
                "do nothing; remove it, or set kl.coefficient"
            )
        return self

    @model_validator(mode="after")
    def _has_its_value_model(self) -> Self:
        gae = self.algorithm.advantage == "gae"
        if gae and self.value is None:
            raise ValueError(
                "algorithm.advantage gae needs a value model; set value.path to the folder it starts from"
            )
        if not gae and self.value is not None:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} has no value model, so value would do "
                "nothing; remove it, or use gae"
            )
        return self


class Sampling(Section):
    model_config = ConfigDict(extra="ignore", frozen=True)

    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)


class SampledBy(Section):
    """The facts of the rollout section that the learner's formulas depend on, and what is told of them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    group_size: int = Field(default=8, ge=1)
    episode: str | None = None
    recorded: str | None = None
    sampling: Sampling = Sampling()


class Passes(Section):
    """Of the data section, what says when there is no more of it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    epochs: int | None = Field(default=None, ge=1)


class LearnerExperiment(Experiment):
    model: ModelConfig
    data: Passes = Passes()
    buffer: BufferConfig = BufferConfig()
    rollout: SampledBy = SampledBy()
    learner: LearnerConfig = LearnerConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig | None = None
    security: SecurityConfig = SecurityConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def algorithm(self) -> AlgorithmConfig:
        """`learner.algorithm`, with what it leaves to the age of the experience decided."""
        return self.learner.algorithm.at_age(self.buffer.max_staleness)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        advantage, size = self.learner.algorithm.advantage, self.rollout.group_size
        if size == 1 and self.learner.algorithm.loss == "dpo":
            raise ValueError(
                "learner.algorithm.loss=dpo compares the completions of one prompt in pairs, and "
                "rollout.group_size=1 has no pair; take 2 or more"
            )
        if size == 1 and advantage in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f"learner.algorithm.advantage={advantage} compares the completions of one prompt, and "
                "rollout.group_size=1 has nothing to compare; take 2 or more, or reinforce_plus_plus or gae"
            )
        if size == 1 and self.buffer.dynamic_sampling:
            raise ValueError(
                "buffer.dynamic_sampling drops groups whose rewards are all equal, which is every group of "
                "rollout.group_size=1; turn it off or take 2 or more"
            )
        updates, groups = self.learner.updates_per_batch, self.buffer.groups_per_batch
        if updates > groups:
            raise ValueError(
                f"learner.updates_per_batch={updates} would split buffer.groups_per_batch={groups} groups; "
                "expected at most one update for each group"
            )
        kl = self.learner.algorithm.kl
        if kl.target is not None and kl.horizon < groups * size:
            raise ValueError(
                f"learner.algorithm.kl.horizon={kl.horizon:g} is less than one batch's {groups * size} "
                "completions (buffer.groups_per_batch · rollout.group_size); expected at least that many"
            )
        return self

    @model_validator(mode="after")
    def _is_fresh_enough(self) -> Self:
        correction, stale = self.learner.algorithm.correction, self.buffer.max_staleness
        if correction.proximal == "interpolated" and stale > INTERPOLATED_STALENESS:
            raise ValueError(
                f"learner.algorithm.correction.proximal=interpolated with buffer.max_staleness={stale}: a "
                f"line through more than {INTERPOLATED_STALENESS} versions tells nothing of the policies on "
                "its way; use computed, or fresher tokens"
            )
        if self.learner.algorithm.ignores_age and stale:
            raise ValueError(
                f"learner.algorithm: neither loss {self.learner.algorithm.loss} nor its correction has a "
                "ratio to the behavior policy in it, so tokens up to "
                f"buffer.max_staleness={stale} versions old would be trained as the policy's own; "
                f"weigh or mask by ρ within {1 / FARTHEST:g} and {FARTHEST:g}, set a veto above {VETO:g}, or "
                "use loss cispo with kind bypass"
            )
        return self

    @model_validator(mode="after")
    def _knows_the_longest(self) -> Self:
        band, limit = self.learner.algorithm.overlong.band, self.rollout.sampling.max_tokens
        if band is not None and self.rollout.episode is not None:
            raise ValueError(
                "learner.algorithm.overlong.band counts back from rollout.sampling.max_tokens, which of a "
                "rollout.episode is each turn's limit and not the conversation's; remove band"
            )
        if band is not None and band > limit:
            raise ValueError(
                f"learner.algorithm.overlong.band={band} is more than rollout.sampling.max_tokens={limit}; "
                "expected a part of it"
            )
        return self
