"""Checkpoints by steps, by seconds of rank 0's clock, and at the end."""

import pytest
from pydantic import ValidationError

from learner import collectives
from learner.config import CheckpointConfig
from learner.schedule import CheckpointSchedule


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told(monkeypatch):
    """What rank 0 says, and how often it was asked; here this is rank 0."""
    asked: list[list[int]] = []

    def broadcast(values):
        asked.append(list(values))
        return list(values)

    monkeypatch.setattr(collectives, "broadcast_numbers", broadcast)
    return asked


def test_steps_alone_need_no_word_between_ranks(told):
    schedule = CheckpointSchedule(CheckpointConfig(every=3), Clock())
    assert [step for step in range(1, 9) if schedule.is_due(step, last=step == 8)] == [3, 6, 8]
    assert told == []


def test_seconds_count_from_the_last_one(told):
    clock = Clock()
    schedule = CheckpointSchedule(CheckpointConfig(every=None, every_s=60), clock)
    due = []
    for step in range(1, 11):
        clock.now += 25
        if schedule.is_due(step, last=False):
            due.append(step)
            clock.now += 50  # that writing takes is no part of the next interval
            schedule.saved()
    assert due == [3, 6, 9]
    assert len(told) == 10


def test_one_by_steps_puts_the_next_by_seconds_off(told):
    clock = Clock()
    schedule = CheckpointSchedule(CheckpointConfig(every=4, every_s=60), clock)
    due = []
    for step in range(1, 9):
        clock.now += 25
        if schedule.is_due(step, last=False):
            due.append(step)
            schedule.saved()
    assert due == [3, 4, 7, 8]


def test_rank_zero_decides_whatever_the_own_clock_says(monkeypatch):
    clock = Clock()
    schedule = CheckpointSchedule(CheckpointConfig(every_s=60), clock)
    clock.now += 1000
    monkeypatch.setattr(collectives, "broadcast_numbers", lambda values: [0])
    assert not schedule.is_due(1, last=False)


def test_never_is_refused():
    with pytest.raises(ValidationError, match="neither every nor every_s"):
        CheckpointConfig(every=None)
