"""What the buffer and the publisher do under load: memory, disk and latencies over millions of trajectories.

The real service in its own process (what `slipstream buffer` starts), over loopback TCP, with SQLite on
this machine's disk; simulated rollout servers and one learner's readers around it (`load_clients.py`). First
as fast as the machine goes, until `--total` trajectories are trained or `--seconds` are over; then the
learner is slow, and the servers have to wait for it. What is trained is checked: nothing twice, nothing older
than the bound. Then members join a publisher over gloo (`load_members.py`), and every one receives versions.

    python benchmarks/load.py [--total 10000000] [--seconds 900] [--clients 256] [--readers 64]

Writes benchmarks/results/load.json and its picture in docs/pictures/.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from load_clients import PROMPT_TOKENS, RUN, TOKENS
from load_members import measure_members, seen
from record import RESULTS, write_result

from buffer.client import BufferClient

ROWS = 100_000
MAX_STALENESS = 3
PAUSE_S = 1.0
"""Between two batches of a slow learner."""
SAMPLE_S = 1.0
SERIES_S = 20.0
"""Of the samples the highest in each of so many seconds are kept."""
PICTURE = Path("docs/pictures/load.png")
CLIENTS = Path(__file__).with_name("load_clients.py")
Sample = dict[str, float]
COUNTED = ("stored", "leased", "waiting_leases", "groups_in", "evicted", "duplicates")
"""Of the buffer's status."""


class Service:
    """The buffer's process, and what is seen of it from outside."""

    def __init__(self, folder: Path, address: str, groups_per_batch: int) -> None:
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"What is {i} + 1?"}) + "\n" for i in range(ROWS)))
        buffer = {"address": address, "groups_per_batch": groups_per_batch, "max_staleness": MAX_STALENESS}
        data = {"train": {"kind": "jsonl", "path": str(rows)}}
        config = folder / "load.yaml"
        self.run_dir = folder / "run"
        config.write_text(
            json.dumps({"name": RUN, "run_dir": str(self.run_dir), "data": data, "buffer": buffer})
        )
        command = [sys.executable, "-m", "buffer", str(config), "logging.level=WARNING"]
        self.process = subprocess.Popen(command)

    def sample(self, status: dict[str, Any]) -> Sample:
        pid = self.process.pid
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "time": time.time(),
            **seen(pid),
            "cpu_s": (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK"),
            "database_mib": self._mib("buffer.sqlite"),
            "log_mib": self._mib("buffer.sqlite-wal"),
            **{key: status[key] for key in COUNTED},
            "loop_lag_s": status["loop_lag_s"],
        }

    def _mib(self, name: str) -> float:
        return (self.run_dir / name).stat().st_size / 2**20


async def watch(service: Service, address: str, reader: "subprocess.Popen[bytes]") -> list[Sample]:
    """A sample a second until the reader ends."""
    samples: list[Sample] = []
    async with BufferClient(address, "observer", RUN, "watch") as client:
        while reader.poll() is None:
            status = await client.status()
            with suppress(FileNotFoundError):  # the service, or its log, is gone at the end
                samples.append(service.sample(status))
            await asyncio.sleep(SAMPLE_S)
    return samples


