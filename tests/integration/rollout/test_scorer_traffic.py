"""Client and server of a scorer over real ZeroMQ; the reward model is a sum."""

import asyncio
import logging
import re
import socket
from contextlib import asynccontextmanager

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from buffer import requester
from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.rendering import PromptRefused
from buffer.stacks import Stillness
from rollout.scorer import client as scorer_client
from rollout.scorer import service, wire
from rollout.scorer.client import ScorerClient
from rollout.scorer.server import ScorerServer
from rollout.scorer.wire import Ids, Request, ScoringFailed, Welcome, Words


class Sum:
    """Takes its time, and can be told to fail."""

    def __init__(self, delay_s=0.0):
        self.delay_s, self.calls, self.at_once, self.most = delay_s, 0, 0, 0

    async def score(self, token_ids):
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        if token_ids[0] == 13:
            raise ScoringFailed("unlucky")
        return -float(token_ids.sum()) / 2


class Letters:
    def render(self, words):
        if words.completion == "bad":
            raise PromptRefused("too_long", "9 tokens; the scorer takes 8")
        return [ord(c) for c in words.prompt + words.completion] + [1] * words.ended


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@asynccontextmanager
async def serving(address, model=None):
    server = ScorerServer(
        model or Sum(), Letters(), Welcome("/models/sum", "ours", 8), "run", "helpful", address
    )
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait([task])
        server.close()


def client(address, run_id="run", reward="helpful", timeout_s=10.0):
    return ScorerClient(reward, address, run_id, "server-0", timeout_s)


def ids(*values, tokenizer="ours"):
    return Ids(tokenizer, np.array(values, np.int32))


def test_ids_and_text_are_scored_many_at_a_time(address):
    async def go():
        model = Sum(delay_s=0.1)
        async with serving(address, model) as server, client(address) as scorer:
            assert await scorer.hello(5) == Welcome("/models/sum", "ours", 8)
            works = [ids(i, i + 1) for i in range(50, 90)] + [Words("ab", "c", ended=True)]
            scores = await asyncio.gather(*map(scorer.score, works))
            return scores, model.most, server.metrics()

    scores, most, metrics = asyncio.run(go())
    assert scores == [-(2 * i + 1) / 2 for i in range(50, 90)] + [-(97 + 98 + 99 + 1) / 2]
    assert most > 10, "nobody waits for another's score"
    assert (metrics["scores"], metrics["tokens"], metrics["in_hand"]) == (41, 84, 0)
    assert metrics["score_sum"] == sum(scores)


@pytest.mark.parametrize("asked", [True, False])
def test_a_scorer_whose_model_does_not_answer_says_where_its_threads_are(
    address, tmp_path, capfd, monkeypatch, asked
):
    monkeypatch.setattr(service, "REPORT_S", 0.05)

    async def go():
        async with serving(address, Sum(delay_s=60)) as server, client(address) as scorer:
            await scorer.hello(5)
            asking = asyncio.create_task(scorer.score(ids(1))) if asked else None
            report = asyncio.create_task(service.report(tmp_path / "scorer.jsonl", server, Stillness(0.4)))
            await asyncio.sleep(1.0)
            for task in (asking, report):
                if task is not None:
                    task.cancel()
            await asyncio.wait([report])

    asyncio.run(go())
    assert ("Timeout (0:00:00.400000)!" in capfd.readouterr().err) == asked


def test_what_cannot_be_scored_costs_that_one_only(address):
    async def go():
        async with serving(address) as server, client(address) as scorer:
            for work, kind, told in (
                (ids(13), ScoringFailed, "unlucky"),
                (Words("a", "bad", ended=True), ScoringFailed, "too_long: 9 tokens; the scorer takes 8"),
                (ids(*range(9)), BadMessage, "token_ids: 9 of them, at most 8"),
                (ids(1, tokenizer="theirs"), BadMessage, "tokenizer: the ids are of another tokenizer"),
            ):
                with pytest.raises(kind, match=told):
                    await scorer.score(work)
            return await scorer.score(ids(4, 6)), server.metrics()

    score, metrics = asyncio.run(go())
    assert score == -5.0
    assert (metrics["failed"], metrics["bad_messages"], metrics["scores"]) == (2, 2, 1)


