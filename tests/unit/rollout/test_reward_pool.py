"""The pool with real processes and rewards that really misbehave."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from no_handles import none_left

from rollout.config import FunctionReward
from rollout.engine import CompletionFailed
from rollout.reward_pool import RewardPool, RewardStartError

PRINTED = Path("logs/made.printed")


@pytest.fixture(autouse=True)
def _faulty_rewards_importable(monkeypatch, tmp_path):
    home = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{home}")
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def pool_of(**settings) -> AsyncIterator[RewardPool]:
    settings = {
        "function": "faulty_rewards:by_text",
        "timeout_s": 1.0,
        "workers": 1,
        "memory_mib": 512,
    } | settings
    pool = RewardPool(FunctionReward(**settings), "rollout.rewards.made", PRINTED)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def test_a_number_and_named_parts():
    async def go():
        async with pool_of() as pool:
            return [await pool.score(text, {}) for text in ("good", "parts", "named")]

    good, parts, named = asyncio.run(go())
    assert (good.reward, good.parts) == (1.0, {"reward": 1.0})
    assert (parts.reward, parts.parts) == (1.5, {"correct": 1.0, "short": 0.5})
    assert (named.reward, named.parts) == (0.75, {"reward": 0.75, "correct": 1.0})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hang", "reward_timeout"),
        ("hang_deaf", "reward_timeout"),
        ("fail", "reward_raised"),
        ("text", "reward_raised"),
        ("none", "reward_raised"),
        ("exit", "reward_exit"),
        ("hard_exit", "reward_exit"),
        ("eat", "reward_memory"),
        ("nan", "reward_nonfinite"),
        ("part_inf", "reward_nonfinite"),
        ("huge", "reward_nonfinite"),
        ("huge_integer", "reward_raised"),
        ("unspeakable", "reward_raised"),
        ("half_characters", "reward_raised"),
        ("crash", "reward_exit"),
        ("interrupt", "reward_exit"),
        ("close_everything", "reward_exit"),
        ("fork_on", "reward_timeout"),
        ("many_parts", "reward_invalid"),
        ("long_name", "reward_invalid"),
        ("endless", "reward_invalid"),
    ],
)
def test_a_fault_is_named_and_the_next_completion_is_scored(text, kind):
    async def go():
        async with pool_of() as pool:
            with pytest.raises(CompletionFailed) as failed:
                await pool.score(text, {})
            return failed.value.kind, (await pool.score("good", {})).reward

    assert asyncio.run(go()) == (kind, 1.0)


def test_what_a_reward_raised_is_told_with_its_key_and_its_place():
    async def go():
        async with pool_of() as pool:
            await pool.score("fail", {})

    with pytest.raises(CompletionFailed, match=r"reward.*: RuntimeError: no such luck \(.*rewards.py:\d+\)"):
        asyncio.run(go())


def test_a_hanging_reward_is_ended_at_its_limit_with_what_it_started(tmp_path):
    pid_file = tmp_path / "pid"

    async def go():
        async with pool_of(timeout_s=2.0) as pool:
            start = time.monotonic()
            with pytest.raises(CompletionFailed, match="reward_timeout"):
                await pool.score("hang_with_child", {"pid_file": str(pid_file)})
            return time.monotonic() - start

    assert asyncio.run(go()) < 30  # it would take 300 s
    deadline = time.monotonic() + 20
    while alive(pid_file.read_text()):
        assert time.monotonic() < deadline, "the reward's child outlived it"
        time.sleep(0.05)


def alive(pid):
    try:
        return (Path("/proc") / pid / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # also when it ends while it is being read
        return False


@pytest.mark.parametrize("sleep_s", [300, 0])
def test_what_a_reward_forked_off_ends_with_its_process(tmp_path, sleep_s):
    """Also in a session of its own, by a parent that is gone; whether the reward hung, or answered."""
    pid_file = tmp_path / "pid"

    async def go():
        async with pool_of(timeout_s=2.0) as pool:
            row = {"pid_file": str(pid_file), "sleep_s": sleep_s}
            try:
                return (await pool.score("fork_and_flee", row)).reward
            except CompletionFailed as failed:
                return failed.kind

    assert asyncio.run(go()) == ("reward_timeout" if sleep_s else 1.0)
    deadline = time.monotonic() + 20
    while alive(pid_file.read_text()):
        assert time.monotonic() < deadline, "the grandchild outlived the pool"
        time.sleep(0.05)


def test_a_reward_that_forks_and_returns_twice_answers_once():
    async def go():
        async with pool_of(timeout_s=30.0) as pool:
            texts = ("fork_twins", "good", "parts", "fork_twins")
            return [(await pool.score(text, {})).reward for text in texts]

    assert asyncio.run(go()) == [2.0, 1.0, 1.5, 2.0]


def test_a_process_that_zombies_pile_up_in_is_replaced_and_no_completion_fails():
    async def go():
        async with pool_of(timeout_s=30.0) as pool:
            return [(await pool.score("leave_a_zombie", {})).reward for _ in range(130)]

    pids = asyncio.run(go())
    assert len(set(pids)) == 2
    assert len(set(pids[:128])) == 1


@pytest.mark.parametrize(
    "result",
    [
        {"kind": "ok", "parts": {"reward": 99.0}},
        {"kind": "ok", "parts": {"reward": 99.0}, "number": 2},
        {"kind": "ok", "parts": [1], "number": 1},
        {"kind": "ok", "parts": {"reward": "x"}, "number": 1},
        {"kind": "ok", "parts": {"reward": 1.0, "a\0": 1.0}, "number": 1},
        {"kind": "ok", "number": 1},
        {"kind": ["ok"], "number": 1},
        {"kind": "odd", "number": 1},
        ["ok"],
        7,
    ],
    ids=str,
)
def test_results_that_a_reward_forges_fail_its_own_completion(result):
    async def go():
        async with pool_of(timeout_s=30.0) as pool:
            with pytest.raises(CompletionFailed) as failed:
                await pool.score("forge", {"result": result})
            return failed.value.kind, (await pool.score("good", {})).reward

    assert asyncio.run(go()) == ("reward_invalid", 1.0)


def test_a_second_answer_is_not_taken_for_the_next_calls():
    forged = {"kind": "ok", "parts": {"reward": 0.5}, "number": 1}

    async def go():
        async with pool_of(timeout_s=30.0) as pool:
            first = await pool.score("forge", {"result": forged})
            return [first.reward] + [(await pool.score(text, {})).reward for text in ("parts", "good")]

    assert asyncio.run(go()) == [0.5, 1.5, 1.0], "what it says of its own completion is its business"


def test_a_reward_that_prints_reads_or_closes_disturbs_nothing():
    async def go():
        async with pool_of(timeout_s=30.0) as pool:
            texts = ("shout", "read_input", "close_output", "good")
            return [(await pool.score(text, {})).reward for text in texts]

    assert asyncio.run(go()) == [0.25, 0.5, 0.125, 1.0]


def test_what_a_reward_prints_goes_to_a_file_and_is_said_once(capfd, caplog, monkeypatch):
    async def go(*texts):
        async with pool_of() as pool:
            for text in texts:
                await pool.score(text, {})

    asyncio.run(go("good"))
    assert (caplog.messages, PRINTED.read_bytes()) == ([], b"")
    asyncio.run(go("shout", "shout"))
    assert caplog.messages == [f"rollout.rewards.made prints; what it prints is in {PRINTED}"]
    assert PRINTED.stat().st_size > 200_000
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("rollout.reward_pool.MOST_PRINTED_BYTES", 150_000)
    asyncio.run(go("shout", "good"))
    assert PRINTED.stat().st_size == 0, "it must not fill the disk"


def test_one_hanging_reward_does_not_hold_up_the_others():
    async def go():
        async with pool_of(workers=2, timeout_s=60.0) as pool:
            hanging = asyncio.create_task(pool.score("hang", {}))
            await asyncio.sleep(0.1)
            start = time.monotonic()
            scores = await asyncio.gather(*(pool.score("good", {}) for _ in range(50)))
            elapsed = time.monotonic() - start
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            return elapsed, sum(score.reward for score in scores)

    elapsed, total = asyncio.run(go())
    assert total == 50
    assert elapsed < 30  # half of the hanging one's limit


def test_the_time_limit_does_not_count_the_queue():
    async def go():
        async with pool_of(timeout_s=1.5) as pool:
            calls = [pool.score("hang", {}), pool.score("hang", {}), pool.score("good", {})]
            return await asyncio.gather(*calls, return_exceptions=True)

    *hung, good = asyncio.run(go())
    assert [error.kind for error in hung] == ["reward_timeout", "reward_timeout"]
    assert good.reward == 1.0


def test_a_cancelled_call_does_not_hand_its_answer_to_the_next():
    async def go():
        async with pool_of(timeout_s=5.0) as pool:
            cancelled = asyncio.create_task(pool.score("hang", {}))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            return (await pool.score("parts", {})).reward

    assert asyncio.run(go()) == 1.5


@pytest.mark.parametrize("function", ["no_such_module:f", "rollout.rewards:no_such", "rollout.rewards"])
def test_a_function_that_cannot_be_imported_is_told_at_the_start(function):
    async def go():
        async with pool_of(function=function):
            raise AssertionError("started")

    with pytest.raises(RewardStartError, match=r"rewards\.made\.function=.* expected an importable"):
        asyncio.run(go())


def test_logs_that_are_cleared_away_meanwhile_do_not_keep_a_process_from_being_replaced():
    async def go():
        async with pool_of() as pool:
            shutil.rmtree(PRINTED.parent)
            with pytest.raises(CompletionFailed, match="reward_timeout"):
                await pool.score("hang", {})
            return (await pool.score("good", {})).reward

    assert asyncio.run(go()) == 1.0


def test_a_process_that_cannot_be_started_fails_the_completion_alone(monkeypatch):
    async def go():
        async with pool_of() as pool:
            with pytest.raises(CompletionFailed, match="reward_timeout"):
                await pool.score("hang", {})
            with monkeypatch.context() as patched:
                patched.setattr("rollout.reward_pool.sys.executable", "/nowhere/python")
                with pytest.raises(
                    CompletionFailed, match=r"reward_start: .*no process can be started for it"
                ):
                    await pool.score("good", {})
            return (await pool.score("good", {})).reward

    assert asyncio.run(go()) == 1.0


def test_whatever_it_says_a_failed_completion_is_told_in_one_line():
    assert str(CompletionFailed("reward_raised", "a\nb\x1b[31m\r c")) == r"reward_raised: a\nb\x1b[31m\r c"


def test_closing_ends_every_process():
    async def go():
        async with pool_of(workers=2) as pool:
            pids = {int((await pool.score("pid", {})).reward) for _ in range(4)}
        return pids

    for pid in asyncio.run(go()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_reward_that_is_to_be_replaced_without_file_handles_is_replaced_once_there_are_some():
    async def go():
        async with pool_of() as pool:
            with none_left(os.getpid()):
                with pytest.raises(CompletionFailed, match="reward_timeout"):
                    await pool.score("hang", {})
                waiting = asyncio.create_task(pool.score("good", {}))
                await asyncio.sleep(2.5)
                assert not waiting.done()
            return (await waiting).reward

    assert asyncio.run(go()) == 1.0
