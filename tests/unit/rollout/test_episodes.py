"""Conversations: what is sampled is trained as it was sampled, what is told is not trained."""

import asyncio

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from buffer.records import Lease, Prompt
from buffer.rendering import PromptRefused, Renderer
from configs.custom import guess
from rollout.engine import Completion, CompletionFailed
from rollout.episodes import Chat, play
from rollout.groups import GroupRunner, SamplingPlan
from rollout.metrics import Meters
from rollout.prediction import Predictor
from rollout.scripted import ScriptedEngine
from rollout.total_reward import Total

TEMPLATE = (
    "{% for m in messages %}<im> {{ m['role'] }} {{ m['content'] }} <eos> nl {% endfor %}"
    "{% if add_generation_prompt %}<im> assistant{% endif %}"
)
WORDS = ["<eos>", "<pad>", "<im>", "nl", "user", "assistant", "tool", "hi", "higher", "lower", ".", "hm"]
ID = {word: i for i, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel(dict(ID), unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def said(*words: str, version=3, finish="stop") -> Completion:
    ids = np.array([ID[w] for w in words], np.int32)
    logprobs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), version, np.int32)
    return Completion(ids, logprobs, versions, finish, " ".join(w for w in words if w != "<eos>"))


class Policy:
    """Says one thing after the other; keeps what it was asked behind."""

    def __init__(self, *says: Completion) -> None:
        self.says, self.asked = list(says), []

    async def __call__(self, ids, turn):
        self.asked.append((list(ids), turn))
        return self.says[turn]


def chat_of(tokenizer, policy, max_length=100):
    renderer = Renderer(tokenizer, max_length)
    return Chat(policy, renderer, renderer.encode("hi"))


def words_of(ids):
    return " ".join(WORDS[i] for i in ids)


def test_turns_follow_each_other_as_the_template_has_them_and_only_the_policys_words_are_sampled(tokenizer):
    policy = Policy(said("hm", "<eos>", version=3), said("hm", "hm", "<eos>", version=4))
    chat = chat_of(tokenizer, policy)

    async def go():
        assert await chat.reply() == "hm"
        chat.tell("higher")
        chat.tell("lower", role="tool")
        return await chat.reply()

    assert asyncio.run(go()) == "hm hm"
    whole = chat.completion()
    assert words_of(policy.asked[0][0]) == "<im> user hi <eos> nl <im> assistant"
    told = "nl <im> user higher <eos> nl <im> tool lower <eos> nl <im> assistant"
    assert words_of(whole.token_ids) == f"hm <eos> {told} hm hm <eos>"
    assert policy.asked[1] == ([*policy.asked[0][0], *whole.token_ids[:-3].tolist()], 1)
    assert whole.sampled_mask.tolist() == [1, 1, *[0] * len(told.split()), 1, 1, 1]
    assert whole.versions.tolist() == [3, 3, *[0] * len(told.split()), 4, 4, 4]
    assert whole.logprobs.tolist() == [-0.5, -0.5, *[0] * len(told.split()), -0.5, -0.5, -0.5]
    assert (whole.text, whole.finish_reason, whole.turns) == ("hm hm", "stop", 2)


def test_an_answer_that_a_stop_text_ended_gets_its_end_mark(tokenizer):
    chat = chat_of(tokenizer, Policy(said("hm", "."), said("hm", "<eos>")))

    async def go():
        await chat.reply()
        chat.tell("higher")
        await chat.reply()

    asyncio.run(go())
    assert words_of(chat.completion().token_ids) == (
        "hm . <eos> nl <im> user higher <eos> nl <im> assistant hm <eos>"
    )


@pytest.mark.parametrize(
    ("first", "max_length", "turns"),
    [(said("hm", finish="length"), 100, 1), (said("hm", "<eos>"), 17, 1), (said("hm", "<eos>"), 18, 2)],
)
def test_a_policy_that_was_cut_off_or_has_no_room_left_says_no_more(tokenizer, first, max_length, turns):
    policy = Policy(first, said("hm", finish="length"))
    chat = chat_of(tokenizer, policy, max_length)

    async def go():
        while await chat.reply() is not None:
            chat.tell("higher")

    asyncio.run(go())
    assert len(policy.asked) == chat.completion().turns == turns


async def talks_alone(_row, chat):
    await chat.reply()
    await chat.reply()


async def tells_first(_row, chat):
    chat.tell("higher")
    await chat.reply()


async def says_nothing(_row, _chat):
    return None


async def breaks(_row, _chat):
    raise KeyError("secret")


async def returns_a_number(_row, chat):
    await chat.reply()
    return 3


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (talks_alone, "asks twice for a reply; expected chat.tell between them"),
        (tells_first, "tells before the first reply"),
        (says_nothing, "ended without a reply"),
        (breaks, "breaks raised KeyError: 'secret'"),
        (returns_a_number, "returned int; expected a mapping"),
    ],
)
def test_an_episode_that_goes_wrong_costs_its_completion(tokenizer, function, told):
    chat = chat_of(tokenizer, Policy(said("hm", "<eos>"), said("hm", "<eos>")))

    async def go():
        await play(f"{__name__}:{function.__name__}", {}, chat)
        return chat.completion()

    with pytest.raises(CompletionFailed, match=told) as caught:
        asyncio.run(go())
    assert caught.value.kind == "episode"


