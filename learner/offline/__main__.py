"""`torchrun -m learner.offline CONFIG [key=value …]`: a stage's ranks, or one without torchrun."""

import argparse
import logging
import os
import sys

from buffer.experiment import ConfigError, load
from learner.__main__ import quiet_megatron
from learner.offline.config import OfflineExperiment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m learner.offline", description=__doc__)
    parser.add_argument("config", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a setting in the file")
    options = parser.parse_args()
    try:
        experiment = load(options.config, options.overrides, OfflineExperiment)
    except ConfigError as error:
        sys.exit(str(error))
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=experiment.logging.level,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s",
    )
    quiet_megatron()
    # After the configuration is known to be right: this imports torch and Megatron.
    from learner.offline.service import run

    run(experiment)


if __name__ == "__main__":
    main()
