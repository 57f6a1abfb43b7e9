"""The demo's samples a second against TRL's GRPO trainer: same task, model, batch and machine.

    python benchmarks/demo_against_trl.py

Runs one after the other: TRL in an environment of its own (.cache/trl, made on the first call), then
`slipstream run configs/demo.yaml` for a few steps. A step is 64 samples of at most 48 tokens on both
sides; the first step of each is left out, and start-up counts on neither. Slipstream's next three are left
out too: a server fills its places before the first step, and what is generated then would cost nothing.
Writes benchmarks/results/demo_against_trl.json.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import write_result

from buffer.processor import native_dtype

MODEL = ".cache/models/SmolLM2-135M-Instruct"
TRL = Path(".cache/trl")
SAMPLES = 64
BEFOREHAND = 3
"""Batches that the server may have in hand."""
SAME_BATCH = (
    "buffer.groups_per_batch=8",
    f"rollout.max_groups={8 * BEFOREHAND}",
    "rollout.sampling.max_tokens=48",
)
"""The demo's own steps are half as large: what TRL is given, 64 samples of at most 48 tokens."""


def trl_step_seconds(steps: int, out: str) -> list[float]:
    if not (TRL / "bin/trl").exists():
        subprocess.run(["python3.11", "-m", "venv", str(TRL)], check=True)
        subprocess.run([TRL / "bin/pip", "install", "--quiet", "torch==2.13.0", "trl==1.16.0"], check=True)
    command = [
        TRL / "bin/python",
        "benchmarks/trl_grpo.py",
        "--model",
        MODEL,
        "--steps",
        str(steps),
        "--out",
        out,
    ]
    if native_dtype() == "bfloat16":
        command.append("--bf16")
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (text for text in printed.splitlines() if text.startswith('{"trl_step_seconds"'))
    return json.loads(line)["trl_step_seconds"]


def slipstream_step_seconds(steps: int, run_dir: str) -> list[float]:
    command = [Path(sys.executable).parent / "slipstream", "run", "configs/demo.yaml"]
    command += [f"run_dir={run_dir}", f"learner.steps={steps}", "eval=null", *SAME_BATCH]
    command += [f"model.dtype={native_dtype()}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    # The last step's checkpoint is none of its work: TRL is told to write none.
    times = [(row["time"], row.get("time/checkpoint", 0.0)) for row in rows]
    return [later - earlier - saving for (earlier, _), (later, saving) in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--trl-steps", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        plain = trl_step_seconds(args.trl_steps, f"{work}/trl")[1:]
        ours = slipstream_step_seconds(args.steps, f"{work}/run")
    # Slipstream's steps overlap with generation and come unevenly: its rate is over the whole stretch.
    counted = ours[BEFOREHAND:]
    rate, trl_rate = SAMPLES * len(counted) / sum(counted), SAMPLES / statistics.median(plain)
    write_result(
        "demo_against_trl",
        {
            "dtype": native_dtype(),
            "samples_per_step": SAMPLES,
            "slipstream_step_seconds": [round(s, 2) for s in ours],
            "trl_step_seconds": [round(s, 2) for s in plain],
            "slipstream_samples_per_s": rate,
            "trl_samples_per_s": trl_rate,
            "ratio": rate / trl_rate,
            "target": 2.5,
        },
    )


if __name__ == "__main__":
    main()
