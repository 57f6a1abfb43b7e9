"""The loop over an in-memory buffer and a scripted engine."""

import asyncio
import json
import logging
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from buffer.config import BufferConfig
from buffer.memory import MemoryBuffer
from buffer.rendering import PromptRefused
from rollout.config import FunctionReward
from rollout.engine import CompletionAborted, CompletionFailed, EngineFailed
from rollout.groups import GroupRunner, SamplingPlan
from rollout.loop import RolloutLoop
from rollout.metrics import Meters
from rollout.reward_pool import RewardPool
from rollout.scripted import ScriptedEngine, plain_completion
from rollout.total_reward import FunctionSource, Total, TotalReward

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]
PLANS = {"train": SamplingPlan(3, 1.0, 8), "eval": SamplingPlan(2, 0.25, 5, 0.9, 7)}


class Words:
    """Renders `p3` as [1, 3]; refuses a row that says so."""

    def render(self, row, max_tokens):
        if row.get("refuse"):
            raise PromptRefused(row["refuse"], "as the row says")
        return [1, int(row["prompt"][1:])]

    def room(self, length):
        return 100 - length


class Rewards:
    """Scores the text's number, or raises."""

    def __init__(self, fault=None, there=True):
        self.fault = fault
        self.answers = []
        self.there = asyncio.Event()
        if there:
            self.there.set()
        self.silent = []
        self.back = asyncio.Event()

    async def answered(self):
        if self.silent:
            await self.back.wait()

    async def ready(self):
        await self.there.wait()

    def check(self, row):
        if row.get("unscored"):
            raise PromptRefused("no_reward", "as the row says")

    async def score(self, answer):
        self.answers.append(answer)
        if self.fault:
            raise self.fault
        value = float(answer.completion.text)
        return Total(2 * value, {"made": value})


class Weights:
    def __init__(self, version=0):
        self.version = version
        self.arrived = asyncio.Event()
        if version is not None:
            self.arrived.set()

    async def wait_first_version(self):
        await self.arrived.wait()


class Bench:
    """Everything around one loop; `async with` runs it until the block ends."""

    def __init__(self, engine, rows=ROWS, weights=None, rewards=None, max_groups=4, renew_s=30.0, **buffer):
        settings = {"groups_per_batch": 2, "max_staleness": 3} | buffer.pop("config", {})
        self.buffer = MemoryBuffer(rows, BufferConfig(**settings), **buffer)
        self.engine, self.weights, self.meters = engine, weights or Weights(), Meters("s")
        self.runner = GroupRunner(
            engine, Words(), rewards or Rewards(), lambda: self.weights.version, PLANS, 5.0, self.meters
        )
        self.loop = RolloutLoop(self.buffer, self.weights, self.runner, max_groups, renew_s, self.meters)

    async def __aenter__(self):
        await self.engine.start()
        await self.buffer.published(0)
        self.task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *exc):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition(await self.buffer.status()):
                assert not self.task.done(), self.task.result()
                await asyncio.sleep(0.005)


async def first_batch(bench):
    batch = await bench.buffer.batch(0, 0, 1, timeout_s=5)
    assert batch is not None
    return batch


def test_a_group_holds_what_the_engine_sampled_and_what_it_earned():
    async def go():
        engine = ScriptedEngine(lambda request: plain_completion(request, num_tokens=3))
        async with Bench(engine, weights=Weights(0)) as bench:
            return await first_batch(bench)

    batch = asyncio.run(go())
    assert [group.prompt_id for group in batch.groups] == ["0/0", "0/1"]
    for row, group in enumerate(batch.groups):
        assert [t.index for t in group.trajectories] == [0, 1, 2]
        for trajectory in group.trajectories:
            assert trajectory.token_ids.tolist() == [1, row, 10, 11, 12]
            assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1]
            assert trajectory.behavior_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
            assert trajectory.versions.tolist() == [0] * 5
            assert trajectory.reward == 14.0
            assert trajectory.reward_parts == {"made": 7.0}
            assert trajectory.finish_reason == "stop"
            assert trajectory.metadata["text"] == "7"


