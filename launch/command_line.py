"""What the commands of `slipstream` share: their arguments, and how they tell a mistake."""

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

EXIT_USAGE = 2
TYPED = "SLIPSTREAM_TYPED"
"""Environment variable: the command by which the user started what started this one."""

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The experiment's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override the file: learner.steps=20")
]


def typed() -> str:
    """This command, as it can be given again: by its path where the environment is not activated. Of a stage
    that a pipeline started, the pipeline's."""
    if (command := os.environ.get(TYPED)) is not None:
        return command
    by_path = Path(sys.argv[0]).name == "slipstream" and not shutil.which("slipstream")
    return shlex.join([sys.argv[0] if by_path else "slipstream", *sys.argv[1:]])


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Name what could not be written: the system's own reason, of a full disk say, often names nothing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"{target}: cannot be written: {error.strerror or error}") from error


def fail(reason: str) -> NoReturn:
    for line in reason.splitlines():
        typer.echo(f"error: {line}", err=True)
    sys.exit(EXIT_USAGE)
