"""The order that the value model's server brings requests into, by a real socket and clients; no model."""

import asyncio
import random
from contextlib import AsyncExitStack

import numpy as np
import pytest

from buffer.errors import BadMessage, Refusal
from launch.placement import free_port
from learner.apart import wire
from learner.apart.client import ApartClient
from learner.apart.wire import VALUE, Answer, Failed, OutOfStep, Request, Served, Task
from learner.apart.work import Limits, Work
from learner.value import client as client_module
from learner.value import server as server_module
from learner.value.client import ValueClient
from learner.value.server import ValueServer

SERVED = Served(VALUE, "run", "about", Limits(64, 40))
IDS = np.arange(4, dtype=np.int32)


def work(number: int, trained: bool = False) -> Work:
    known = (np.full(2, number, np.float32),) * 2 if trained else ()
    return Work(((2, 2),), IDS, np.array([1, 2], np.int32), np.array([number, 3], np.int32), 1.0, known)


def made(updates: int) -> dict[str, float]:
    """What is told of the last of so many updates."""
    return dict.fromkeys(VALUE.verbs["train"].answers, float(updates))


class Model:
    """A server whose ranks note what they do, and answer values with the number of updates made."""

    def __init__(self, address):
        self.server = ValueServer(SERVED, "its.address", address, None)
        self.did: list[tuple] = []
        self.made = 0
        self.lets_train, self.lets_load = asyncio.Event(), asyncio.Event()
        self.lets_train.set()
        self.lets_load.set()
        self._tasks = [asyncio.create_task(self.server.run()), asyncio.create_task(self._work())]

    async def _work(self):
        while True:
            if self.server.waiting.empty():
                await asyncio.sleep(0.005)
                continue
            task, answer = self.server.waiting.get()
            targets = [int(w.target_ids[0]) for w in task.works]
            self.did.append((task.verb, *([targets] if targets else []), *task.numbers.values()))
            if task.verb == "train":
                await self.lets_train.wait()
                self.made += 1
            if task.verb == "load":
                await self.lets_load.wait()
                self.made = task.numbers["number"]
            values = (np.full(2, self.made, np.float32),) if task.verb == "values" else ()
            answer.set_result(Answer(values, made(self.made) if task.verb == "train" else {}))

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self.server.close()


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def client(address, name="a"):
    return ValueClient(VALUE, address, "run", "about", name, 20.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client_module, "WATCH_S", 0.1)


def train(of: ValueClient, number: int, copy: int = 0, copies: int = 1, target: int | None = None):
    works = (work(number if target is None else target, True),)
    numbers = {"number": number, "index": number, "copy": copy, "copies": copies, "tokens": 2}
    return asyncio.create_task(of.train(works, **numbers))


def test_an_update_waits_for_every_copy_and_takes_their_micro_batches_in_their_order(
    address, caplog, monkeypatch
):
    monkeypatch.setattr(server_module, "TELL_S", 0.1)

    async def go():
        model = Model(address)
        async with client(address) as one, client(address, "b") as two:
            await asyncio.gather(one.start("s", 0), two.start("s", 0))
            second = train(two, 0, 1, 2, target=7)
            await asyncio.sleep(0.3)
            assert model.server.metrics()["missing_copies"] == 1
            ahead = asyncio.create_task(one.values(1, work(5)))
            first = train(one, 0, 0, 2, target=6)
            assert (await first).numbers == (await second).numbers == made(1)
            assert (await ahead).tolist() == [1, 1], "behind the update that was asked for later"
            assert model.server.metrics()["missing_copies"] == 0
        await model.close()
        assert model.did == [("load", 0, 0), ("train", [6, 7], 0, 0, 0, 2, 2), ("values", [5], 1)]

    asyncio.run(go())
    assert "waiting for the learner's copies [0] (update" in caplog.text


