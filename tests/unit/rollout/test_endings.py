import asyncio
import gc
import logging

import pytest

from rollout.endings import first_of


async def fails(reason, after_s):
    await asyncio.sleep(after_s)
    raise OSError(reason)


async def fails_when_it_is_ended(reason):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError(reason) from None


def ends(*work):
    """What went wrong, in words: an exception would keep the tasks, and what they end with, alive."""

    async def go():
        await first_of(*map(asyncio.create_task, work))

    told = None
    try:
        asyncio.run(go())
    except OSError as error:
        told = str(error)
    gc.collect()
    return told


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_what_went_wrong_first_is_told_and_what_followed_from_it_is_not(order, caplog):
    """A dead engine ends every group that was under way, each with an error of its own."""
    caplog.set_level(logging.ERROR)
    work = [fails("the engine died", 0.0), fails_when_it_is_ended("a group failed")]
    assert ends(*work[order]) == "the engine died"
    assert not caplog.records, "asyncio reports errors that nobody asked for, with their tracebacks"


def test_of_two_at_once_the_one_that_stands_first_is_told(caplog):
    assert ends(fails("one", 0.0), fails("other", 0.0)) == "one"
    assert not caplog.records


def test_an_orderly_end_ends_the_others():
    async def done():
        return None

    assert ends(done(), asyncio.sleep(60)) is None
