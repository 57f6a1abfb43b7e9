"""What it brings, and what it costs, that batches wait for a group whose last turn it is.

    python benchmarks/keeping_turns.py

A simulation (`launch/simulation.py`, the buffer's own rules): `fifo` as it is, the same batches without
waiting, and `freshest`, under durations that are alike, a little skewed and much skewed, for a learner that
trains four groups in a second and one with larger batches and a faster learner. Writes
benchmarks/results/keeping_turns.json.
"""

import random
from typing import Any

from record import write_result

from buffer.staleness import Rules
from launch.simulation import Costs, Setting, simulate

GROUPS = 400
STEPS = 300


class Hurried(Rules):
    """Takes whatever is ready."""

    @property
    def keeps_turns(self) -> bool:
        return False


DURATIONS = {"alike": 0.0, "sigma 0.3": 0.3, "sigma 0.8": 0.8}
"""Standard deviation of the logarithm of a group's seconds; the median is 7.4 s."""
LEARNERS = {"4 groups a batch, 1 s each": (4, 12, 1.0), "16 groups a batch, 0.2 s each": (16, 48, 0.2)}
"""Groups a batch, groups in hand, seconds a group."""


def main() -> None:
    runs: list[dict[str, Any]] = []
    for durations, spread in DURATIONS.items():
        chance = random.Random(3)
        work = tuple(chance.lognormvariate(2, spread) for _ in range(GROUPS))
        for learner, (size, in_hand, train) in LEARNERS.items():
            costs = Costs(work, contention=0.0, train=train, send=0.3, load=(0.3,), pause=0.1)
            for staleness in (1, 2, 4):
                rules = {
                    "turns kept": Rules(size, staleness),
                    "not kept": Hurried(size, staleness),
                    "freshest": Rules(size, staleness, "freshest"),
                }
                for name, of in rules.items():
                    made = simulate(costs, Setting(1, in_hand, in_hand, of, 4096), STEPS)
                    runs.append({
                        "durations": durations, "learner": learner, "max_staleness": staleness, "rules": name,
                        "groups_per_second": round(made.groups_per_second, 3),
                        "evicted": round(made.evicted, 4),
                        "trained_length_ratio": round(made.work_trained, 3),
                        "staleness_mean": round(made.staleness_mean, 2),
                    })  # fmt: skip
    write_result("keeping_turns", {"steps": STEPS, "runs": runs})


if __name__ == "__main__":
    main()