def test_what_was_done_is_not_done_again_for_a_request_that_is_repeated_under_another_id(address):
    async def go():
        model = Model(address)
        async with client(address) as of:
            await of.start("s", 0)
            model.lets_train.clear()
            twice = [train(of, 0), train(of, 0)]
            await asyncio.sleep(0.2)
            model.lets_train.set()
            assert [(await one).numbers["loss"] for one in twice] == [1.0, 1.0]
            assert (await train(of, 0)).numbers == made(1)
            again = Task("save", (), {"number": 1, "step": 4, "attempt": 5}, of._place)
            await asyncio.gather(of.ask(again), of.ask(again))
            await of.ask(again)
            assert [verb for verb, *_ in model.did] == ["load", "train", "save"]
            await of.save(1, 4)
        await model.close()
        assert [verb for verb, *_ in model.did][3:] == ["save"], "into another folder, for all that is known"

    asyncio.run(go())


def test_a_model_that_follows_another_start_is_told_to_load_once_and_makes_the_lost_updates_again(address):
    async def go():
        model = Model(address)
        async with client(address) as of:
            await of.start("s", 3)
            await train(of, 0)
            await of.save(1, 4)
            await of.saved(1, 4)
            for number in (1, 2):
                await train(of, number)
            await model.close()
            model = Model(address)
            found = await asyncio.gather(*(of.values(3, work(n)) for n in (5, 6, 7)))
            assert [values.tolist() for values in found] == [[3, 3]] * 3
        await model.close()
        assert [did[:2] for did in model.did[:3]] == [("load", 4), ("train", [1]), ("train", [2])]
        assert [verb for verb, *_ in model.did[3:]] == ["values"] * 3

    asyncio.run(go())


def test_a_start_that_takes_its_time_is_not_out_of_step(address, caplog):
    async def go():
        model = Model(address)
        model.lets_load.clear()
        async with client(address) as of:
            started = asyncio.create_task(of.start("s", 0))
            await asyncio.sleep(0.3)
            model.lets_load.set()
            await started
            await asyncio.sleep(0.3)
        await model.close()
        assert model.did == [("load", 0, 0)]

    asyncio.run(go())
    assert "out of step" not in caplog.text


def test_copies_that_wait_for_nothing_make_the_lost_updates_again_for_those_that_do(address):
    async def go():
        model = Model(address)
        async with client(address) as one, client(address, "b") as two:
            await asyncio.gather(one.start("s", 0), two.start("s", 0))
            await asyncio.gather(train(one, 0, 0, 2), train(two, 0, 1, 2))
            await model.close()
            model = Model(address)
            # As for a checkpoint, of which the first copy speaks alone.
            await asyncio.wait_for(one.save(1, 3), 20)
            await model.close()
            model = Model(address)
            # The second copy led it back before the first one asked, and so is not told that it is lost.
            await model.server.find(Task("load", numbers={"step": 0, "number": 0}, session="s"))
            await asyncio.wait_for(one.save(1, 3), 20)
        await model.close()
        assert [did[:2] for did in model.did] == [("load", 0), ("train", [0, 0]), ("save", 1)]

    asyncio.run(go())


def test_copies_of_which_one_does_not_know_of_the_checkpoint_yet_come_to_the_same_place(address):
    async def go():
        model = Model(address)
        async with client(address) as one, client(address, "b") as two:
            await asyncio.gather(one.start("s", 0), two.start("s", 0))
            await asyncio.gather(train(one, 0, 0, 2), train(two, 0, 1, 2))
            await one.save(1, 4)
            await model.close()
            model = Model(address)
            # The second copy had the start loaded, and waits for the first one's update.
            place = one._place
            while ("load", 0, 0) not in model.did:
                one._place = ""
                await asyncio.sleep(0.02)
            one._place = place
            await one.saved(1, 4)
            found = await asyncio.wait_for(one.values(1, work(5)), 20)
            assert found.tolist() == [1, 1]
            await two.saved(1, 4)
            assert (await asyncio.wait_for(two.values(1, work(5)), 20)).tolist() == [1, 1]
        await model.close()
        assert model.did == [("load", 0, 0), ("load", 4, 1), ("values", [5], 1), ("values", [5], 1)]

    asyncio.run(go())


