"""What is optimized, as section `learner.algorithm` says it: advantage, loss, correction, KL."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from buffer.dotted import is_dotted, named
from buffer.experiment import Section
from learner.correction_config import TAPERED_ABOVE, CorrectionConfig, Level, changed

Estimator = Literal["k1", "k2", "k3"]


class KLConfig(Section):
    """Distance to the frozen reference model, the initial policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """0 loads no reference model; where `target` is set, the coefficient of the first step."""
    placement: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of every token."""
    estimator: Estimator | None = None
    """null: k3 in the loss, k1 in the reward."""
    target: float | None = Field(default=None, gt=0)
    """Nats of one completion, summed over its tokens, that the coefficient is moved to hold (arXiv
    1909.08593, section 2.2); null keeps the coefficient."""
    horizon: float = Field(default=10000.0, gt=0)
    """Completions over which the coefficient changes by at most a factor of about e^0.2."""

    @property
    def estimate(self) -> Estimator:
        return self.estimator or ("k3" if self.placement == "loss" else "k1")

    @model_validator(mode="after")
    def _works(self) -> Self:
        idle = changed(self, "placement", "target", "horizon")
        if not self.coefficient and idle:
            raise ValueError(f"coefficient 0 stays 0, so {', '.join(idle)} would do nothing")
        if self.target is None and changed(self, "horizon"):
            raise ValueError("without target the coefficient is fixed, so horizon would do nothing")
        if self.placement == "reward" and self.estimate != "k1":
            raise ValueError(
                f"estimator {self.estimate} is never negative: taken off the reward it also punishes what "
                "the policy gives less than the reference, and drives it further off; use k1, or the loss"
            )
        if self.placement == "loss" and self.estimate == "k1":
            raise ValueError(
                "estimator k1 has a gradient of 0 in expectation, so as a loss it holds the policy to "
                "nothing; use k2 or k3, or placement reward"
            )
        return self


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae")
LOSSES = ("ppo", "reinforce", "cispo", "gspo", "dppo", "m2po", "dpo")
CLIPS = {"ppo": (0.2, 0.2), "cispo": (1.0, 5.0), "gspo": (3e-4, 4e-4), "dppo": (0.2, 0.2)}
"""Below and above, of the losses that clip, unless the file says otherwise."""
BYPASSING = ("dppo", "m2po")
"""Losses whose ratio is π / μ by definition."""


class PairLossConfig(Section):
    """The loss over pairs of responses to one prompt; d is the difference of their log π / π_reference."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290); ipo: squared distance to a margin of 1 / 2β (arXiv 2310.12036)."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Chance that a preference is the wrong way round (cDPO); for the sigmoid loss."""

    @model_validator(mode="after")
    def _smooths_labels(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("loss ipo has no labels to smooth; remove label_smoothing or take loss sigmoid")
        return self


class DPPOConfig(Section):
    penalty: float = Field(default=1e-3, ge=0)
    """Coefficient of (log π - log μ)², at every token."""


class M2POConfig(Section):
    second_moment: float = Field(default=0.04, gt=0)
    """Largest mean of (log π - log μ)² over the tokens that the update drives further from the sampler; the
    furthest off of these are left out."""


class OverlongConfig(Section):
    """What is done about completions at their limit of length (DAPO, arXiv 2503.14476, section 3.4)."""

    band: int | None = Field(default=None, ge=1)
    """Tokens before rollout.sampling.max_tokens over which the reward falls with each one; null: none."""
    penalty: float = Field(default=1.0, gt=0)
    """By how much it falls over the band."""
    filter: bool = False
    """A completion that was cut by its length is not trained; its reward counts for its group's others."""

    @model_validator(mode="after")
    def _penalises(self) -> Self:
        if self.band is None and changed(self, "penalty"):
            raise ValueError("without band no reward falls, so penalty would do nothing; set band")
        return self


UNUSED_BY_DPO = {
    "advantage": "dpo compares the completions of a group by their rewards",
    "clip_low": "dpo clips no ratio",
    "clip_high": "dpo clips no ratio",
    "aggregate": "dpo sums a completion's logprobs and takes the mean over pairs, then over groups",
    "correction": "dpo has no ratio to the sampling policy: whoever sampled them, pairs are pairs",
    "kl": "dpo.beta is what holds the policy to the reference",
    "entropy": "dpo has no term for it",
}
"""Settings that would do nothing under loss dpo, and why."""


