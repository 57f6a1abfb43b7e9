"""What the ranks are told while they wait, on a world of one, and how batches look between ranks."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from buffer.bounds import Bounds
from buffer.errors import DataExhausted
from buffer.records import Batch, Group, Trajectory
from learner import feed, line, parallel
from learner.config import ParallelConfig
from learner.feed import BufferLine, Command, Feed, NoBatch, decode_batch, encode_batch
from learner.line import done_within
from learner.packing import pack


def batch(index=0):
    mask = np.array([0, 1, 1], np.uint8)
    t = Trajectory(
        0,
        np.array([5, 6, 7], np.int32),
        mask,
        -mask.astype(np.float32),
        mask.astype(np.int32),
        1.0,
        {},
        "stop",
    )
    return Batch(index, (Group("g", "l", "0/1", "train", (t,)),), {"groups": 1})


class Scripted:
    def __init__(self, answers=(), over_after=0):
        self.answers = list(answers)
        self.over_after = over_after
        self.told = []
        self.wasted = 100

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def batch(self, index, dp_rank, dp_size, timeout_s):
        await asyncio.sleep(0.01)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def finished(self, version):
        self.told.append(version)

    async def status(self):
        self.over_after -= 1
        return {
            "over": self.over_after < 0,
            "frontier": 4,
            "stored": 3,
            "leased": 0,
            "loop_lag_s": 0.1,
            "max_staleness": 2,
            "temperature": 1.0,
            "wasted_tokens": self.wasted,
        }


@pytest.fixture(scope="module")
def world():
    parallel.initialize(ParallelConfig())
    yield
    parallel.shutdown()


def waiting():
    return Command.WAIT


def test_a_batch_survives_the_way_between_ranks():
    sent = batch(3)
    got = decode_batch([bytes(f) for f in encode_batch(sent)])
    assert (got.index, got.shares) == (3, {"groups": 1})
    one, two = sent.groups[0].trajectories[0], got.groups[0].trajectories[0]
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert one.behavior_logprobs.tolist() == two.behavior_logprobs.tolist()


def test_a_batch_that_takes_a_while_comes(world):
    with BufferLine(lambda: Scripted([None, None, batch(0)])) as line:
        command, shard = Feed(line, 30).next(0, waiting)
    assert command is Command.TRAIN
    assert shard is not None
    assert shard.groups[0].group_id == "g"


def test_a_group_that_the_model_cannot_take_is_told_and_not_trained(world, caplog):
    """A buffer without the model's folder takes it, and gives it again after every restart."""
    whole = batch(0)
    (good,) = whole.groups
    beyond = replace(
        good, trajectories=(replace(good.trajectories[0], token_ids=np.array([5, 64, 7], np.int32)),)
    )
    sent = replace(whole, groups=(good, replace(beyond, group_id="odd\n")))
    with BufferLine(lambda: Scripted([sent])) as line:
        _, shard = Feed(line, 30, Bounds(3, 64)).next(0, waiting)
    assert shard is not None
    assert [g.trajectories[0].loss_mask.tolist() for g in shard.groups] == [[0, 1, 1], [0, 0, 0]]
    assert "nothing of group 'odd\\n' is trained: trajectories[0].token_ids: expected 0 to 63" in caplog.text
    assert pack(shard.groups, [np.ones(1)] * 2, 64)[0].target_ids.tolist() == [6, 7]


def test_a_joiner_and_a_signal_go_before_the_wait(world):
    with BufferLine(lambda: Scripted()) as line:
        source = Feed(line, 30)
        assert source.next(0, lambda: Command.PUBLISH) == (Command.PUBLISH, None)
        assert source.next(0, lambda: Command.STOP) == (Command.STOP, None)


def test_used_up_data_ends_the_run_in_order(world):
    with BufferLine(lambda: Scripted([DataExhausted("2 epochs trained")])) as line:
        assert Feed(line, 30).next(0, waiting) == (Command.DONE, None)


def test_no_batch_within_the_deadline_says_what_the_buffer_knows(world):
    with (
        BufferLine(lambda: Scripted()) as line,
        pytest.raises(NoBatch, match=r"no batch 7 for .*the buffer says frontier 4, leased 0, stored 3$"),
    ):
        Feed(line, 0.3).next(7, waiting)


class Gone(Scripted):
    """Answers nothing until it is back."""

    def __init__(self, answers):
        super().__init__(answers)
        self.back = threading.Event()

    async def batch(self, index, dp_rank, dp_size, timeout_s):
        while not self.back.is_set():  # noqa: ASYNC110  an event of another thread
            await asyncio.sleep(0.01)
        return await super().batch(index, dp_rank, dp_size, timeout_s)


def test_time_in_which_the_buffer_is_silent_is_not_time_in_which_it_has_no_batch(world):
    buffer = Gone([None, batch(0)])
    with BufferLine(lambda: buffer) as line:
        threading.Timer(1.0, buffer.back.set).start()
        command, _ = Feed(line, 0.3).next(0, waiting)
    assert command is Command.TRAIN