def test_what_a_former_life_of_the_server_was_lent_is_worked_on_at_once():
    async def go():
        bench = Bench(ScriptedEngine(plain_completion), rows=ROWS * 8, weights=Weights(0))
        await bench.buffer.published(0)
        lost = await bench.buffer.lease(1000, 0.0)
        assert await bench.buffer.lease(1, 0.0) == [], "they have all the room"
        async with bench:
            return lost, await first_batch(bench)

    lost, batch = asyncio.run(go())
    assert [group.prompt_id for group in batch.groups] == [x.prompt.prompt_id for x in lost[:2]]


def test_requests_carry_the_plan_and_the_version_at_dispatch():
    async def go():
        engine = ScriptedEngine(plain_completion)
        async with Bench(engine, weights=Weights(1)) as bench:
            await first_batch(bench)
        return engine.requests

    requests = asyncio.run(go())
    assert {(r.temperature, r.max_tokens, r.version) for r in requests} == {(1.0, 8, 1)}
    assert len({r.request_id for r in requests}) == len(requests)


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_staleness_every_token_is_trained_by_the_version_that_sampled_it(staleness):
    """The loop over the buffer, which asks for batch i at version i as the learner does. At staleness 1 the
    same servers sample ahead: the test would see it."""
    weights = Weights(0)

    async def go():
        ages = set()
        engine = ScriptedEngine(plain_completion)
        async with Bench(engine, weights=weights, epochs=9, config={"max_staleness": staleness}) as bench:
            for index in range(6):
                batch = await bench.buffer.batch(index, 0, 1, timeout_s=5)
                assert batch is not None
                for trajectory in (t for g in batch.groups for t in g.trajectories):
                    ages |= set((index - trajectory.versions[trajectory.loss_mask > 0]).tolist())
                # The learner trains; servers do all that they may.
                await bench.until(lambda status: status["room"] == status["leased"] == 0)
                weights.version = index + 1
                await bench.buffer.published(index + 1)
        return ages

    assert asyncio.run(go()) == set(range(staleness + 1))


def test_eval_leases_are_sampled_by_the_eval_plan():
    """And not with the training's parameters, nor training with theirs."""

    async def go():
        engine = ScriptedEngine(plain_completion)
        rows = [{"prompt": "p9", "answer": "9"}]
        async with Bench(engine, eval_rows=rows, max_groups=8) as bench:
            await first_batch(bench)
            await bench.until(lambda status: any(r.prompt_ids == [1, 9] for r in engine.requests))
            return engine.requests

    def how(requests):
        return [(r.temperature, r.max_tokens, r.top_p, r.top_k) for r in requests]

    requests = asyncio.run(go())
    assert how(r for r in requests if r.prompt_ids == [1, 9]) == [(0.25, 5, 0.9, 7)] * 2
    assert set(how(r for r in requests if r.prompt_ids != [1, 9])) == {(1.0, 8, 1.0, None)}


def test_nothing_is_sampled_before_the_first_version():
    async def go():
        engine = ScriptedEngine(plain_completion)
        weights = Weights(None)
        async with Bench(engine, weights=weights) as bench:
            await asyncio.sleep(0.1)
            assert engine.requests == []
            assert (await bench.buffer.status())["leased"] == 0
            weights.version = 0
            weights.arrived.set()
            await first_batch(bench)

    asyncio.run(go())


def test_nothing_is_sampled_before_everything_that_scores_is_there():
    async def go():
        engine, rewards = ScriptedEngine(plain_completion), Rewards(there=False)
        async with Bench(engine, rewards=rewards) as bench:
            await asyncio.sleep(0.1)
            assert engine.requests == []
            assert (await bench.buffer.status())["leased"] == 0
            assert bench.meters.line()["waiting_s/scorers"] > 0
            rewards.there.set()
            await first_batch(bench)
        return rewards.answers[0]

    answer = asyncio.run(go())
    assert answer.row["prompt"] == f"p{answer.prompt_ids[1]}"
    assert answer.completion.token_ids.tolist() == [10, 11, 12, 13]


