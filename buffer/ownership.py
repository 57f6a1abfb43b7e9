"""Files of a run belong to whom it runs as: nobody else may change or replace them, whatever the umask."""

import os

OTHERS_WRITE = 0o022
"""For the group, and for everybody."""


def keep_others_from_writing() -> None:
    """Of all files and folders that this process, and those it starts, make. Checkpoints hold pickles,
    and whoever may write in a folder may replace what is in it. Who may read stays as the umask says."""
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)