def test_a_checkpoint_that_is_completed_while_the_one_before_is_loaded_loses_no_update(address):
    async def go():
        model = Model(address)
        async with client(address) as of:
            await of.start("s", 0)
            await train(of, 0)
            await train(of, 1)
            await of.save(2, 4)
            await model.close()
            model = Model(address)
            model.lets_load.clear()
            async with asyncio.timeout(20):
                while not model.did:  # noqa: ASYNC110  the client notices by itself
                    await asyncio.sleep(0.02)
                await of.saved(2, 4)
                model.lets_load.set()
                assert (await of.values(2, work(5))).tolist() == [2, 2]
        await model.close()
        assert [did[:2] for did in model.did[:3]] == [("load", 0), ("train", [0]), ("train", [1])]

    asyncio.run(go())


class Forgetful(Model):
    """One whose state is the updates that it made; when it is closed, what was saved stays."""

    def __init__(self, address, saved):
        self.saved, self.state, self.worked = saved, [], 0
        super().__init__(address)

    async def _work(self):
        while True:
            if self.server.waiting.empty():
                await asyncio.sleep(0.001)
                continue
            task, answer = self.server.waiting.get()
            await asyncio.sleep(0.005)
            self.worked += 1
            step = task.numbers.get("step", 0)
            if task.verb == "load":
                self.state = list(self.saved[step])
            if task.verb == "save":
                self.saved[step] = list(self.state)
            if task.verb == "train":
                self.state.append([int(work.target_ids[0]) for work in task.works])
            values = (np.full(2, len(self.state), np.float32),) if task.verb == "values" else ()
            answer.set_result(Answer(values, made(len(self.state)) if task.verb == "train" else {}))


@pytest.mark.parametrize("seed", range(4))
def test_lost_at_any_moments_under_three_copies_it_makes_every_update_once_and_in_order(
    seed, address, monkeypatch
):
    monkeypatch.setattr(client_module, "WATCH_S", 0.02)
    copies, steps, updates = 3, 24, 2
    draw, meeting = random.Random(seed), asyncio.Barrier(copies)

    async def learn(copy, of):
        await of.start("s", 0)
        for step in range(steps):
            number = step * updates
            await asyncio.sleep(draw.uniform(0, 0.02))
            found = await asyncio.gather(*(of.values(number, work(copy)) for _ in range(2)))
            assert [values.tolist() for values in found] == [[number, number]] * 2
            # As every copy's advantages wait for all of them.
            await meeting.wait()
            answers = await asyncio.gather(
                *(train(of, number + n, copy, copies, copy) for n in range(updates))
            )
            assert [answer.numbers["loss"] for answer in answers] == [number + 1, number + 2]
            await meeting.wait()
            if step % 3 == 2:
                if copy == 0:
                    await of.save(number + updates, step + 1)
                await meeting.wait()
                await asyncio.sleep(draw.uniform(0, 0.02))
                await of.saved(number + updates, step + 1)

    async def lose(model, losses):
        while True:
            lives_for = draw.randint(1, 40)
            while model[0].worked < lives_for:  # noqa: ASYNC110  each time another one
                await asyncio.sleep(draw.uniform(0, 0.01))
            await model[0].close()
            model[0] = Forgetful(address, model[0].saved)
            losses.append(1)

    async def go():
        model, losses = [Forgetful(address, {0: []})], []
        losing = asyncio.create_task(lose(model, losses))
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client(address, str(c))) for c in range(copies)]
            await asyncio.wait_for(asyncio.gather(*(learn(c, of) for c, of in enumerate(clients))), 60)
            assert not losing.done(), losing.exception()
            losing.cancel()
        assert model[0].saved[24] == [[0, 1, 2]] * 48
        assert len(losses) > 2
        await model[0].close()

    asyncio.run(go())


def test_the_newest_start_of_the_learner_is_followed_and_none_before_it(address):
    async def go():
        model = Model(address)
        async with client(address) as old, client(address) as new:
            await old.start("s", 0)
            model.lets_train.clear()
            old._watching.cancel()  # as of one that was killed
            lost = train(old, 0)
            await asyncio.sleep(0.1)
            starting = asyncio.create_task(new.start("t", 2))
            await asyncio.sleep(0.1)
            lost.cancel()
            model.lets_train.set()
            await starting
            assert (await new.values(0, work(5))).tolist() == [0, 0]
            stale = Task("values", (work(5),), {"number": 0}, old._place)
            with pytest.raises(OutOfStep, match="since the learner's copy was told"):
                await old.ask(stale)
        await model.close()

    asyncio.run(go())