def measure_buffer(options: argparse.Namespace) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{options.port}"
    plan = {
        "readers": options.readers, "total": options.total, "seconds": options.seconds, "pause_s": PAUSE_S,
        "slow_s": options.slow_s, "max_staleness": MAX_STALENESS,
    }  # fmt: skip
    names = [f"server-{i}" for i in range(options.clients)]
    with tempfile.TemporaryDirectory(prefix="slipstream-load-", dir=options.folder) as temporary:
        folder = Path(temporary)
        service = Service(folder, address, options.groups_per_batch)
        outs = [folder / f"produced-{i}.json" for i in range(options.processes)]
        jobs = [
            {"address": address, "out": str(out), "names": names[i :: options.processes],
             "group_size": options.group_size}
            for i, out in enumerate(outs)
        ]  # fmt: skip
        processes = [service.process]
        try:
            processes += [start(job) for job in jobs]
            reader = start({"address": address, "folder": temporary, "plan": plan})
            processes.append(reader)
            samples = asyncio.run(watch(service, address, reader))
            for process in reversed(processes):
                if process.wait(60):
                    raise RuntimeError(f"{process.args} ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        took = json.loads((folder / "read.json").read_text())
        produced = [json.loads(out.read_text()) for out in outs]
        metrics_mib = (service.run_dir / "metrics" / "buffer.jsonl").stat().st_size / 2**20
    verbs = ("lease", "renew", "deliver")
    seconds = {verb: [s for made in produced for s in made.get(verb, [])] for verb in verbs}
    seconds |= {"batch": took["batch"], "batch_rank_0": took["first"]}
    flow, slow = (
        [s for s in samples if began <= s["time"] <= ended] for _, began, ended, _ in took["phases"]
    )
    return {
        "setting": {
            "clients": options.clients, "client_processes": options.processes, "readers": options.readers,
            "group_size": options.group_size, "tokens_per_trajectory": TOKENS, "prompt_tokens": PROMPT_TOKENS,
            "groups_per_batch": options.groups_per_batch, "max_staleness": MAX_STALENESS,
            "asked_trajectories": options.total, "asked_seconds": options.seconds,
        },
        "latency_ms": {verb: percentiles(times) for verb, times in seconds.items() if times},
        "flow": told(flow, took["phases"][0], options.group_size),
        "slow": told(slow, took["phases"][1], options.group_size),
        "metrics_mib": round(metrics_mib, 2),
        "series": series(samples, options.group_size),
    }  # fmt: skip


def start(job: dict[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(CLIENTS), json.dumps(job)])


def percentiles(seconds: list[float]) -> dict[str, float]:
    ms = 1000 * np.array(seconds)
    return {
        "calls": len(ms), "p50": round(float(np.percentile(ms, 50)), 2),
        "p99": round(float(np.percentile(ms, 99)), 2), "max": round(float(ms.max()), 2),
    }  # fmt: skip


def told(samples: list[Sample], phase: list[Any], group_size: int) -> dict[str, Any]:
    """A phase's figures; slopes over its second half."""
    _, began, ended, trained = phase
    late = samples[len(samples) // 2 :]
    first, last = samples[0], samples[-1]
    return {
        "seconds": round(ended - began, 1),
        "trajectories_trained_so_far": trained,
        "trajectories_in_per_s": round(
            group_size * (last["groups_in"] - first["groups_in"]) / (last["time"] - first["time"]), 1
        ),
        "rss_mib": {"first": round(first["rss_mib"], 1), "last": round(last["rss_mib"], 1),
                    "max": round(max(s["rss_mib"] for s in samples), 1)},
        "rss_late_mib": round(last["rss_mib"] - late[0]["rss_mib"], 1),
        "rss_slope_mib_per_minute": slope(late, "rss_mib"),
        "rss_slope_bytes_per_trajectory": per_trajectory(late, group_size),
        "database_mib": {"last": round(last["database_mib"], 1),
                         "slope_per_minute": slope(late, "database_mib")},
        "log_mib": {"max": round(max(s["log_mib"] for s in samples), 1),
                    "slope_per_minute": slope(late, "log_mib")},
        "threads_max": max(s["threads"] for s in samples),
        "files_max": max(s["files"] for s in samples),
        "in_flight_max": max(s["stored"] + s["leased"] for s in samples),
        "waiting_servers_min": min(s["waiting_leases"] for s in late),
        "evicted": last["evicted"],
        "delivered_twice": last["duplicates"],
        "loop_lag_max_s": round(max(s["loop_lag_s"] for s in samples), 3),
        "buffer_cores": round((last["cpu_s"] - first["cpu_s"]) / (last["time"] - first["time"]), 2),
        "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def slope(samples: list[Sample], key: str) -> float:
    """MiB a minute, by least squares."""
    times = np.array([s["time"] for s in samples])
    fit = np.polyfit((times - times[0]) / 60, [s[key] for s in samples], 1)
    return round(float(fit[0]), 3)


def per_trajectory(samples: list[Sample], group_size: int) -> float:
    """Bytes of resident memory that each more trajectory took, by least squares."""
    came = group_size * np.array([s["groups_in"] for s in samples])
    if came[-1] == came[0]:
        return 0.0
    fit = np.polyfit(came - came[0], [2**20 * s["rss_mib"] for s in samples], 1)
    return round(float(fit[0]), 3)


def series(samples: list[Sample], group_size: int) -> dict[str, list[int]]:
    """What is drawn, of both phases: seconds since the first sample, trajectories so far, and MiB."""
    began = samples[0]["time"]
    windows: dict[int, list[Sample]] = {}
    for sample in samples:
        windows.setdefault(int((sample["time"] - began) / SERIES_S), []).append(sample)
    kept = [windows[number] for number in sorted(windows)]
    highest = {
        key: [round(max(s[key] for s in window)) for window in kept]
        for key in ("rss_mib", "database_mib", "log_mib")
    }
    return {
        "seconds": [round(window[-1]["time"] - began) for window in kept],
        "trajectories_in": [round(group_size * window[-1]["groups_in"]) for window in kept],
        **highest,
    }


def draw(found: dict[str, list[int]]) -> None:
    from launch.plots import STYLE, plt

    with plt.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.4}):
        figure, (memory, count) = plt.subplots(1, 2, layout="constrained", figsize=(9, 3))
        for key, label in (
            ("rss_mib", "resident memory"), ("database_mib", "database"), ("log_mib", "its write-ahead log"),
        ):  # fmt: skip
            memory.plot(found["seconds"], found[key], label=label)
        memory.set_title("MiB of the buffer")
        memory.legend()
        count.plot(found["seconds"], np.array(found["trajectories_in"]) / 1e6)
        count.set_title("million trajectories delivered")
        for axes in (memory, count):
            axes.set_ylim(bottom=0)
            axes.set_xlabel("seconds")
        figure.savefig(PICTURE, dpi=80)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--total", type=int, default=10_000_000, help="trajectories")
    parser.add_argument("--seconds", type=float, default=900.0, help="at most, for them")
    parser.add_argument("--slow-s", type=float, default=60.0, help="of a slow learner")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--processes", type=int, default=2, help="that the clients share")
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups-per-batch", type=int, default=256)
    parser.add_argument("--members", type=int, nargs="*", default=[1, 16, 64, 128, 256])
    parser.add_argument("--port", type=int, default=5793)
    parser.add_argument("--folder", default=RESULTS, help="where the store lies meanwhile")
    parser.add_argument("--out", help="a file for the figures in the place of results/load.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.clients:
        found["buffer"] = measure_buffer(options)
    if options.members:
        found["publisher"] = measure_members(options.members)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=2) + "\n")
    else:
        write_result("load", found)
        if options.clients:
            draw(found["buffer"]["series"])


if __name__ == "__main__":
    main()
