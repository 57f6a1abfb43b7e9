"""When a request that is not answered is worth a word, by a real socket."""

import asyncio
import logging
import time

import pytest
import zmq
import zmq.asyncio

from buffer import requester as module
from buffer.requester import Requester
from launch.placement import free_port

TELL_S = 0.2
EXPECTED_S = 20.0
PATIENCE_S = 10.0


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(module, "TELL_S", TELL_S)
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def decode(frame):
    return bytes(frame).decode(), {}


class Service:
    """It answers when it is told to; the request's id is all there is of either."""

    def __init__(self, address):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)

    async def asked(self, name):
        """This request; others are repeated ones."""
        while True:
            request = await asyncio.wait_for(self._socket.recv_multipart(), PATIENCE_S)
            if request[-1] == name.encode():
                return request

    async def answer(self, request):
        await self._socket.send_multipart(request)

    def close(self):
        self._socket.close(linger=0)
        self._context.term()


def ask(requester, name):
    deadline = time.monotonic() + 60
    return asyncio.create_task(requester.ask(name, [name.encode()], "values", deadline, EXPECTED_S))


async def says(caplog, text):
    until = time.monotonic() + PATIENCE_S
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        await asyncio.sleep(0.02)


def test_a_service_that_is_gone_is_told_of_soon_and_one_that_is_busy_not(address, caplog):
    async def go():
        service = Service(address)
        async with Requester("model", address, decode, logging.getLogger("learner")) as requester:
            asked = ask(requester, "one")
            await service.asked("one")
            await asyncio.sleep(4 * TELL_S)
            assert "waiting for" not in caplog.text, "the answer may well take so long"
            service.close()
            gone = time.monotonic()
            await says(caplog, f"waiting for model at {address} (values, ")
            assert time.monotonic() - gone < EXPECTED_S / 4
            service = Service(address)
            await service.answer(await service.asked("one"))
            await asked
        service.close()

    asyncio.run(go())


def test_a_service_that_was_never_there_is_told_of_soon(address, caplog):
    async def go():
        async with Requester("model", address, decode, logging.getLogger("learner")) as requester:
            asked = ask(requester, "one")
            await says(caplog, f"waiting for model at {address} (values, ")
            asked.cancel()
            await asyncio.wait([asked])

    asyncio.run(go())


def test_a_service_that_is_back_and_busy_is_not_told_of_for_what_is_asked_since(address, caplog):
    async def go():
        service = Service(address)
        async with Requester("model", address, decode, logging.getLogger("learner")) as requester:
            await asyncio.sleep(2 * TELL_S)
            service.close()
            await asyncio.sleep(2 * TELL_S)
            service = Service(address)
            first = ask(requester, "one")
            await service.answer(await service.asked("one"))
            await first
            caplog.clear()
            second = ask(requester, "two")
            request = await service.asked("two")
            await asyncio.sleep(4 * TELL_S)
            assert "waiting for" not in caplog.text
            await service.answer(request)
            await second
        service.close()

    asyncio.run(go())


def test_keys_are_under_suspicion_only_while_somebody_ends_handshakes(address, caplog):
    async def go():
        connected = asyncio.Event()

        async def hang_up(_, writer):
            writer.close()
            connected.set()

        port = int(address.rpartition(":")[2])
        listener = await asyncio.start_server(hang_up, "127.0.0.1", port)
        async with Requester("model", address, decode, logging.getLogger("learner")) as requester:
            asked = ask(requester, "one")
            await asyncio.wait_for(connected.wait(), PATIENCE_S)
            await says(caplog, "(security.keys) may not match")
            listener.close()
            await listener.wait_closed()
            # Attempts may be under way that were let in before.
            until = time.monotonic() + PATIENCE_S
            while caplog.messages[-1].endswith("may not match"):
                assert time.monotonic() < until, "nobody is there, and keys are blamed"
                await asyncio.sleep(0.02)
            asked.cancel()
            await asyncio.wait([asked])

    asyncio.run(go())
