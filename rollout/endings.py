"""What ends a process of several tasks: the first of them to end, or a signal."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


async def first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait until one ends, end the others in the order given, and raise what went wrong, if anything did.

    What the others end with follows from it, and is not told: pages of tracebacks would hide the one line.
    """
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    errors: list[BaseException] = []
    for task in tasks:
        task.cancel()
        await asyncio.wait([task])
        error = task.exception() if not task.cancelled() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None and task in done:
            errors.append(error)
    if errors:
        raise errors[0]


async def unending(work: Coroutine[Any, Any, object]) -> None:
    await work
    raise AssertionError("a background task of the server ended before the server did")


async def signalled(what: str) -> None:
    """Wait for SIGTERM or SIGINT. A second one ends the process at once; its guard ends the engine.

    Args:
        what: What is done then, for the log.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def arrive(number: signal.Signals) -> None:
        logger.info("%s: %s", number.name, what)
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        arrived.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrive, number)
    await arrived.wait()