def test_rubbish_is_answered_counted_and_survived(address):
    rubbish = [
        [b"\xc1"],
        [b""],
        [msgpack.packb({"schema": 1, "id": "r"})],
        [*wire.encode_request(Request("r", "run", "helpful", "s", ids(1)))[:1], b"123"],
        [msgpack.packb(["a"]), b"", b""],
    ]

    async def go():
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        peer.connect(address)
        answers = []
        async with serving(address) as server:
            for frames in rubbish:
                await peer.send_multipart(frames)
                (frame,) = await asyncio.wait_for(peer.recv_multipart(), 5)
                answers.append(msgpack.unpackb(frame))
            peer.close(linger=0)
            context.term()
            async with client(address) as scorer:
                return answers, await scorer.score(ids(2)), server.metrics()["bad_messages"]

    answers, score, counted = asyncio.run(go())
    assert [a["refused"] for a in answers] == ["bad_message"] * 5
    told = [a["text"].partition(":")[0] for a in answers]
    assert told == ["header", "header", "run_id", "token_ids", "header"]
    assert (score, counted) == (-1.0, 5)


@pytest.mark.parametrize(
    ("stranger", "told"), [({"run_id": "other"}, "serves run 'run'"), ({"reward": "brief"}, "'helpful'")]
)
def test_another_runs_server_or_another_reward_is_refused(address, stranger, told):
    async def go():
        async with serving(address), client(address, **stranger) as scorer:
            await scorer.hello(5)

    with pytest.raises(WrongRun, match=told):
        asyncio.run(go())


def test_a_scorer_that_is_not_there_is_waited_for_by_name_until_a_deadline(address, monkeypatch, caplog):
    monkeypatch.setattr(requester, "TELL_S", 0.2)

    async def go():
        async with client(address) as scorer:
            with pytest.raises(Unreachable, match=rf"scorer helpful at {address}: no answer to hello"):
                await scorer.hello(0.5)
            waiting = asyncio.create_task(scorer.hello(20))
            await asyncio.sleep(0.5)
            async with serving(address):
                return await waiting

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(go()).model == "/models/sum"
    assert f"waiting for scorer helpful at {address} (hello" in caplog.text


def test_many_that_wait_for_one_scorer_say_so_once_and_not_while_they_stand_in_line(
    address, monkeypatch, caplog
):
    monkeypatch.setattr(requester, "TELL_S", 0.2)
    monkeypatch.setattr(scorer_client, "QUEUE_S", 0.7)

    async def go():
        async with serving(address, Sum(delay_s=60)), client(address, timeout_s=1.2) as scorer:
            return await asyncio.gather(*(scorer.score(ids(i)) for i in range(1, 20)), return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        results = asyncio.run(go())
    assert all(isinstance(result, Unreachable) for result in results)
    assert len(results) == 19
    (told,) = [record for record in caplog.records if "waiting for scorer helpful" in record.message]
    seconds = float(re.findall(r"\(score, (\d+) s", told.message)[0])
    assert seconds >= 1, "what may well take so long is not told sooner"


def test_a_scorer_that_is_started_again_answers_what_its_predecessor_was_asked(address):
    """At once, when it is back: not when the request would be repeated anyway."""

    async def go():
        async with client(address) as scorer:
            async with serving(address, Sum(delay_s=60)) as dying:
                asked = [asyncio.create_task(scorer.score(ids(i))) for i in (2, 4)]
                while dying.metrics()["in_hand"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            async with serving(address), asyncio.timeout(4):
                return await asyncio.gather(*asked)

    assert asyncio.run(go()) == [-1.0, -2.0]


def test_a_request_that_is_repeated_while_it_is_in_hand_is_computed_once(address, monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.1)
    monkeypatch.setattr(scorer_client, "QUEUE_S", 0.0)

    async def go():
        model = Sum(delay_s=0.5)
        async with serving(address, model) as server, client(address) as scorer:
            score = await scorer.score(ids(8))
            return score, model.calls, server.metrics()["requests"]

    score, calls, requests = asyncio.run(go())
    assert (score, calls) == (-4.0, 1)
    assert requests > 1


def test_a_wider_address_and_a_taken_one_are_refused_by_their_key(address):
    async def go(where):
        async with serving(where):
            pass

    with pytest.raises(ValueError, match=r"rollout.rewards.helpful.address: tcp://0.0.0.0:1 reaches beyond"):
        asyncio.run(go("tcp://0.0.0.0:1"))
    with socket.socket() as held:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        held.bind((host, int(port)))
        held.listen()
        with pytest.raises(ValueError, match=r"rollout.rewards.helpful.address: .* is taken"):
            asyncio.run(go(address))
