"""`python -m rollout CONFIG [--name server-0] [key=value …]`: one rollout server."""

import argparse
import logging
import signal
import sys

from buffer.experiment import ConfigError, load
from rollout.config import RolloutExperiment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout", description=__doc__)
    parser.add_argument("config", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a setting in the file")
    parser.add_argument("--name", default="server-0", help="unique among the servers of the run")
    options = parser.parse_intermixed_args()
    try:
        experiment = load(options.config, options.overrides, RolloutExperiment)
    except ConfigError as error:
        sys.exit(str(error))
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=experiment.logging.level, format=form)
    # While the engine starts there is nothing to hand back: Ctrl-C may end the process on the spot. asyncio
    # would keep it for when the loop turns again, which vLLM's start holds up for half a minute.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # After the configuration is known to be right: this imports the engine's world.
    from rollout.service import run

    run(experiment, options.name)


if __name__ == "__main__":
    main()
