"""Tells how many examples ran; FUZZ_RECORD names a file that keeps it."""

import json
import os
import platform
import time
from pathlib import Path

from counting import COUNTS

STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter):
    if not COUNTS:
        return
    total = sum(COUNTS.values())
    terminalreporter.write_line(f"fuzz: {total} examples of {len(COUNTS)} targets")
    wrong = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if path := os.environ.get("FUZZ_RECORD"):
        record = {
            "examples": total,
            "findings": sorted(report.nodeid for report in wrong),
            "seconds": round(time.monotonic() - STARTED, 1),
            "targets": dict(sorted(COUNTS.items())),
            "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, "
            f"Python {platform.python_version()}",
        }
        Path(path).write_text(json.dumps(record, indent=2) + "\n")