class Busy(Scripted):
    """Has no batch for a second, in which one of its numbers moves until it has come to `last`."""

    def __init__(self, moves, last=10**9):
        super().__init__()
        self.moves, self.last = moves, last
        self.asked = self.over_after = 100
        self.made = 0

    async def batch(self, index, dp_rank, dp_size, timeout_s):
        self.asked -= 1
        return await super().batch(index, dp_rank, dp_size, timeout_s) if self.asked else batch(0)

    async def status(self):
        self.made = min(self.last, self.made + 1)
        return {**await super().status(), "delivered": 7, "eval_left": 3, self.moves: self.made}


@pytest.mark.parametrize("moves", ["delivered", "eval_left"])
def test_time_in_which_servers_achieve_something_is_not_time_without_a_batch(world, monkeypatch, moves):
    with BufferLine(lambda: Busy(moves)) as line:
        assert Feed(line, 0.2).next(0, waiting)[0] is Command.TRAIN
    with BufferLine(lambda: Busy(moves, last=20)) as line, pytest.raises(NoBatch, match="no batch 0 for"):
        Feed(line, 0.2).next(0, waiting)
    monkeypatch.setattr(feed, "OVER_POLL_S", 0.01)
    with BufferLine(lambda: Busy(moves)) as line:
        last = Feed(line, 0.2)
        assert last.over(last.finished(9), waiting) is Command.TRAIN


def test_a_long_wait_says_now_and_then_for_whom(world, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(feed, "FIRST_WORD_S", 0.3)
    with BufferLine(lambda: Scripted([None] * 100 + [batch(0)])) as line:
        assert Feed(line, 30).next(0, waiting)[0] is Command.TRAIN
    told = [r.message for r in caplog.records if r.name == "learner.feed"]
    assert 1 <= len(told) <= 3, "not at every look"
    assert told[0].startswith("no batch 0 for 0 s: rollout servers: none; the buffer says ")


def test_the_end_waits_for_the_last_evaluation_and_serves_joiners_meanwhile(world):
    buffer = Scripted(over_after=2)
    with BufferLine(lambda: buffer) as line:
        source = Feed(line, 30)
        end = source.finished(9)
        assert source.over(end, lambda: Command.PUBLISH) is Command.PUBLISH
        assert source.over(end, waiting) is Command.TRAIN
    assert buffer.told == [9]


class Silent(Scripted):
    async def status(self):
        await asyncio.Event().wait()

    async def committed(self, index):
        await asyncio.Event().wait()


def test_a_job_that_is_to_stop_does_not_wait_for_a_buffer_that_is_gone(world, caplog, monkeypatch):
    monkeypatch.setattr(line, "STOPPING_S", 0.3)
    signalled = threading.Event()
    with BufferLine(Silent, signalled.is_set) as silent:
        telling = threading.Thread(target=Feed(silent, 30).committed, args=(3,))
        telling.start()
        telling.join(1.0)
        assert telling.is_alive(), "without a signal the buffer is waited for"
        signalled.set()
        telling.join(5.0)
        assert not telling.is_alive()
        assert Feed(silent, 30).frontier(2, 1.0) is None
    told = [r.message for r in caplog.records if r.name == "learner.line"]
    assert told[0] == "no answer (batches below 3 are in a checkpoint): stopping without it"


def test_the_frontier_is_the_buffers(world):
    with BufferLine(lambda: Scripted()) as line:
        assert Feed(line, 30).frontier(2, 1.0) == 4
        with pytest.raises(ValueError, match="max_staleness=0 here, and the buffer was started with 2"):
            Feed(line, 30).frontier(0, 1.0)
        with pytest.raises(ValueError, match=r"temperature=0\.7 here, and the buffer .* with 1\.0"):
            Feed(line, 30).frontier(2, 0.7)


def test_what_the_buffer_gave_up_is_told_from_step_to_step_and_never_waited_for(world):
    """Of a resumed run, without what was given up before."""
    buffer = Scripted([batch(0), batch(1), batch(2)])
    with BufferLine(lambda: buffer) as line:
        of = Feed(line, 30)
        of.frontier(2, 1.0)
        counts = []
        for wasted in (130, 130, 145):
            buffer.wasted = wasted
            of.next(0, waiting)
            settled = line.ask(lambda _: asyncio.sleep(0.05))
            assert done_within(settled, 5)
            counts.append(of.wasted())
        assert [*counts, of.wasted()] == [30, 0, 15, 0]
    buffer = Scripted([batch(0), batch(1)])
    buffer.status = never_told
    with BufferLine(lambda: buffer) as line:
        of = Feed(line, 30)
        assert [of.next(0, waiting)[0], of.next(1, waiting)[0]] == [Command.TRAIN] * 2
        assert of.wasted() == 0


async def never_told():
    await asyncio.sleep(3600)
