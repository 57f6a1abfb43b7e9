"""The command line of a training job's process."""

import argparse
import ctypes
import logging
import os
import signal
import sys
import warnings
from typing import TypeVar

from buffer.experiment import ConfigError, load
from buffer.handles import watch_handles
from buffer.ownership import keep_others_from_writing
from buffer.stacks import answer_with_stacks
from learner.config import LearnerExperiment
from learner.offline.config import OfflineExperiment

E_ = TypeVar("E_", LearnerExperiment, OfflineExperiment)

PR_SET_PDEATHSIG = 1


def start(prog: str, about: str | None, schema: type[E_]) -> E_:
    """Read the command line and the file, and begin to log.

    Raises:
        SystemExit: The file has a mistake; one line a mistake.
    """
    keep_others_from_writing()
    answer_with_stacks()
    stop_with_torchrun()
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("config", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a setting in the file")
    options = parser.parse_args()
    try:
        experiment = load(options.config, options.overrides, schema)
    except ConfigError as error:
        sys.exit(str(error))
    rank = os.environ.get("RANK", "0")
    form = f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
    logging.basicConfig(level=experiment.logging.level, format=form)
    watch_handles()
    quiet_megatron()
    return experiment


def stop_with_torchrun() -> None:
    """Have Linux send a SIGTERM when torchrun dies, of whatever: it leaves its ranks alive when it is killed,
    and they would hold the addresses and the run folder against those that are started after them."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def quiet_megatron() -> None:
    """Leave its errors only: it warns of every fused kernel that a machine lacks, at its import already."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