@pytest.mark.parametrize("verb", ["train", "save"])
def test_what_was_not_begun_when_another_start_loads_is_not_done_to_what_it_loads(verb, address):
    """As after a stop of the process, in which an old learner's last request and a new one's first came."""
    numbers = {
        "train": {"number": 0, "index": 0, "copy": 0, "copies": 1, "tokens": 2},
        "save": {"number": 0, "step": 1, "attempt": 1},
    }[verb]

    async def go():
        model = Model(address)
        find = model.server.find
        told = (await find(Task("load", numbers={"step": 0, "number": 0}, session="s"))).numbers
        late = Task(verb, (work(7, True),) * (verb == "train"), numbers, f"{told['place']:.0f}")
        new = Task("load", numbers={"step": 2, "number": 0}, session="t")
        found = await asyncio.gather(find(late), find(new), return_exceptions=True)
        await model.close()
        assert [did[:2] for did in model.did] == [("load", 0), ("load", 2)]
        assert isinstance(found[0], OutOfStep)

    asyncio.run(go())


def test_what_is_asked_for_after_the_fact_is_refused(address):
    """By no learner of ours: it has the values of a batch before it sends an update of it."""

    async def go():
        model = Model(address)
        async with client(address) as of:
            await of.start("s", 0)
            await train(of, 0)
            for asked in (of.values(0, work(5)), of.save(0, 1), of.export(0)):
                with pytest.raises(Failed, match="is asked for after 0 updates, and 1 are made"):
                    await asked
        await model.close()
        assert [verb for verb, *_ in model.did] == ["load", "train"]

    asyncio.run(go())


def header(**changes):
    numbers = {"number": 0, "index": 0, "copy": 0, "copies": 1, "tokens": 2}
    fields = {"verb": "train", "session": "s", "works": 1, **numbers, **changes}
    about = {"run_id": "run", "weights": "about", "name": "n"}
    return wire.pack(
        VALUE.envelope.request("id", {k: v for k, v in (about | fields).items() if v is not None})
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verb": "logprobs"}, "verb: expected one of hello, follow, load, values, train, save, export"),
        ({"number": -1}, "number: expected an integer"),
        ({"tokens": None}, "tokens: missing"),
        ({"copy": 1}, "copy: expected one below copies, 1, got 1"),
        ({"works": 2}, "frames: 2 micro-batches have 12, got 6"),
        ({"verb": "save", "step": 1, "attempt": 1}, "works: save has no micro-batches, got 1"),
        ({"weights": "other"}, "weights: this value model has about, the learner's run started from other"),
        ({"run_id": "other"}, "run_id: this value model serves run 'run'"),
    ],
)
def test_a_malformed_request_is_refused_by_its_field(changes, told):
    good = wire.encode_request(VALUE, Request("id", "run", "about", "n", Task("train", (work(1, True),))))
    with pytest.raises(Refusal, match=told):
        wire.decode_request([header(**changes), *good[1:]], SERVED)


def test_targets_without_their_values_are_refused():
    good = wire.encode_request(VALUE, Request("id", "run", "about", "n", Task("train", (work(1, True),))))
    with pytest.raises(BadMessage, match="known: expected 2 float32, got 4 bytes"):
        wire.decode_request([header(), *good[1:-1], b"\0" * 4], SERVED)
    again = wire.decode_request([header(), *good[1:]], SERVED).task
    assert [values.tolist() for values in again.works[0].known] == [[1, 1], [1, 1]]


def test_an_answer_that_is_none_is_refused(address):
    async def go():
        async with ApartClient(VALUE, address, "run", "about", "n", 1.0):
            for fields, frames in (({}, []), ({"numbers": {"a": "b"}}, []), ({"numbers": {}}, [b"\0" * 3])):
                with pytest.raises(BadMessage):
                    wire.decode_answer(VALUE, "values", {"id": "id", **fields}, frames)
            with pytest.raises(BadMessage, match="the answer to load lacks loaded, place"):
                wire.decode_answer(VALUE, "load", {"id": "id", "numbers": {"number": 1}}, [])

    asyncio.run(go())
