"""What is done about tokens of another policy, as section `learner.algorithm.correction` says it."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from buffer.experiment import Section

Level = Literal["token", "sequence", "geometric", "none"]
"""Over which tokens a ratio is taken: one; all of a completion, as a product; all of it, as the geometric
mean of one; or no ratio is."""

BANDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.99, 1.01),
    "none": (0.0, math.inf),
}
"""Where a ratio of that level must lie unless the file says otherwise."""

TAPERED: dict[Level, tuple[float, float]] = {
    "token": (0.5, math.inf),
    "sequence": (0.5, math.inf),
    "geometric": (0.8, math.inf),
    "none": (0.0, math.inf),
}
"""The same with taper, of tokens with A ≤ 0."""

CAP = BANDS["token"][1]
"""Past this a single token's ratio says more of itself than of the policy: no default mask keeps it. Of the
weight that a sample of μ has in a mean over π where the file sets no cap, and of ρ in its mean."""
VETO = 1e-4
FARTHEST = 100.0
"""A mask or a cap for ratios that are farther from 1 bounds nothing."""
MASKS = ("mask", "mask_low", "mask_high")
TAPERED_ABOVE = 2
"""Versions of age past which the correction tapers unless the file says otherwise (docs/experiments.md)."""


def changed(section: Section, *keys: str) -> list[str]:
    """Which of the keys differ from their defaults; a resolved file names every key, the defaults too. What
    is switched off is as good as left open."""
    values = ((k, getattr(section, k), type(section).model_fields[k].default) for k in keys)
    return sorted(k for k, value, default in values if value is not False and value != default)


class CorrectionConfig(Section):
    """What is done about ρ = π_proximal / π_behavior, the distance between learner and sampling policy."""

    kind: Literal["decoupled", "bypass"] = "decoupled"
    """decoupled: the loss's ratio is to the proximal policy and ρ weighs it (arXiv 2110.00641); bypass:
    the loss's ratio is to the behavior policy, and ρ, with π in the place of π_proximal, is no weight."""
    proximal: Literal["computed", "interpolated"] = "computed"
    """Of several updates_per_batch: π_proximal of a pass before them, or estimated from π, π_behavior and the
    tokens' versions, without a pass (A-3PO, arXiv 2512.06547)."""
    weight: Level | None = None
    """Whose ρ weighs a token's policy loss; null: the token's, and with loss gspo its completion's geometric
    mean."""
    taper: bool | None = None
    """What is to become likelier (A > 0) has a weight of 1 and is not masked; other weights are at most 1
    (arXiv 2503.14286). null: where buffer.max_staleness is above 2, loss is ppo, a completion has one
    advantage, and this section has no word about weights and masks."""
    cap: float | None = Field(default=None, ge=1)
    """Weights are truncated there (truncated importance sampling); null does not truncate."""
    normalize: bool = False
    """Weights are divided by their mean over the optimizer step's batch, which takes a pass before it."""
    mask: Level | None = None
    """Whose ρ has to lie in [mask_low, mask_high] for a token to be trained; null: the token's, with taper
    the geometric mean, and with kind bypass none has to."""
    mask_low: float | None = Field(default=None, ge=0)
    mask_high: float | None = Field(default=None, gt=0)
    """null: 0.5 and 5 of a token, 0.5 and 2 of a sequence, 0.99 and 1.01 of a geometric mean; with taper
    nothing is too high, and 0.8 too low for a geometric mean."""
    veto: float | None = Field(default=None, ge=0)
    """A sequence with any token whose ρ is below this is not trained; 0 never vetoes. null: 1e-4, and with
    kind bypass 0."""

    @property
    def is_open(self) -> bool:
        """Whether the file says nothing of what would be tapered."""
        return self.kind == "decoupled" and not changed(self, "weight", "cap", "normalize", *MASKS)

    @property
    def mask_level(self) -> Level:
        unset: Level = "none" if self.kind == "bypass" else "geometric" if self.taper else "token"
        return self.mask or unset

    @property
    def band(self) -> tuple[float, float]:
        low, high = (TAPERED if self.taper else BANDS)[self.mask_level]
        return (
            low if self.mask_low is None else self.mask_low,
            high if self.mask_high is None else self.mask_high,
        )

    @property
    def stops_some(self) -> bool:
        """Whether the mask, or a veto above the default one, is for ratios that tokens may have."""
        low, high = self.band
        return low >= 1 / FARTHEST or high <= FARTHEST or self.veto_below > VETO

    @property
    def veto_below(self) -> float:
        unset = 0.0 if self.kind == "bypass" else VETO
        return unset if self.veto is None else self.veto

    @model_validator(mode="after")
    def _counts_the_ratio_once(self) -> Self:
        twice = changed(self, "weight", "taper", "cap", "normalize")
        if self.kind == "bypass" and twice:
            raise ValueError(
                f"kind bypass has the ratio to the behavior policy in its loss, and {', '.join(twice)} would "
                "weigh by it once more; remove it, or use kind decoupled"
            )
        if self.kind == "bypass" and self.proximal != "computed":
            raise ValueError("kind bypass has no proximal policy, so proximal would do nothing; remove it")
        return self

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        idle = changed(self, "mask_low", "mask_high")
        if self.mask_level == "none" and idle:
            where = "mask none" if self.mask else "kind bypass without mask"
            raise ValueError(f"{where} bounds no ρ, so {', '.join(idle)} would do nothing; remove it")
        low, high = self.band
        if not low <= 1 <= high or self.veto_below >= 1:
            raise ValueError(
                f"mask [{low:g}, {high:g}] and veto {self.veto_below:g} would not train "
                "a token with ρ = 1; expected mask_low ≤ 1 ≤ mask_high and veto < 1"
            )
        return self

    @model_validator(mode="after")
    def _weighs_by_something_finite(self) -> Self:
        idle = changed(self, "cap", "normalize", "taper")
        if self.weight == "none" and idle:
            raise ValueError(
                f"weight none is 1 everywhere, so {', '.join(idle)} would change no weight; remove it, or "
                "weight none"
            )
        idle = changed(self, "cap", "normalize")
        if self.taper and idle:
            raise ValueError(
                "taper makes weights of 1 where A > 0 and of at most 1 elsewhere, which "
                f"{', '.join(idle)} would undo or do nothing to; remove it, or taper"
            )
        bounded = (
            self.taper
            or (self.cap is not None and self.cap <= FARTHEST)
            or (self.mask_level == "sequence" and self.band[1] <= FARTHEST)
        )
        if self.weight == "sequence" and not bounded:
            raise ValueError(
                "weight sequence is a product over a completion's tokens, which grows with its length "
                f"without bound; set cap (2 to 10 is usual, more than {FARTHEST:g} is none), or mask sequence"
            )
        return self

    @model_validator(mode="after")
    def _knows_the_weights_in_time(self) -> Self:
        if self.normalize and self.proximal == "interpolated":
            raise ValueError(
                "normalize takes the pass that proximal interpolated is there to save; use proximal computed"
            )
        return self
