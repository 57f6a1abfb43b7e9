"""What reads bytes, against bytes that are made by which of its branches they reach."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from counting import COUNTS, TOTAL
from readers import READERS, SEAM

RUNS = max(1000, TOTAL)
"""Of each reader."""
PROGRAM = Path(__file__).with_name("coverage_guided.py")
OPTIONS = [
    f"-runs={RUNS}",
    "-seed=1",
    "-max_len=4096",
    "-len_control=0",
    "-mutate_depth=2",  # changes to a message at a time
    "-timeout=10",  # seconds for one message
    "-rss_limit_mb=1024",
    "-print_final_stats=1",
]


@pytest.mark.parametrize("name", READERS)
def test_what_is_good_is_read(name):
    """Else nothing would come past the first check."""
    reader = READERS[name]
    for frames in reader.seeds:
        reader.check(SEAM.join(frames))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="atheris has wheels for x86_64 alone")
@pytest.mark.parametrize("name", READERS)
def test_bytes_guided_by_coverage(name, tmp_path):
    messages = tmp_path / "messages"
    messages.mkdir()
    for place, frames in enumerate(READERS[name].seeds):
        (messages / str(place)).write_bytes(SEAM.join(frames))
    done = subprocess.run(
        [sys.executable, PROGRAM, name, *OPTIONS, f"-artifact_prefix={tmp_path}/", messages],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # the same messages every time
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    if found := re.search(r"Test unit written to (\S+)", said):
        pytest.fail(f"{said[:6000]}\nagain: {sys.executable} {PROGRAM} {name} {found[1]}", pytrace=False)
    assert done.returncode == 0, said
    COUNTS[f"guided_{name}"] += int(re.search(r"number_of_executed_units: (\d+)", said)[1])
    assert COUNTS[f"guided_{name}"] >= RUNS
