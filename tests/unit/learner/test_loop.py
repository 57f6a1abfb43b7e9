"""The loop stays on one screen, and the verbs say what they wait for."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.records import Batch
from learner import loop
from learner.flow import Command, Flow, LoopMistake
from learner.metrics import StepReport


def test_the_main_loop_fits_one_screen():
    assert len(inspect.getsource(loop.train).splitlines()) <= 50
    assert "try" not in inspect.getsource(loop.train)


def test_its_docstring_says_what_it_waits_for():
    for function in (loop.train, Flow.finish):
        for word in ("Consumes:", "Waits for:", "Unblocked by:"):
            assert word in (function.__doc__ or "")


def flow_of(batches: int, start: int = 0) -> Flow:
    """A flow whose neighbours do nothing; the data ends after so many batches."""

    def batch(index, wanted):
        there = index < batches
        return (Command.TRAIN, Batch(index, (), ())) if there else (Command.DONE, None)

    learner = SimpleNamespace(steps=9, loop="my:loop", checkpoint=SimpleNamespace(every=None, every_s=None))
    parts: dict[str, Any] = {
        "experiment": SimpleNamespace(learner=learner, logging=SimpleNamespace(stalled_s=300.0)),
        "updater": SimpleNamespace(update=lambda batch: StepReport(lr=0.0)),
        "feed": SimpleNamespace(next=batch),
        "publishing": SimpleNamespace(publish=lambda v: None, settle=lambda: None, is_first=False),
        "reporter": SimpleNamespace(timed=lambda name: nullcontext()),
    }
    return Flow(trainable=None, checkpoints=None, stop=None, version=start, **parts)  # type: ignore[arg-type]


def run(flow, each):
    """As the service runs a loop."""
    for batch in flow.batches():
        each(flow, batch)
    flow.check_returned()


def trains(flow, batch):
    flow.update(batch)


def publishes(flow, batch):
    flow.update(batch)
    flow.publish()


def publishes_twice(flow, batch):
    publishes(flow, batch)
    flow.publish()


def test_a_loop_that_publishes_every_batch_makes_as_many_versions():
    flow = flow_of(batches=4)
    run(flow, publishes)
    assert (flow.version, flow.data_ended) == (4, True)


@pytest.mark.parametrize(
    ("each", "told"),
    [
        (trains, "did not publish batch 2 before"),
        (lambda flow, batch: None, "did not publish batch 2 before"),
        (publishes_twice, "published batch 2 2 times before"),
    ],
)
def test_a_loop_that_does_not_publish_each_batch_once_is_told_in_one_line(each, told):
    with pytest.raises(
        LoopMistake, match=rf"^learner\.loop=my:loop {told}.*expected one flow\.publish"
    ) as line:
        run(flow_of(batches=4, start=2), each)
    assert "\n" not in str(line.value)


def returns_within(flow, how):
    for batch in flow.batches():
        how(flow, batch)
        if batch.index == 1:
            break
    flow.check_returned()


def test_a_loop_may_return_early_but_not_with_nothing_or_with_what_nobody_got():
    returns_within(flow_of(batches=4), publishes)
    with pytest.raises(LoopMistake, match="trained on batch 1 and before it published it"):
        returns_within(flow_of(batches=4, start=1), trains)
    with pytest.raises(LoopMistake, match="returned after version 3 of 9 without making another"):
        flow_of(batches=4, start=3).check_returned()
    over = flow_of(batches=4, start=9)
    run(over, publishes)
    stopped = flow_of(batches=4)
    stopped.abandon()
    stopped.check_returned()
