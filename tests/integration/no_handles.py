"""A process, this one or another, that may open no file any more."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_left(process: int) -> Iterator[None]:
    """Lower a living process's limit to the files that it has open."""
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    folder = f"/proc/{process}/fd"
    # Listed first: the list of this process's own holds the handle that the listing took.
    opened = {int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}
    first_free = next(number for number in range(len(opened) + 1) if number not in opened)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
