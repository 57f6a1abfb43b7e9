"""What a process takes that reads a file of many gigabytes, and whether it goes on at the exact row.

    python benchmarks/data_memory.py --gib 10 --row-bytes 1500 --folder /tmp

Makes the file, a JSON object a line, read with `split: "2,4,4"`. One process opens it for the first time
(index, every row of its share checked), draws rows, and keeps its place halfway; another opens it again and
draws from that place. Writes benchmarks/results/data_memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import write_result

DRAWN = 2000
SETTINGS = {"split": "2,4,4", "on_bad_row": "fail"}


def make(path: Path, size: int, row_bytes: int) -> int:
    """Write rows until the file has `size` bytes; how many."""
    count = written = 0
    with path.open("wb", buffering=1 << 20) as file:
        while written < size:
            head = f'{{"prompt": "What is {count} + 1?", "answer": "{count + 1}", "filling": "'
            written += file.write(head.encode() + b"x" * (row_bytes - len(head) - 3) + b'"}\n')
            count += 1
    return count


def peak_mib() -> float:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def read(path: Path, position: dict[str, Any] | None) -> dict[str, Any]:
    """Open the file and draw; what a child prints."""
    from buffer.experiment import DataConfig
    from buffer.stream import open_stream

    before, started = peak_mib(), time.perf_counter()
    config = DataConfig.model_validate({"train": {"kind": "files", "path": str(path)}, **SETTINGS})
    stream = open_stream(config, 1, "rl")
    opened = time.perf_counter() - started
    if position is not None:
        stream.seek(position)
    drawn, kept = [], None
    started = time.perf_counter()
    for number in range(DRAWN):
        if number == DRAWN // 2:
            kept = stream.position
        (example,) = stream.take(1)
        drawn.append(example.prompt)
    rows_per_second = DRAWN / (time.perf_counter() - started)
    return {
        "rows_of_the_share": len(stream), "open_seconds": round(opened, 1), "before_mib": round(before),
        "peak_mib": round(peak_mib()), "rows_per_second": round(rows_per_second),
        "position": kept, "drawn": drawn,
    }  # fmt: skip


def child(path: Path, position: dict[str, Any] | None, cache: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--read", str(path), "--position", json.dumps(position)]
    done = subprocess.run(
        command,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--row-bytes", type=int, default=1500)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--position", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read, options.position)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, cache = Path(folder) / "rows.jsonl", Path(folder) / "cache"
        rows = make(path, int(options.gib * 2**30), options.row_bytes)
        first = child(path, None, cache)
        again = child(path, first["position"], cache)
        half = DRAWN // 2
        derived = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file())
        exact = first["drawn"][half:] == again["drawn"][:half]
        for found in (first, again):
            del found["drawn"], found["position"]
        write_result("data_memory", {
            "gib": options.gib, "row_bytes": options.row_bytes, "rows": rows, "first": first, "again": again,
            "derived_mib": round(derived / 2**20), "went_on_at_the_exact_row": exact,
        })  # fmt: skip


if __name__ == "__main__":
    main()