def test_a_run_that_ends_while_a_server_waits_for_a_scorer_ends_the_server():
    async def go():
        async with Bench(ScriptedEngine(plain_completion), rewards=Rewards(there=False)) as bench:
            await bench.buffer.finished(0)
            await asyncio.wait_for(bench.task, 5)
            return bench.task.done()

    assert asyncio.run(go())


def test_at_most_max_groups_are_in_hand_and_a_free_place_is_filled():
    async def go():
        engine = ScriptedEngine(plain_completion, delay_s=0.05)
        most = 0
        async with Bench(engine, max_groups=2) as bench:
            for _ in range(40):
                most = max(most, engine.running)
                await asyncio.sleep(0.005)
            return most, bench.meters.groups

    most, groups = asyncio.run(go())
    assert most == 2 * 3
    assert groups > 2


def one_bad_in_each_group(kind):
    def script(request):
        if request.request_id.endswith("/1"):
            return CompletionFailed(kind, "on purpose")
        return plain_completion(request)

    return script


def test_a_failed_completion_fails_its_group_which_is_tried_again_then_dropped():
    async def go():
        engine = ScriptedEngine(one_bad_in_each_group("nonfinite_logprob"))
        async with Bench(engine, rows=ROWS[:1], epochs=1) as bench:
            await bench.until(lambda status: bench.meters.failures["nonfinite_logprob"] == 4)
            await asyncio.sleep(0.05)
            return bench.meters, await bench.buffer.status()

    meters, status = asyncio.run(go())
    assert meters.failures == {"nonfinite_logprob": 4}
    assert meters.groups == status["stored"] == status["leased"] == 0


def test_an_aborted_completion_is_sampled_anew_under_the_new_version_and_its_tokens_are_wasted():
    weights = Weights(0)

    def script(request):
        if request.request_id.endswith("/1"):
            weights.version = 1
            return CompletionAborted(7)
        return plain_completion(request)

    async def go():
        engine = ScriptedEngine(script)
        async with Bench(engine, rows=ROWS[:1], epochs=1, weights=weights) as bench:
            await bench.until(lambda status: status["stored"] == 1)
            return bench.meters, engine.requests

    meters, requests = asyncio.run(go())
    assert (meters.wasted_tokens, meters.tokens, meters.failures) == (7, 3 * 4, {})
    (again,) = [r for r in requests if r.request_id.endswith("/1/again-1")]
    assert again.version == 1
    assert len(requests) == 4


def test_tokens_of_a_group_that_comes_to_nothing_are_wasted():
    async def go():
        engine = ScriptedEngine(one_bad_in_each_group("engine"))
        async with Bench(engine, rows=ROWS[:1], epochs=1) as bench:
            await bench.until(lambda status: bench.meters.failures["engine"] == 4)
            return bench.meters

    meters = asyncio.run(go())
    assert meters.tokens == meters.wasted_tokens > 0
    assert meters.line()["wasted_tokens"] == meters.wasted_tokens


def test_the_other_completions_of_a_failed_group_are_cancelled():
    def script(request):
        return CompletionFailed("engine", "at once")

    class OneIsFast(ScriptedEngine):
        async def generate(self, request):
            self._delay_s = 0.0 if request.request_id.endswith("/0") else 60.0
            return await super().generate(request)

    async def go():
        engine = OneIsFast(script)
        async with Bench(engine, rows=ROWS[:1], epochs=1) as bench:
            await bench.until(lambda status: bench.meters.failures["engine"] == 4)
            return engine.cancelled, engine.running

    assert asyncio.run(go()) == (2 * 4, 0)


