"""README's pictures of a finished run of the demo: its screen while it ran, and its reward.

    python benchmarks/demo_pictures.py [RUN_DIR] [--step 20]

Reads the run's folder (runs/demo); writes docs/pictures/demo_screen.svg and demo_reward.png.
"""

import argparse
import io
import shutil
from pathlib import Path

from rich.console import Console

from launch.experiment import WholeExperiment
from launch.history import History
from launch.screen import render
from launch.summary import read_config

PICTURES = Path("docs/pictures")
COLUMNS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--step", type=int, default=20, help="of the screen")
    options = parser.parse_args()
    experiment = WholeExperiment.model_validate(read_config(options.run_dir))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(screen_at(options.step, experiment, History(options.run_dir, opened=0.0)))
    console.save_svg(str(PICTURES / "demo_screen.svg"), title="slipstream run configs/demo.yaml")
    shutil.copy(options.run_dir / "report" / "reward.png", PICTURES / "demo_reward.png")


def screen_at(step: int, experiment: WholeExperiment, history: History):
    """As it stood when the step was done."""
    history.refresh()
    then = history.steps[step]["time"]
    started = min(line["time"] for lines in history.servers.values() for line in lines)
    history.steps = {s: row for s, row in history.steps.items() if s <= step}
    history.scores = {v: score for v, score in history.scores.items() if v < step}
    history.buffer = [line for line in history.buffer if line["time"] <= then]
    history.servers = {
        name: [line for line in lines if line["time"] <= then] for name, lines in history.servers.items()
    }
    states = dict.fromkeys(("buffer", *history.servers, "learner"), "running")
    return render(experiment, history, "training", states, then - started, [], COLUMNS)


if __name__ == "__main__":
    main()
