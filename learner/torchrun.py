"""`python -m learner.torchrun …`: torchrun, whose own end is told in a line and not in a traceback.

What a rank died of that rank has said; under torchrun itself a page about its launcher comes behind it.
Ctrl-C comes to the ranks at the same time, which end as they see fit. SIGUSR2, which asks for stacks, goes
on to them.
"""

import sys

from buffer.ctrl_c import end_at_ctrl_c
from buffer.ending import ended
from buffer.stacks import pass_on_to_children


def main() -> None:
    end_at_ctrl_c()
    pass_on_to_children()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} {ended(failure.exitcode)}")


if __name__ == "__main__":
    main()