def test_a_failed_reward_is_no_reward(caplog):
    caplog.set_level(logging.WARNING, "rollout.loop")

    async def go():
        rewards = Rewards(CompletionFailed("reward_timeout", "slow"))
        async with Bench(ScriptedEngine(plain_completion), rewards=rewards, rows=ROWS[:1], epochs=1) as bench:
            await bench.until(lambda status: bench.meters.failures["reward_timeout"] == 4)
            return bench.meters.line(), await bench.buffer.status()

    line, status = asyncio.run(go())
    assert status["stored"] == 0
    assert line["reward_timeouts"] == line["failed/reward_timeout"] == 4
    assert [r.message for r in caplog.records if r.name == "rollout.loop"] == [
        "gave up prompt 0/0, try 1 of 4, queued again: reward_timeout: slow",
        "gave up prompt 0/0, try 2 of 4, queued again: reward_timeout: slow",
        "gave up prompt 0/0, try 3 of 4, queued again: reward_timeout: slow",
        "gave up prompt 0/0, dropped after 4 tries: reward_timeout: slow",
    ]


@pytest.mark.parametrize(
    ("rule", "row"),
    [
        ("too_long", {"refuse": "too_long"}),
        ("bad_row", {"refuse": "bad_row"}),
        ("no_reward", {"unscored": True}),
    ],
)
def test_a_refused_prompt_is_dropped_at_the_first_try(rule, row, caplog):
    caplog.set_level(logging.WARNING, "rollout.loop")

    async def go():
        rows = [{"prompt": "p0", **row}, *ROWS[1:3]]
        engine = ScriptedEngine(plain_completion)
        async with Bench(engine, rows=rows, epochs=1) as bench:
            batch = await first_batch(bench)
            return batch, bench.meters.failures, engine.requests

    batch, failures, requests = asyncio.run(go())
    assert failures == {rule: 1}
    assert f"gave up prompt 0/0, dropped: {rule}: as the row says" in caplog.messages
    assert {group.prompt_id for group in batch.groups} == {"0/1", "0/2"}
    assert len(requests) == 6


class LateEngine(ScriptedEngine):
    """Makes no group in time; but one token, unless it hangs."""

    def __init__(self, hangs):
        super().__init__(plain_completion, delay_s=60)
        self.lives = asyncio.Event()
        if not hangs:
            self.lives.set()

    async def generate(self, request):
        if request.max_tokens > 1:
            return await super().generate(request)
        await self.lives.wait()
        return plain_completion(request, num_tokens=1)


def test_a_group_that_takes_too_long_on_an_engine_that_lives_is_given_up_and_counted():
    async def go():
        engine = LateEngine(hangs=False)
        bench = Bench(engine, rows=ROWS[:1], epochs=1)
        bench.runner._timeout_s = 0.05
        async with bench:
            await bench.until(lambda status: status["dropped"] == {"failed": 1})
            return engine.cancelled, bench.meters.failures

    assert asyncio.run(go()) == (4 * 3, {"group_timeout": 4})


def test_a_hung_engine_costs_no_prompt_a_try_and_takes_no_lease_until_it_answers(caplog):
    caplog.set_level(logging.INFO, "rollout.loop")

    async def go():
        engine = LateEngine(hangs=True)
        bench = Bench(engine, rows=ROWS[:2], epochs=1)
        bench.runner._timeout_s = 0.05
        async with bench:
            await bench.until(lambda status: bench.meters.failures["engine_silent"] == 2)
            await asyncio.sleep(0.5)  # ten times as long as the deadline that they missed
            hung = await bench.buffer.status(), dict(bench.meters.failures), bench.runner.silent
            engine._delay_s, bench.runner._timeout_s = 0.0, 5.0
            engine.lives.set()
            batch = await first_batch(bench)
            return hung, len(batch.groups), await bench.buffer.status()

    (status, failures, silent), groups, after = asyncio.run(go())
    assert failures == {"engine_silent": 2}
    assert (status["leased"], status["requeued"]["engine_silent"], status["failed"]) == (0, 2, {})
    assert silent == ["the engine"]
    assert (groups, after["dropped"]) == (2, {})
    told = [r.message for r in caplog.records if r.name == "rollout.loop"]
    assert told[0].startswith("gave up prompt 0/0, queued again: engine_silent: not finished within 0.05 s")
    assert told[2:] == ["waiting for the engine: no lease is taken until it answers", "the engine answered"]


