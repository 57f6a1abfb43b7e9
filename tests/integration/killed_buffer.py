"""The real buffer service, which ends itself with -9 at a moment of its transactions.

python killed_buffer.py MOMENT SURVIVED CONFIG: of MOMENTS, and how many of them it survives.
"""

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from buffer import assembly
from buffer.__main__ import main
from buffer.ledger import Ledger
from buffer.store import Store

MOMENTS: dict[str, tuple[Any, str]] = {
    "insert": (Ledger, "end_of_prompt"),
    "commit": (assembly, "insert"),
    "batch": (assembly, "assemble"),
}
"""Behind which call, in the middle of what its transaction is to do: a prompt is no longer lent, and its
group not kept yet; a batch is made, and not counted yet. With commit behind the transaction, before anybody
hears of it."""


def dying(moment: str, survived: int) -> None:
    """Change what the service calls."""
    (home, name), times, due = MOMENTS[moment], itertools.count(), False
    call, transaction = getattr(home, name), Store.transaction

    def then_die(*arguments: Any) -> Any:
        nonlocal due
        found = call(*arguments)
        if found is not False and next(times) >= survived:  # False: there was too little for a batch
            due = True
            if moment != "commit":
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    @contextmanager
    def transaction_then_die(store: Store) -> Iterator[None]:
        with transaction(store):
            yield
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(home, name, then_die)
    setattr(Store, "transaction", transaction_then_die)  # noqa: B010


if __name__ == "__main__":
    dying(sys.argv[1], int(sys.argv[2]))
    main(sys.argv[3:])
