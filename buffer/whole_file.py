"""Small files that are read back: there whole, or as they were before."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in the place of what has its name.

    Raises:
        OSError: It cannot be; what was there is untouched.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