def test_what_is_granted_while_a_scorer_is_silent_goes_back_at_once():
    async def go():
        rewards = Rewards()
        rewards.silent = ["the scorer of helpful"]
        bench = Bench(ScriptedEngine(plain_completion), rewards=rewards)
        await bench.buffer.published(0)
        return await bench.loop._take(2), await bench.buffer.status()

    leases, status = asyncio.run(go())
    assert (leases, status["leased"], status["requeued"]) == ([], 0, {"server_silent": 2})


def test_a_run_that_ends_meanwhile_does_not_wait_for_a_silent_scorer():
    async def go():
        rewards = Rewards()
        rewards.silent = ["the scorer of helpful"]
        async with Bench(ScriptedEngine(plain_completion), rewards=rewards) as bench:
            await asyncio.sleep(0.05)
            await bench.buffer.finished(0)
            await asyncio.wait_for(asyncio.shield(bench.task), 5)
            return await bench.buffer.status()

    assert asyncio.run(go())["leased"] == 0


def test_leases_are_renewed_while_their_groups_are_made():
    async def go():
        engine = ScriptedEngine(plain_completion, delay_s=1.0)
        config = {"lease_timeout_s": 0.4}
        async with Bench(engine, rows=ROWS[:2], epochs=1, renew_s=0.1, config=config) as bench:
            batch = await first_batch(bench)
            return batch, bench.meters.failures, len(engine.requests)

    batch, failures, num_requests = asyncio.run(go())
    assert len(batch.groups) == 2
    assert not failures
    assert num_requests == 6


def test_a_lost_lease_is_cancelled_not_given_up():
    async def go():
        engine = ScriptedEngine(plain_completion, delay_s=60)
        config = {"lease_timeout_s": 0.1}
        async with Bench(engine, rows=ROWS[:1], epochs=1, renew_s=0.3, config=config) as bench:
            await bench.until(lambda status: bench.meters.failures["lease_lost"] >= 1)
            await bench.until(lambda status: engine.cancelled >= 3)
            return bench.meters.failures, await bench.buffer.status()

    failures, status = asyncio.run(go())
    assert set(failures) == {"lease_lost"}
    assert not [name for name in json.dumps(status).split('"') if name.startswith("failed/")]


class StuckEngine(ScriptedEngine):
    """Answers the first requests at once, and none after them."""

    def __init__(self, num_answers):
        super().__init__(plain_completion)
        self._num_answers = num_answers

    async def generate(self, request):
        if len(self.requests) == self._num_answers:
            self._delay_s = 60
        return await super().generate(request)


def test_the_end_of_the_run_ends_the_loop_and_what_is_in_hand():
    async def go():
        engine = StuckEngine(num_answers=2 * PLANS["train"].samples)
        bench = Bench(engine, renew_s=0.05)
        async with bench:
            await first_batch(bench)
            # No place is left to ask for another lease.
            await bench.until(lambda status: status["leased"] == 4)
            await bench.buffer.finished(0)
            await asyncio.wait_for(bench.task, 5)
        return engine.running

    assert asyncio.run(go()) == 0


def test_leases_taken_back_for_the_last_evaluation_are_one_line_and_no_alarm(caplog):
    caplog.set_level(logging.INFO, "rollout.loop")

    async def go():
        async with Bench(StuckEngine(num_answers=0), eval_rows=ROWS[:1], renew_s=0.05) as bench:
            await bench.until(lambda status: status["leased"] == 3)
            await bench.buffer.finished(1)
            await bench.until(lambda _: bench.meters.failures["lease_lost"])
            return bench.meters.failures

    assert asyncio.run(go()) == {"lease_lost": 3}
    told = [(r.levelname, r.message) for r in caplog.records if "back" in r.message]
    assert told == [("INFO", "the buffer took 3 leases back: their groups are cancelled")]


def test_a_run_that_is_over_before_the_first_version_comes_ends_the_loop():
    async def go():
        bench = Bench(ScriptedEngine(plain_completion), weights=Weights(version=None))
        async with bench:
            await asyncio.sleep(0.05)
            assert not bench.task.done()
            assert (await bench.buffer.status())["leased"] == 0, "nothing to sample with"
            await bench.buffer.finished(0)
            await asyncio.wait_for(bench.task, 5)
        return bench.engine.requests

    assert asyncio.run(go()) == []


