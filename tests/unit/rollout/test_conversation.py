"""What a conversation holds of what was said, whatever becomes of an answer."""

import asyncio

import pytest

from buffer.rendering import PromptRefused
from rollout.conversation import Conversation
from rollout.engine import CompletionFailed
from rollout.groups import SamplingPlan


class Words:
    """Ten tokens fit; a word of a message is one."""

    def encode(self, messages):
        return [1 for message in messages for _ in message["content"].split()]

    def room(self, length):
        return 10 - length


class Counting:
    """Answers with as many words as it may, one at a time; at the third it waits for ever, or fails."""

    def __init__(self):
        self.requests, self.hangs, self.failure = [], False, None

    async def stream(self, request):
        self.requests.append(request)
        for number in range(request.max_tokens):
            if number == 2 and self.failure:
                raise self.failure
            if number == 2 and self.hangs:
                await asyncio.sleep(600)
            yield f"w{number} " if number else " w0 "


@pytest.fixture
def made():
    engine = Counting()
    return engine, Conversation(engine, Words(), SamplingPlan(1, 0.5, 3, 0.9))


def said(conversation, text):
    heard = []
    asyncio.run(conversation.answer(text, heard.append))
    return "".join(heard)


def test_every_turn_is_answered_with_what_was_said_before_in_the_room_that_is_left(made):
    engine, conversation = made
    assert said(conversation, "a b") == "w0 w1 w2 "
    assert said(conversation, "c d") == "w0 w1 w2 "
    assert [len(r.prompt_ids) for r in engine.requests] == [2, 7]
    assert len({r.request_id for r in engine.requests}) == 2
    assert {(r.temperature, r.top_p) for r in engine.requests} == {(0.5, 0.9)}
    before = list(conversation.messages)
    assert [m["role"] for m in before] == ["user", "assistant"] * 2
    with pytest.raises(PromptRefused, match="too_long: the conversation has 13 tokens"):
        said(conversation, "e f g")
    assert conversation.messages == before
    conversation.messages.clear()
    assert said(conversation, "a b c d e f g h") == "w0 w1 "


def test_an_answer_that_is_stopped_or_fails_is_what_was_heard_of_it(made):
    engine, conversation = made
    engine.hangs = True

    async def stopped():
        twice = asyncio.Semaphore(0)
        asking = asyncio.create_task(conversation.answer("a", lambda piece: twice.release()))
        for _ in range(2):
            await twice.acquire()
        asking.cancel()
        await asyncio.wait([asking])
        return asking.cancelled()

    assert asyncio.run(stopped())
    assert conversation.messages[-1] == {"role": "assistant", "content": "w0 w1 "}
    engine.failure = CompletionFailed("engine")
    with pytest.raises(CompletionFailed):
        said(conversation, "b")
    assert conversation.messages[-1] == {"role": "assistant", "content": "w0 w1 "}
    assert len(conversation.messages) == 4
