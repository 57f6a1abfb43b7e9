"""Tells how many examples ran, in whichever of pytest's processes; FUZZ_RECORD names a file that keeps it."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from counting import COUNTS

from benchmarks.record import stamp

STARTED = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = COUNTS.copy()
    try:
        return (yield)
    finally:
        item.user_properties.append(("examples", dict(COUNTS - before)))


def pytest_terminal_summary(terminalreporter):
    wrong = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    ran = [report for report in [*terminalreporter.stats.get("passed", []), *wrong] if report.when == "call"]
    counts = Counter()
    for report in ran:
        counts.update(dict(report.user_properties).get("examples", {}))
    if not counts:
        return
    total = sum(counts.values())
    terminalreporter.write_line(f"fuzz: {total} examples of {len(counts)} targets")
    if path := os.environ.get("FUZZ_RECORD"):
        record = {
            "examples": total,
            "findings": sorted(report.nodeid for report in wrong),
            "seconds": round(time.monotonic() - STARTED, 1),
            "targets": dict(sorted(counts.items())),
            **stamp(),
        }
        Path(path).write_text(json.dumps(record, indent=2) + "\n")
