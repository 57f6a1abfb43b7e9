"""The command line of a process that reads an experiment and has a name."""

import argparse
import logging
import sys

from buffer.experiment import ConfigError, folder_name, load
from buffer.handles import watch_handles
from buffer.ownership import keep_others_from_writing
from buffer.stacks import answer_with_stacks
from rollout.config import RolloutExperiment


def start(prog: str, about: str | None, name_help: str, name: str | None) -> tuple[RolloutExperiment, str]:
    """Read the command line and the file, and begin to log.

    Args:
        prog: What was called.
        about: For `--help`.
        name_help: What `--name` is the name of.
        name: Its default; None demands one.

    Raises:
        SystemExit: The file has a mistake; one line a mistake.
    """
    keep_others_from_writing()
    answer_with_stacks()
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("config", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a setting in the file")
    parser.add_argument("--name", default=name, required=name is None, help=name_help)
    options = parser.parse_intermixed_args()
    try:
        experiment = load(options.config, options.overrides, RolloutExperiment)
        _check_name(options.name)
    except ConfigError as error:
        sys.exit(str(error))
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=experiment.logging.level, format=form)
    watch_handles()
    # Ctrl-C goes on to end the process on the spot, as `buffer.ctrl_c` has it: while an engine starts there
    # is nothing to hand back, and asyncio would keep the signal until the loop turns again, which vLLM's
    # start holds up for half a minute.
    return experiment, options.name


def _check_name(name: str) -> None:
    """It is part of the names of files.

    Raises:
        ConfigError: It cannot be.
    """
    try:
        folder_name(name)
    except ValueError as error:
        raise ConfigError(f"--name {name}: {error}") from None