class AlgorithmConfig(Section):
    advantage: Annotated[str, AfterValidator(named(*ADVANTAGES))] = "grpo"
    """grpo, dr_grpo, rloo, reinforce_plus_plus, gae, or `package.module:function` of your own, called as
    f(rewards of one group) -> as many advantages."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Rewards are clipped to [-reward_clip, reward_clip] before anything else; null leaves them."""
    overlong: OverlongConfig = OverlongConfig()
    loss: Annotated[str, AfterValidator(named(*LOSSES))] = "ppo"
    """ppo, reinforce, cispo, gspo, dppo, m2po, dpo (online DPO: each pair of a group's completions with
    different rewards is a preference), or `package.module:function` of your own, called as
    f(logprobs, old_logprobs, batch) -> the loss of every token."""
    dpo: PairLossConfig = PairLossConfig()
    """Of loss dpo."""
    dppo: DPPOConfig = DPPOConfig()
    """Of loss dppo."""
    m2po: M2POConfig = M2POConfig()
    """Of loss m2po."""
    clip_low: float | None = Field(default=None, ge=0)
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; of loss dppo, how far a probability may fall and
    rise. null: 0.2 and 0.2 of ppo and dppo, 1 and 5 of cispo, 3e-4 and 4e-4 of gspo."""
    aggregate: Literal["token", "sequence", "constant"] | None = None
    """Loss is the mean over the batch's trained tokens; the mean over sequences of each one's token mean; or
    the sum divided by sequences · model.max_length (Dr.GRPO, arXiv 2503.20783). null: token, and of loss gspo
    sequence."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> Self:
        for setting in changed(self, *UNUSED_BY_DPO) if self.loss == "dpo" else ():
            reason = UNUSED_BY_DPO[setting]
            raise ValueError(f"{setting} would do nothing with loss dpo: {reason}; remove it")
        idle = changed(self, "clip_low", "clip_high")
        if self.loss not in CLIPS and idle:
            raise ValueError(f"loss {self.loss} does not clip by it, so {', '.join(idle)} would do nothing")
        for other in changed(self, "dpo", "dppo", "m2po"):
            if other != self.loss:
                raise ValueError(f"{other} is of loss {other} and would do nothing with loss {self.loss}")
        if self.kl.placement == "reward" and self.advantage not in ("gae", "reinforce_plus_plus"):
            raise ValueError(
                f"kl.placement reward makes a reward for every token, and advantage {self.advantage} "
                "compares one number of each completion; use gae, reinforce_plus_plus, or kl.placement loss"
            )
        return self

    @model_validator(mode="after")
    def _corrects_something(self) -> Self:
        of = self.correction
        if of.cap is not None and self.weight_level == of.mask_level and of.cap >= of.band[1]:
            raise ValueError(
                f"correction.cap {of.cap:g} is not below mask_high {of.band[1]:g} of the same ρ, past which "
                "no token is trained, so it would do nothing; lower it, or set mask none"
            )
        if self.rewards_proximal and of.proximal == "interpolated":
            raise ValueError(
                "kl.placement reward takes the pass that correction.proximal interpolated is there to save; "
                "use proximal computed, or kl.placement loss"
            )
        return self

    @model_validator(mode="after")
    def _measures_from_the_right_policy(self) -> Self:
        bypass = self.correction.kind == "bypass"
        if self.loss in BYPASSING and not bypass:
            raise ValueError(
                f"loss {self.loss} has the ratio to the behavior policy in it, and correction.kind decoupled "
                "would weigh by that distance once more; set correction.kind: bypass"
            )
        idle = [k for k in changed(self, "clip_low", "clip_high") if getattr(self, k) >= 1]
        if self.loss == "dppo" and idle:
            raise ValueError(
                f"of loss dppo {', '.join(idle)} bounds by how much a probability may change, and none "
                "changes by 1 or more, so it would stop nothing; expected less than 1"
            )
        if self.loss == "gspo" and bypass and len(changed(self, "clip_low", "clip_high")) < 2:
            raise ValueError(
                "loss gspo clips at 3e-4 and 4e-4 from the proximal policy, and with correction.kind bypass "
                "from the behavior policy, further off than that by its rounding alone; set clip_low and "
                "clip_high, or kind decoupled"
            )
        return self

    @property
    def clip(self) -> tuple[float, float]:
        """Below and above, of a loss that clips."""
        low, high = CLIPS[self.loss]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def aggregation(self) -> Literal["token", "sequence", "constant"]:
        return self.aggregate or ("sequence" if self.loss == "gspo" else "token")

    def at_age(self, staleness: int) -> Self:
        """The same with the taper decided, if it was left open, for experience up to so many versions old."""
        of = self.correction
        if of.taper is not None:
            return self
        fits = self.loss == "ppo" and not self.per_token and of.is_open
        decided = of.model_copy(update={"taper": fits and staleness > TAPERED_ABOVE})
        return self.model_copy(update={"correction": decided})

    @property
    def ignores_age(self) -> bool:
        """Whether nothing tells another policy's token from one of the policy's own: no ratio of the loss, no
        weight, no mask, no veto above the default one, which corrects nothing by itself."""
        of = self.correction
        if of.kind == "bypass" and self.loss != "reinforce":
            return False
        return self.weight_level == "none" and not of.stops_some

    @property
    def per_token(self) -> bool:
        """Whether the tokens of one completion differ in their advantage."""
        return self.advantage == "gae" or self.kl.placement == "reward"

    @property
    def trains_equal_groups(self) -> bool:
        """Whether a group with equal rewards, whose advantages are 0, has a gradient all the same."""
        others = (self.kl.coefficient, self.entropy, self.loss == "dppo" and self.dppo.penalty)
        return self.per_token or is_dotted(self.loss) or any(others)

    @property
    def rewards_proximal(self) -> bool:
        """Whether KL in the reward is the proximal policy's; with `bypass` the behavior policy stands in."""
        return self.kl.placement == "reward" and self.correction.kind == "decoupled"

    @property
    def weight_level(self) -> Level:
        """Whose ρ weighs a token's policy loss."""
        if self.correction.kind == "bypass":
            return "none"
        return self.correction.weight or ("geometric" if self.loss == "gspo" else "token")

    @property
    def told(self) -> str:
        """What it is called in a few words."""
        name = "online dpo" if self.loss == "dpo" else self.advantage
        return f"{name} with a taper" if self.correction.taper else name

    @property
    def needs_reference(self) -> bool:
        """Whether the initial policy is kept beside the policy, frozen."""
        return self.loss == "dpo" or self.kl.coefficient > 0
