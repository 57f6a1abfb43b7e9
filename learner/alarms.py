"""When a step's numbers say that the data is too far off the policy: one line at each onset, with advice."""

from dataclasses import dataclass, field

from learner.correction_config import CAP

LOWEST_ESS = 0.5
FURTHEST_RHO = 0.05
"""How far the mean of ρ may be off 1."""


@dataclass(slots=True)
class Alarms:
    """Which are ringing; a number that is None neither starts nor ends one."""

    dtype: str
    """Of the model: it decides what the advice may be, as does the next."""
    weighs: bool = True
    """Whether there are weights without a cap, and one would take the place of nothing better."""
    ringing: set[str] = field(default_factory=set)

    def hear(self, step: int, ess: float | None, rho: float | None, left_out: float = 0.0) -> list[str]:
        """The lines of alarms that start at this step.

        Args:
            ess: Effective share of the sample, of the weights that trained tokens have; as in the step's row.
            rho: Mean of ρ, none counted above CAP: one token that is masked as a mismatch would move a plain
                mean of thousands, and a mean over what is kept is off 1 by what the mask takes from below.
            left_out: Share of the tokens that are not trained, which no cap brings back.
        """
        lines, cap = [], ", or truncate the weights (learner.algorithm.correction.cap)"
        if self._starts("ess", None if ess is None else ess < LOWEST_ESS):
            lines.append(
                f"step {step}: the effective sample size is {ess:.2f} of the batch, below {LOWEST_ESS:g}: "
                "few tokens make the gradient. Lower buffer.max_staleness or learner.optimizer.lr"
                f"{cap if self.weighs and 1 - left_out >= LOWEST_ESS else ''}"
            )
        if self._starts("rho", None if rho is None else abs(rho - 1) > FURTHEST_RHO):
            disagree = (
                "If it has been from the first step on, learner and engine disagree about the same weights: "
                "try model.dtype=float32. If it grew, tokens"
            )
            lines.append(
                f"step {step}: the mean of ρ is {rho:.3f} (none counted above {CAP:g}), off 1 by more than "
                f"{FURTHEST_RHO:g}. "
                f"{'Tokens' if self.dtype == 'float32' else disagree} are too old: lower "
                "buffer.max_staleness or learner.optimizer.lr"
            )
        return lines

    def _starts(self, name: str, is_bad: bool | None) -> bool:
        starts = bool(is_bad) and name not in self.ringing
        if is_bad:
            self.ringing.add(name)
        elif is_bad is not None:
            self.ringing.discard(name)
        return starts
