"""`learner.value` whose rank 0 kills itself with SIGKILL in the middle of what it is asked: a program.

    DIES_AT="VERB NUMBER ANSWERED" torchrun … killed_value.py CONFIG

It dies when its ranks have done VERB after NUMBER updates, once they had answered as many such questions as
ANSWERED, and before the answer is sent.
"""

import os
import signal

from learner.apart.wire import Answer, Task
from learner.value import __main__, server, service


class DyingServer(server.ValueServer):
    """Its count is of this life of the job."""

    answered = 0

    async def compute(self, task: Task) -> Answer:
        verb, number, answered = os.environ["DIES_AT"].split()
        found = await super().compute(task)
        if (task.verb, task.numbers["number"]) == (verb, int(number)):
            if self.answered == int(answered):
                print("dies at", verb, number, answered, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            self.answered += 1
        return found


if __name__ == "__main__":
    service.ValueServer = DyingServer
    __main__.main()
