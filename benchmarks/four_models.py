"""Does PPO with four models learn? `configs/ppo_four.yaml` on the models of the tutorial's first two stages.

    python benchmarks/tutorial.py
    python benchmarks/four_models.py [RUN_DIR]      again, it goes on where it was stopped

The policy and its reference start from the tutorial's SFT model; its reward model scores, in an engine of its
own, and is what the value model starts from. Measured on completions of sums that no stage trains, of the
first and of the last version. Writes `benchmarks/results/four_models.json`.
"""

import json
import subprocess
import sys
from pathlib import Path

from record import write_result
from tutorial import HOME, rl

SFT, REWARD = Path("runs/tutorial/sft/model"), Path("runs/tutorial/reward/model")
OVERRIDES = [
    f"model.path={SFT}",
    f"learner.value.path={REWARD}",
    # As in the tutorial, for the same reason: answers of few tokens, and few ways to go.
    "learner.optimizer={lr: 4.0e-6, schedule: cosine, warmup_steps: 3}",
    "eval.samples=8",
]
SHOWN = ("value/loss", "value/explained_variance", "kl/completion", "kl/coefficient", "time/step")


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/four_models")
    command = [sys.executable, "-m", "launch", "run", "configs/ppo_four.yaml", f"run_dir={run_dir}"]
    subprocess.run([*command, *OVERRIDES], cwd=HOME, check=True)
    rows = [json.loads(line) for line in (HOME / run_dir / "metrics.jsonl").read_text().splitlines()]
    curves = {name: [round(row[name], 4) for row in rows if name in row] for name in SHOWN}
    write_result("four_models", {"overrides": OVERRIDES, **rl(HOME / run_dir), "curves": curves})


if __name__ == "__main__":
    main()
