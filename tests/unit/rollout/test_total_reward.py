"""Several rewards at once: weights, parts, and what a failing one costs."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.rendering import PromptRefused
from rollout.config import FunctionReward, ModelReward
from rollout.engine import CompletionFailed, Request
from rollout.scorer.local import LocalScorer
from rollout.scorer.wire import Ids, ScoringFailed, Welcome, Words
from rollout.scripted import plain_completion
from rollout.total_reward import Answer, ModelSource, TotalReward, open_rewards

COMPLETION = plain_completion(Request("r", [1, 2], 8, 1.0, 0), text="12", num_tokens=3)
ANSWER = Answer({"prompt": "how?", "answer": "12"}, [1, 2], COMPLETION)


class Fixed:
    unanswered = None

    def __init__(self, value, named=None, fault=None, delay_s=0.0):
        self.value, self.named, self.fault, self.delay_s = value, named or {}, fault, delay_s
        self.cancelled = False

    async def ready(self):
        if self.fault:
            raise self.fault

    async def values(self, answer):
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.fault:
            raise self.fault
        return self.value, self.named


def test_the_reward_is_the_weighted_sum_and_parts_are_before_their_weights():
    rewards = TotalReward({
        "right": (1.0, Fixed(1.0)),
        "helpful": (0.5, Fixed(-3.0)),
        "style": (-2.0, Fixed(0.25, {"short": 1.0, "polite": -0.75})),
    })  # fmt: skip
    total = asyncio.run(rewards.score(ANSWER))
    assert total.reward == 1.0 * 1.0 + 0.5 * -3.0 + -2.0 * 0.25
    assert total.parts == {
        "right": 1.0, "helpful": -3.0, "style": 0.25, "style/short": 1.0, "style/polite": -0.75,
    }  # fmt: skip


@pytest.mark.parametrize(
    "weighted",
    [
        {"model": (1.0, Fixed(1e150))},
        {"model": (1e-200, Fixed(1e150))},
        {"right": (1e20, Fixed(1e20))},
        {"right": (1.0, Fixed(1e30)), "style": (1.0, Fixed(1e30))},
        {"right": (1.0, Fixed(0.0, {"part": -1e31}))},
        {"right": (1e300, Fixed(1e30)), "style": (-1e300, Fixed(1e30))},
    ],
    ids=["value", "part", "weight", "sum", "named", "nan"],
)
def test_what_the_buffer_would_refuse_for_its_size_fails_the_completion(weighted):
    with pytest.raises(CompletionFailed, match=r"reward_nonfinite.* at most 1e\+30"):
        asyncio.run(TotalReward(weighted).score(ANSWER))


def test_the_largest_reward_is_one_that_the_buffer_takes():
    total = asyncio.run(TotalReward({"right": (1.0, Fixed(1e30))}).score(ANSWER))
    assert (total.reward, total.parts) == (1e30, {"right": 1e30})


def config(**settings):
    return FunctionReward(function="a:b", **settings)


@pytest.mark.parametrize(
    ("only", "rows"),
    [
        ({}, "abcd"),
        ({"data_source": "gsm8k"}, "a"),
        ({"data_source": ["gsm8k", "aime"]}, "ab"),
        ({"data_source": ["gsm8k", "aime"], "level": 2}, "b"),
        ({"level": 2}, "bc"),
        ({"data_source": 7}, ""),
    ],
)
def test_a_reward_is_for_the_rows_with_its_values(only, rows):
    known = {
        "a": {"data_source": "gsm8k", "level": 1},
        "b": {"data_source": "aime", "level": 2},
        "c": {"level": 2},
        "d": {"data_source": ["gsm8k"]},
    }
    assert "".join(name for name, row in known.items() if config(only=only).is_for(row)) == rows


def test_a_reward_that_is_not_for_a_row_is_neither_asked_nor_counted():
    math, code, style = Fixed(1.0), Fixed(0.5, {"tests": 3.0}), Fixed(0.25)
    rewards = TotalReward(
        {"math": (2.0, math), "code": (1.0, code), "style": (1.0, style)},
        {
            "math": config(only={"data_source": "gsm8k"}).is_for,
            "code": config(only={"data_source": ["mbpp", "humaneval"]}).is_for,
        },
    )

    def scored(**row):
        total = asyncio.run(rewards.score(Answer(row, [1, 2], COMPLETION)))
        return total.reward, total.parts

    code.fault = CompletionFailed("asked", "of a row that it is not for")
    assert scored(data_source="gsm8k") == (2.25, {"math": 1.0, "style": 0.25})
    assert scored(prompt="how?") == (0.25, {"style": 0.25})
    code.fault, math.fault = None, code.fault
    assert scored(data_source="mbpp") == (0.75, {"code": 0.5, "code/tests": 3.0, "style": 0.25})


def test_a_row_that_no_reward_is_for_is_refused():
    rewards = TotalReward({"math": (1.0, Fixed(1.0))}, {"math": config(only={"data_source": "gsm8k"}).is_for})
    rewards.check({"data_source": "gsm8k"})
    with pytest.raises(PromptRefused, match=r"no_reward: .* none of rollout.rewards is for this row"):
        rewards.check({"data_source": "mbpp"})
    TotalReward({"math": (1.0, Fixed(1.0))}).check({"data_source": "mbpp"})


def test_rewards_are_asked_at_the_same_time():
    rewards = TotalReward({name: (1.0, Fixed(1.0, delay_s=0.2)) for name in "abcde"})

    async def go():
        async with asyncio.timeout(0.6):
            return await rewards.score(ANSWER)

    assert asyncio.run(go()).reward == 5.0


def test_one_that_fails_fails_the_completion_by_its_own_kind_and_ends_the_others():
    slow = Fixed(1.0, delay_s=60)
    rewards = TotalReward({"slow": (1.0, slow), "bad": (1.0, Fixed(0, fault=CompletionFailed("made", "so")))})
    with pytest.raises(CompletionFailed) as failed:
        asyncio.run(rewards.score(ANSWER))
    assert failed.value.kind == "made"
    assert slow.cancelled


def test_what_is_more_than_a_failed_completion_comes_out_as_it_is():
    rewards = TotalReward({"a": (1.0, Fixed(0, fault=WrongRun("another run"))), "b": (1.0, Fixed(0))})
    with pytest.raises(WrongRun, match="another run"):
        asyncio.run(rewards.score(ANSWER))
    with pytest.raises(WrongRun, match="another run"):
        asyncio.run(rewards.ready())


class Client:
    """A scorer that answers as told."""

    def __init__(self, tokenizer="ours", answer=0.0):
        self.tokenizer, self.answer, self.work = tokenizer, answer, []

    async def hello(self, timeout_s):
        return Welcome("/models/reward", self.tokenizer, 64)

    async def score(self, work, timeout_s=None):
        self.work.append(work)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def asked(client, answer=ANSWER, **settings):
    async def go():
        config = ModelReward(model="/models/reward", **settings)
        source = ModelSource("helpful", client, config, "ours")
        await source.ready()
        return await source.values(answer)

    return asyncio.run(go())


def test_a_scorer_with_the_same_tokenizer_gets_the_ids_as_sampled():
    client = Client(answer=-7.25)
    assert asked(client) == (-7.25, {})
    (work,) = client.work
    assert isinstance(work, Ids)
    assert work.token_ids.tolist() == [1, 2, 10, 11, 12]
    assert work.token_ids.dtype == np.int32


@pytest.mark.parametrize(("finish_reason", "ended"), [("stop", True), ("length", False)])
def test_a_scorer_with_another_tokenizer_gets_the_text_and_whether_it_was_ended(finish_reason, ended):
    client = Client(tokenizer="theirs")
    completion = COMPLETION.__class__(
        COMPLETION.token_ids, COMPLETION.logprobs, COMPLETION.versions, finish_reason, "12"
    )
    asked(client, Answer(ANSWER.row, ANSWER.prompt_ids, completion))
    assert client.work == [Words("how?", "12", ended)]


class SumOfIds:
    async def score(self, token_ids):
        return float(token_ids.sum())


class Letters:
    def render(self, words):
        if len(words.completion) > 3:
            raise PromptRefused("too_long", "more than 3")
        return [ord(letter) for letter in words.completion] + [2] * words.ended


@pytest.mark.parametrize(("tokenizer", "score"), [("ours", 1 + 2 + 10 + 11 + 12), ("theirs", 49 + 50 + 2)])
def test_a_model_in_this_process_is_asked_as_a_scorer_is(tokenizer, score):
    assert asked(LocalScorer(SumOfIds(), Letters(), Welcome("/m", tokenizer, 64))) == (score, {})


def test_a_text_that_a_model_in_this_process_cannot_take_fails_the_completion():
    long = plain_completion(Request("r", [1, 2], 8, 1.0, 0), text="1234")
    answer = Answer(ANSWER.row, ANSWER.prompt_ids, long)
    with pytest.raises(CompletionFailed, match="helpful: too_long: more than 3") as failed:
        asked(LocalScorer(SumOfIds(), Letters(), Welcome("/m", "theirs", 64)), answer)
    assert failed.value.kind == "scorer_refused"


@pytest.mark.parametrize(("score", "clipped"), [(9.0, 2.5), (-9.0, -2.5), (2.0, 2.0)])
def test_a_score_is_clipped_on_both_sides_only_when_asked(score, clipped):
    assert asked(Client(answer=score))[0] == score
    assert asked(Client(answer=score), clip=2.5)[0] == clipped


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Unreachable("no answer"), "scorer_silent"),
        (ScoringFailed("too_long"), "scorer_refused"),
        (BadMessage("token_ids: …"), "scorer_refused"),
    ],
)
def test_a_score_that_does_not_come_fails_the_completion(fault, kind):
    with pytest.raises(CompletionFailed) as failed:
        asked(Client(answer=fault))
    assert failed.value.kind == kind


class Busy(Client):
    """Answers short texts, and leaves others without an answer until it is let."""

    def __init__(self):
        super().__init__()
        self.free = asyncio.Event()

    async def score(self, work, timeout_s=None):
        if len(work.token_ids) > 5:
            if timeout_s is None:
                await asyncio.sleep(0.05)
                raise Unreachable("no answer to score within 0.05 s")
            await self.free.wait()
        return 1.0


def test_a_scorer_that_answers_nobody_is_waited_for_and_one_that_is_slow_with_this_one_is_not():
    long = plain_completion(Request("r", [1, 2], 8, 1.0, 0), num_tokens=8)
    late = Answer(ANSWER.row, ANSWER.prompt_ids, long)

    async def kind_of(source, answer):
        with pytest.raises(CompletionFailed) as failed:
            await source.values(answer)
        return failed.value.kind

    async def go():
        client = Busy()
        source = ModelSource("helpful", client, ModelReward(model="/models/reward"), "ours")
        total = TotalReward({"helpful": (1.0, source)})
        await source.ready()
        asking = asyncio.create_task(kind_of(source, late))
        await asyncio.sleep(0.01)
        await source.values(ANSWER)
        kinds = [await asking]
        assert total.silent == []
        kinds += [await kind_of(source, late) for _ in range(2)]
        assert total.silent == ["the scorer of helpful"]
        client.free.set()
        await total.answered()
        assert total.silent == []
        return kinds

    assert asyncio.run(go()) == ["scorer_timeout", "scorer_silent", "scorer_silent"]


def test_a_reward_of_weight_0_is_not_even_started(tmp_path):
    rewards = {
        "right": FunctionReward(function="rollout.rewards:exact_number", weight=2.0),
        "of others": FunctionReward(function="rollout.rewards:contains", only={"data_source": "x"}),
        "broken": FunctionReward(function="no.such:function", weight=0.0),
        "absent": ModelReward(model="/nowhere", weight=0.0),
    }

    async def go():
        async with AsyncExitStack() as stack:
            total = await open_rewards(rewards, "run", "server-0", None, stack, tmp_path)
            await asyncio.wait_for(total.ready(), 5)
            return await total.score(ANSWER)

    total = asyncio.run(go())
    assert (total.reward, total.parts) == (2.0, {"right": 1.0})