def test_a_stopped_server_hands_its_leases_back():
    async def go():
        engine = ScriptedEngine(plain_completion, delay_s=60)
        bench = Bench(engine)
        async with bench:
            await bench.until(lambda status: status["leased"] == 4)
        return engine.running, await bench.buffer.status()

    running, status = asyncio.run(go())
    assert running == status["leased"] == 0


def test_a_stopped_server_hands_back_what_it_is_granted_meanwhile():
    async def go():
        bench = Bench(ScriptedEngine(plain_completion, delay_s=60), max_groups=2)
        granted = []

        async def granted_late():
            granted.extend(await bench.buffer.lease(2, 0))
            return granted

        bench.buffer.withdraw = granted_late
        async with bench:
            await bench.until(lambda status: status["leased"] == 2)
        return len(granted), await bench.buffer.status()

    late, status = asyncio.run(go())
    assert (late, status["leased"]) == (2, 0)


def test_a_dead_engine_ends_the_loop():
    async def go():
        bench = Bench(ScriptedEngine(lambda request: EngineFailed("the engine died")))
        await bench.engine.start()
        await bench.buffer.published(0)
        try:
            await asyncio.wait_for(bench.loop.run(), 5)
        finally:
            assert (await bench.buffer.status())["leased"] == 0

    with pytest.raises(ExceptionGroup) as failures:
        asyncio.run(go())
    assert failures.group_contains(EngineFailed, match="the engine died")


def test_versions_may_change_within_a_completion():
    def script(request):
        completion = plain_completion(request, num_tokens=3)
        completion.versions[:] = [0, 0, 1]
        return completion

    async def go():
        async with Bench(ScriptedEngine(script)) as bench:
            return await first_batch(bench)

    trajectory = asyncio.run(go()).groups[0].trajectories[0]
    assert trajectory.versions.tolist() == [0, 0, 0, 0, 1]
    assert trajectory.versions.dtype == np.int32


def test_the_main_loop_fits_a_screen():
    import inspect

    assert len(inspect.getsource(RolloutLoop.run).splitlines()) <= 50


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def test_rewards_that_misbehave_cost_their_own_groups_and_the_run_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    faults = {
        "fail": "raised", "hang": "timeout", "fork_on": "timeout", "eat": "memory", "hard_exit": "exit",
        "close_everything": "exit", "endless": "invalid",
    }  # fmt: skip
    texts = [*faults, "shout", "good", "close_output"]
    rows = [{"prompt": f"p{i}"} for i in range(len(texts))]
    config = FunctionReward(function="faulty_rewards:by_text", timeout_s=2.0, workers=2, memory_mib=512)

    async def go():
        pool = RewardPool(config, "rollout.rewards.made", tmp_path / "printed")
        await pool.start()
        rewards = TotalReward({"made": (1.0, FunctionSource(pool))})
        engine = ScriptedEngine(lambda r: plain_completion(r, text=texts[r.prompt_ids[1]]))
        try:
            async with Bench(engine, rows, rewards=rewards, config={"groups_per_batch": 3}) as bench:
                while set(bench.meters.failures) < {f"reward_{kind}" for kind in faults.values()}:
                    assert not bench.task.done(), bench.task.result()
                    await asyncio.sleep(0.05)
                batch = await bench.buffer.batch(0, 0, 1, timeout_s=60)
                return batch, await bench.buffer.status()
        finally:
            await pool.close()

    batch, status = asyncio.run(asyncio.wait_for(go(), 150))
    assert batch is not None
    assert sorted(g.prompt_id for g in batch.groups) == ["0/7", "0/8", "0/9"], "those that scored"
    assert {t.reward for g in batch.groups for t in g.trajectories} == {0.25, 1.0, 0.125}
    assert set(status["failed"]) >= {f"reward_{kind}" for kind in faults.values()}
