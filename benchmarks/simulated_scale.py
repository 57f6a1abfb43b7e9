"""What the simulation makes of 8 to 4,096 devices, with the costs that benchmarks/async_speedup.py measured.

    python benchmarks/simulated_scale.py [--largest 4096]

A device is what was one core there. Half of them are rollout servers of one device each, half the learner,
and a batch has a group for every device, so work grows as the machine does. Assumed: training is shared out
without loss, and sending, loading and pausing take as long as measured whatever the number (servers are all
in one broadcast). So what the figures show is queues and tails alone. Writes
benchmarks/results/simulated_scale.json and its picture in docs/pictures/.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from record import RESULTS, write_result

from buffer.staleness import Rules
from launch.simulation import Costs, Setting, simulate

DEVICES = (8, 32, 128, 512, 2048, 4096)
STALENESS = (0, 1, 2, 4, 8)
STEPS, WARM_UP = 40, 12
PICTURE = Path("docs/pictures/simulated_scale.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--largest", type=int, default=DEVICES[-1])
    options = parser.parse_args()
    measured = json.loads((RESULTS / "async_speedup.json").read_text())["rounds"][0]["costs"]
    runs: list[dict[str, Any]] = []
    for devices in (n for n in DEVICES if n <= options.largest):
        servers = devices // 2
        of = {key: tuple(value) if isinstance(value, list) else value for key, value in measured.items()}
        costs = Costs(**of | {"train": measured["train"] / servers})
        for staleness in STALENESS:
            started = time.perf_counter()
            setting = Setting(servers, 8, 8, Rules(devices, staleness), 1 << 30)
            made = simulate(costs, setting, STEPS, WARM_UP)
            runs.append({
                "devices": devices, "max_staleness": staleness,
                "groups_per_device_second": round(made.groups_per_second / devices, 4),
                "learner_idle": round(made.learner_idle, 3), "server_idle": round(made.server_idle, 3),
                "staleness_mean": round(made.staleness_mean, 2), "staleness_max": made.staleness_max,
                "evicted": made.evicted,
            })  # fmt: skip
            print(runs[-1], f"{time.perf_counter() - started:.1f} s", flush=True)
    write_result("simulated_scale", {"costs": measured, "steps": STEPS, "runs": runs})
    draw(runs)


def draw(runs: list[dict[str, Any]]) -> None:
    from launch.plots import STYLE, plt

    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.4}):
        figure, panels = plt.subplots(1, 2, layout="constrained", figsize=(9, 3))
        for place, staleness in enumerate(STALENESS):
            of = [r for r in runs if r["max_staleness"] == staleness]
            color = plt.get_cmap("viridis")(0.92 * place / (len(STALENESS) - 1))
            for axes, key in zip(panels, ("groups_per_device_second", "staleness_mean"), strict=True):
                axes.plot(
                    [r["devices"] for r in of], [r[key] for r in of], "o-", color=color, label=staleness
                )
        for axes, title in zip(panels, ("groups per device and second", "mean staleness"), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(title)
            axes.set_xlabel("devices")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="max_staleness", fontsize=7, loc="outside right center")
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
