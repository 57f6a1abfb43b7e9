"""`python -m buffer CONFIG [key=value …]`: one buffer service."""

import sys

from buffer.ctrl_c import end_at_ctrl_c
from buffer.handles import watch_handles
from buffer.ownership import keep_others_from_writing
from buffer.stacks import answer_with_stacks


def main(arguments: list[str]) -> None:
    end_at_ctrl_c()
    keep_others_from_writing()
    answer_with_stacks()
    import logging

    from buffer.config import BufferExperiment
    from buffer.experiment import load

    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m buffer CONFIG [section.key=value …]")
    try:
        experiment = load(arguments[0], arguments[1:], BufferExperiment)
        logging.basicConfig(
            level=experiment.logging.level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        watch_handles()
        from buffer.service import run

        run(experiment)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
