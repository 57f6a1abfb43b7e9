"""A run whose disk fills up, on a real file system of a few megabytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = 5
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=7M tmpfs disk || exit 99
"$0" run experiment.yaml > full.txt 2>&1; echo $? > full.code
mount -o remount,size=64M disk || exit 99
"$0" run experiment.yaml > mended.txt 2>&1; echo $? > mended.code
cp disk/run/metrics.jsonl .
"""
"""In a mount namespace of its own. Two checkpoints do not fit at first."""


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_full_disk_ends_the_run_with_its_name_and_the_run_goes_on_with_more_room(make_experiment):
    folder: Path = make_experiment(
        "full-disk", run_dir="disk/run", learner={"steps": STEPS, "checkpoint": {"every": 2, "export": False}}
    )
    (folder / "disk").mkdir()
    slipstream = str(Path(sys.executable).parent / "slipstream")
    subprocess.run(["unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, slipstream], cwd=folder, check=True)
    full, mended = ((folder / f"{name}.txt").read_text() for name in ("full", "mended"))
    assert (folder / "full.code").read_text() == "1\n", full
    assert "No space left on device" in full or "disk is full" in full, full
    assert "Traceback" not in full
    assert "once that is mended: " in full, full
    assert "slipstream run experiment.yaml" in full.splitlines()[-1], full
    assert (folder / "mended.code").read_text() == "0\n", mended
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
