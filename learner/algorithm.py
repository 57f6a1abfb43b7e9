"""What is optimized, as section `learner.algorithm` says it: advantage, loss, correction, KL."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from buffer.dotted import named
from buffer.experiment import Section


def _changed(section: Section, *keys: str) -> list[str]:
    """Which of the keys differ from their defaults; a resolved file names every key, the defaults too."""
    return sorted(k for k in keys if getattr(section, k) != type(section).model_fields[k].default)


class CorrectionConfig(Section):
    """What is done about ρ = π_proximal / π_behavior, the distance between learner and sampling policy."""

    kind: Literal["decoupled", "bypass"] = "decoupled"
    """decoupled: PPO's ratio is to the proximal policy and ρ weighs it (arXiv 2110.00641); bypass:
    PPO's ratio is to the behavior policy and there is no ρ."""
    mask_low: float = Field(default=0.5, ge=0)
    mask_high: float = Field(default=5.0, gt=0)
    """Tokens whose ρ lies outside [mask_low, mask_high] are not trained."""
    veto: float = Field(default=1e-4, ge=0)
    """A sequence with any token whose ρ is below this is not trained; 0 never vetoes."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        idle = _changed(self, "mask_low", "mask_high", "veto")
        if self.kind == "bypass" and idle:
            raise ValueError(f"kind bypass has no ρ, so {', '.join(idle)} would do nothing; remove it")
        if not self.mask_low <= 1 <= self.mask_high or self.veto >= 1:
            raise ValueError(
                f"mask [{self.mask_low:g}, {self.mask_high:g}] and veto {self.veto:g} would not train "
                "a token with ρ = 1; expected mask_low ≤ 1 ≤ mask_high and veto < 1"
            )
        return self


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
        idle = _changed(self, "placement", "target", "horizon")
        if not self.coefficient and idle:
            raise ValueError(f"coefficient 0 stays 0, so {', '.join(idle)} would do nothing")
        if self.target is None and _changed(self, "horizon"):
            raise ValueError("without target the coefficient is fixed, so horizon would do nothing")
        if self.placement == "reward" and self.estimate != "k1":
            raise ValueError(
                f"estimator {self.estimate} is never negative: taken off the reward it also punishes what "
                "the policy gives less than the reference, and drives it further off; use k1, or the loss"
            )
        return self


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae")
LOSSES = ("ppo", "reinforce", "dpo")


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
    loss: Annotated[str, AfterValidator(named(*LOSSES))] = "ppo"
    """ppo, reinforce, dpo (online DPO: each pair of a group's completions with different rewards is a
    preference), or `package.module:function` of your own, called as f(logprobs, old_logprobs, batch) ->
    the loss of every token."""
    dpo: PairLossConfig = PairLossConfig()
    """Of loss dpo."""
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.2, ge=0)
    """PPO's ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Loss is the mean over the batch's trained tokens; the mean over sequences of each one's token mean; or
    the sum divided by sequences · model.max_length (Dr.GRPO, arXiv 2503.20783)."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> Self:
        for setting in _changed(self, *UNUSED_BY_DPO) if self.loss == "dpo" else ():
            reason = UNUSED_BY_DPO[setting]
            raise ValueError(f"{setting} would do nothing with loss dpo: {reason}; remove it")
        idle = _changed(self, "clip_low", "clip_high")
        if self.loss != "ppo" and idle:
            raise ValueError(f"loss {self.loss} does not clip by it, so {', '.join(idle)} would do nothing")
        if self.loss != "dpo" and _changed(self, "dpo"):
            raise ValueError(f"loss {self.loss} compares no pairs, so dpo would do nothing; take loss dpo")
        if self.kl.placement == "reward" and self.advantage not in ("gae", "reinforce_plus_plus"):
            raise ValueError(
                f"kl.placement reward makes a reward for every token, and advantage {self.advantage} "
                "compares one number of each completion; use gae, reinforce_plus_plus, or kl.placement loss"
            )
        return self

    @property
    def per_token(self) -> bool:
        """Whether the tokens of one completion differ in their advantage."""
        return self.advantage == "gae" or self.kl.placement == "reward"

    @property
    def told(self) -> str:
        """What it is called in one word or two."""
        return "online dpo" if self.loss == "dpo" else self.advantage

    @property
    def needs_reference(self) -> bool:
        """Whether the initial policy is kept beside the policy, frozen."""
        return self.loss == "dpo" or self.kl.coefficient > 0
