"""`torchrun -m learner CONFIG [key=value …]`: the learner's ranks, or one without torchrun."""

import argparse
import logging
import os
import sys
import warnings

from buffer.experiment import ConfigError, load
from buffer.stacks import answer_with_stacks
from learner.config import LearnerExperiment


def main() -> None:
    answer_with_stacks()
    parser = argparse.ArgumentParser(prog="python -m learner", description=__doc__)
    parser.add_argument("config", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a setting in the file")
    options = parser.parse_args()
    try:
        experiment = load(options.config, options.overrides, LearnerExperiment)
    except ConfigError as error:
        sys.exit(str(error))
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=experiment.logging.level,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s",
    )
    quiet_megatron()
    # After the configuration is known to be right: this imports torch and Megatron.
    from learner.service import run

    run(experiment)


def quiet_megatron() -> None:
    """Leave its errors only: it warns of every fused kernel that a machine lacks, at its import already."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


if __name__ == "__main__":
    main()
