"""Programs whose clocks a test sets while they run (`moved_clock.c`)."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest


def built(folder: Path) -> Path:
    """The library, made in a folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make a movable clock with")
    library, source = folder / "moved_clock.so", Path(__file__).with_name("moved_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


class MovedClock:
    """The clocks of whatever is started behind `command`."""

    def __init__(self, library: Path, offsets: Path) -> None:
        self.command = ["env", f"LD_PRELOAD={library}", f"MOVED_CLOCK={offsets}"]
        self._offsets = offsets
        offsets.write_bytes(struct.pack("qq", 0, 0))

    def move(self, wall_s: int, monotonic_s: int = 0) -> None:
        """Set them, so far off the machine's own."""
        with self._offsets.open("r+b") as file:
            file.write(struct.pack("qq", wall_s, monotonic_s))
