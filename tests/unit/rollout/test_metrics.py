import json

import numpy as np

from buffer.records import Group, Trajectory
from rollout.metrics import Meters
from sync.wire import COUNTED, Beat, decode, encode


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_waiting_is_booked_by_cause_and_only_with_nothing_in_hand():
    clock = Clock()
    meters = Meters("s", clock)
    clock.now += 3
    meters.wait_for("leases")
    clock.now += 2
    meters.group_started()
    clock.now += 10
    meters.group_started()
    meters.group_ended()
    clock.now += 10
    meters.group_ended()
    clock.now += 1
    line = meters.line()
    assert line["waiting_s/weights"] == 3
    assert line["waiting_s/leases"] == 3
    assert line["running_groups"] == 0
    assert (line["busy_s"], line["groups_in_hand"]) == (20, 1)


def test_groups_in_hand_are_those_of_the_whole_time_and_not_of_the_moment_of_the_line():
    clock = Clock()
    meters = Meters("s", clock)
    for _ in range(2):
        meters.group_started()
        meters.group_started()
        clock.now += 1
        meters.group_ended()
        meters.group_ended()
        meters.tokens += 30
        clock.now += 9
        line = meters.line()
        assert (line["running_groups"], line["busy_s"], line["groups_in_hand"]) == (0, 1, 2)
        assert line["tokens_per_s"] == 3


def group(*lengths):
    ones = [np.ones(n, np.int32) for n in lengths]
    made = [Trajectory(0, n, n.astype(np.uint8), -n.astype(np.float32), n, 1.0, {}, "stop") for n in ones]
    return Group("g", "l", "p", "train", tuple(made))


def test_of_each_group_is_told_how_long_it_took_and_how_many_were_beside_it():
    clock = Clock()
    meters = Meters("s", clock)
    first = meters.group_started()
    clock.now += 3
    other = meters.group_started()
    clock.now += 1
    meters.line()  # what was booked before a line counts too
    meters.delivered(group(5, 8, 2), True, first)
    meters.group_ended()
    clock.now += 4
    meters.delivered(group(3), False, other)
    meters.group_ended()
    line = meters.line()
    assert (line["group_seconds"], line["group_tokens"]) == ([4, 5], [8, 3])
    assert line["group_in_hand"] == [(3 * 1 + 1 * 2) / 4, (1 * 2 + 4 * 1) / 5]
    assert line["group_in_hand_variance"] == [
        round(v, 3) for v in ((3 + 4) / 4 - 1.25**2, (4 + 4) / 5 - 1.2**2)
    ]
    assert line["wasted_tokens"] == 3
    assert meters.line()["group_seconds"] == []


def test_the_rate_is_of_the_time_since_the_last_line():
    clock = Clock()
    meters = Meters("s", clock)
    meters.tokens = 100
    clock.now += 4
    assert meters.line()["tokens_per_s"] == 25
    meters.tokens += 30
    clock.now += 1
    assert meters.line()["tokens_per_s"] == 30
    assert json.dumps(meters.line())


def test_what_the_learner_is_told_is_what_the_line_says():
    clock = Clock()
    meters = Meters("s", clock)
    clock.now += 3
    meters.tokens, meters.wasted_tokens = 100, 7
    meters.publish_s["pause"] = 0.25
    told = meters.counted()
    assert list(told) == list(COUNTED)
    assert told.items() <= meters.line().items()
    assert (told["tokens"], told["wasted_tokens"], told["waiting_s/weights"]) == (100, 7, 3)
    assert decode(encode(Beat(told))) == Beat(told)