def test_a_template_that_cannot_go_on_behind_an_answer_refuses_the_prompt(tokenizer):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    with pytest.raises(PromptRefused, match="the chat template"):
        Renderer(without, 100).follow_up([{"role": "user", "content": "higher"}], 0)


class Words:
    """A renderer of numbers."""

    def render(self, row, max_tokens):
        return [1, 2]

    def room(self, length):
        return 20 - length

    def follow_up(self, messages, last_id):
        return [70 + len(message["content"]) for message in messages]


class Rewards:
    def __init__(self):
        self.rows = []
        self.silent = []

    async def answered(self):
        return

    async def ready(self):
        return

    def check(self, row):
        return

    async def score(self, answer):
        self.rows.append(answer.row)
        return Total(sum(guess.reward(answer.completion.text, answer.row).values()), {})


def guessing(guesses):
    """An engine that says a number at each turn, by the request's name."""

    def answer(request):
        ids = np.array([5, 0], np.int32)
        logprobs = np.full(2, -0.5, np.float32)
        return Completion(ids, logprobs, np.ones(2, np.int32), "stop", guesses[request.request_id])

    return ScriptedEngine(answer)


def test_a_model_is_scored_on_the_episodes_that_it_was_trained_on():
    engine, rewards = guessing({"7/0": "3", "7/0/1": "5", "7/1": "5"}), Rewards()
    row = {"prompt": "guess", "answer": "5"}

    async def go(rewards):
        predictor = Predictor(
            engine, Words(), SamplingPlan(2, 0.5, 8), rewards, "configs.custom.guess:episode"
        )
        return await predictor.line(7, row)

    line = asyncio.run(go(rewards))
    assert line["row"] == row
    assert [c["reward"] for c in line["completions"]] == pytest.approx([1.5, 1.7])
    assert [(c["turns"], c["text"]) for c in line["completions"]] == [(2, "5"), (1, "5")]
    assert [c["conversation"] for c in line["completions"]] == [
        [
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "Higher."},
            {"role": "assistant", "content": "5"},
        ],
        [{"role": "assistant", "content": "5"}],
    ]
    assert [(c["tokens"], c["logprob"]) for c in line["completions"]] == [(4, -2.0), (2, -1.0)]
    assert {r.temperature for r in engine.requests} == {0.5}
    (told,) = [r.prompt_ids for r in engine.requests if r.request_id == "7/0/1"]
    assert told == [1, 2, 5, 0, 70 + len("Higher.")]
    unscored = asyncio.run(go(None))["completions"]
    assert [c["turns"] for c in unscored] == [2, 1]
    assert all("reward" not in c for c in unscored)


def test_a_conversation_that_cannot_be_rendered_is_refused_like_a_prompt():
    class Mute(Words):
        def follow_up(self, messages, last_id):
            raise PromptRefused("bad_row", "no template")

    engine, row = guessing({"0/0": "3", "0/1": "3"}), {"prompt": "guess", "answer": "5"}
    predictor = Predictor(engine, Mute(), SamplingPlan(2, 1.0, 8), Rewards(), "configs.custom.guess:episode")
    line = asyncio.run(predictor.line(0, row))
    assert (line["refused"], line["completions"]) == ("bad_row: no template", [])


def test_the_example_plays_a_game_of_several_turns_through_a_group():
    guesses = {"l/0": "3", "l/0/1": "5", "l/1": "oh", "l/1/1": "9", "l/1/2": "8", "l/2": "5"}
    engine, rewards, meters = guessing(guesses), Rewards(), Meters("s")
    plans = {"train": SamplingPlan(3, 1.0, 8)}
    runner = GroupRunner(
        engine, Words(), rewards, lambda: 1, plans, 5.0, meters, "configs.custom.guess:episode"
    )
    row = {"prompt": "guess", "answer": "5"}
    made = asyncio.run(runner.run(Lease("l", Prompt("p", row), "train", 1)))
    assert [t.turns for t in made.trajectories] == [2, 3, 1]
    assert [t.reward for t in made.trajectories] == pytest.approx([1.5, 0.2, 1.7])
    first = made.trajectories[0]
    assert first.token_ids.tolist() == [1, 2, 5, 0, 70 + len("Higher."), 5, 0]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert first.versions.tolist() == [0, 0, 1, 1, 0, 1, 1]
    told = [r.prompt_ids[-1] - 70 for r in engine.requests if r.request_id == "l/1/1"]
    assert told == [len("Say a number.")]
    assert {r.max_tokens for r in engine.requests if r.request_id.count("/") == 1} == {8}
    assert "episode" not in row
    assert made.trajectories[1].metadata["conversation"][:2] == [
        {"role": "assistant", "content": "oh"},
        {"role": "user", "content": "Say a number."},
    ]
    assert made.trajectories[1].metadata["prompt"] == "guess"
    assert meters.tokens == 12
