"""The reference's socket and the learner's end of it, on loopback, on a world of one; and fingerprints."""

import shutil
import socket
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from buffer import requester
from buffer.errors import BadMessage, Unreachable, WrongRun
from buffer.experiment import ModelConfig
from learner import conversion, parallel
from learner.apart import client as client_module
from learner.apart import waiting as waiting_module
from learner.apart.client import ApartClient
from learner.apart.layouts import layout_of, work_of
from learner.apart.server import ApartServer
from learner.apart.wire import REFERENCE, Answer, Served, Task, encode_request
from learner.apart.wire import Request as WireRequest
from learner.apart.work import Limits, encode_work
from learner.config import ParallelConfig
from learner.layout import Row, lay_out
from learner.line import Line
from learner.reference import ranks as ranks_module
from learner.reference.fingerprint import fingerprint
from learner.reference.ranks import ReferenceRanks
from learner.stop import Abandoned

LIMITS = Limits(64, 40)
SERVED = Served(REFERENCE, "run", "weights", LIMITS)


@pytest.fixture(scope="module")
def world():
    parallel.initialize(ParallelConfig())
    yield
    parallel.shutdown()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(requester, "RESEND_S", 0.3)
    monkeypatch.setattr(requester, "TELL_S", 0.3)
    monkeypatch.setattr(client_module, "BUSY_S", 0.3)
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    monkeypatch.setattr(client_module, "TELL_S", 0.0)
    for module in (ranks_module, waiting_module):
        monkeypatch.setattr(module, "TICK_S", 0.05)


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def answer_to(task: Task) -> Answer:
    return Answer((-task.works[0].target_ids.astype(np.float32),))


class Reference:
    """A real server on a thread, whose logprobs are minus the target ids; a context manager."""

    def __init__(self, address, served=SERVED, answers=True):
        self._address, self._served, self._answers = address, served, answers
        self.computed = 0

    async def __aenter__(self):
        self.server = ApartServer(self._served, "learner.reference.address", self._address, None)
        return self

    async def __aexit__(self, *_):
        self.server.close()

    def __enter__(self):
        self._line = Line(lambda: self)
        self._line.__enter__()
        self._running = self._line.ask(lambda me: me.server.run())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self._running.cancel()
        time.sleep(0.1)
        self._line.__exit__()

    def _work(self):
        while not self._over.wait(0.01):
            if self._answers and not self.server.waiting.empty():
                task, answer = self.server.waiting.get()
                self.computed += 1
                answer.set_result(answer_to(task))


def client(address, run="run", weights="weights", timeout_s=20.0):
    return Line(lambda: ApartClient(REFERENCE, address, run, weights, "test", timeout_s))


def batch(*lengths):
    draw = np.random.default_rng(sum(lengths))
    rows = [
        Row(i, np.arange(3, dtype=np.int32), draw.integers(0, 40, n).astype(np.int32), np.arange(n))
        for i, n in enumerate(lengths)
    ]
    return lay_out([rows[:1], rows[1:]] if len(rows) > 1 else [rows])


BATCHES = [batch(2, 5, 1), batch(7), batch(1, 1, 4)]


def asked(line, parts, stopping=lambda: False):
    return ReferenceRanks(line, stopping).ask(parts, 0.8)


def assert_answers(found, parts):
    for answers, part in zip(found, parts, strict=True):
        for logprobs, one in zip(answers, part, strict=True):
            assert logprobs.tolist() == (-one.target_ids).tolist()


def test_a_micro_batch_arrives_as_it_was(world):
    for one in BATCHES:
        again = layout_of(work_of(one, 0.8))
        assert again.segments == one.segments
        for name in ("token_ids", "position_ids", "target_positions", "target_ids"):
            assert torch.equal(getattr(again, name), getattr(one, name)), name


def test_answers_come_in_order_and_part_by_part(world, address):
    parts = [BATCHES[:2], BATCHES[2:] + BATCHES[:1]]
    with Reference(address), client(address) as line:
        assert_answers(asked(line, parts), parts)


def test_what_was_in_hand_when_a_reference_died_is_asked_of_the_next_one(world, address, caplog):
    caplog.set_level("INFO")
    with client(address) as line:
        with Reference(address, answers=False):
            found = asked(line, [BATCHES])
        with Reference(address):
            assert_answers(found, [BATCHES])
    assert f"connected to reference at {address} again, 3 requests repeated" in caplog.text


def test_a_reference_of_another_run_or_other_weights_is_waited_out_and_told(world, address, caplog):
    ended: Future = Future()

    def others():
        for served in (
            Served(REFERENCE, "other", "weights", LIMITS),
            Served(REFERENCE, "run", "other", LIMITS),
        ):
            with Reference(address, served):
                time.sleep(0.6)
        ended.set_result(None)

    thread = threading.Thread(target=others)
    with client(address) as line:
        thread.start()
        here = line.ask(lambda reference: reference.hello())
        ended.result(30)
        assert not here.done()
        with Reference(address):
            here.result(10)
    thread.join()
    assert "where another answers: run_id: this reference serves run 'other'" in caplog.text
    assert "weights: this reference has other, the learner's run started from weights" in caplog.text


def test_only_the_wrong_reference_or_none_ends_the_wait_at_its_deadline(world, address):
    with (
        client(address, timeout_s=0.5) as line,
        pytest.raises(Unreachable, match="no answer to hello within"),
    ):
        asked(line, [BATCHES])
    with (
        Reference(address, Served(REFERENCE, "other", "weights", LIMITS)),
        client(address, timeout_s=0.5) as line,
        pytest.raises(WrongRun, match="run_id"),
    ):
        asked(line, [BATCHES])


def test_a_busy_reference_is_not_given_up_while_it_answers_others(world, address):
    """Each answer comes later than the deadline after the first was asked for."""
    with Reference(address, answers=False) as reference, client(address, timeout_s=0.8) as line:
        found = asked(line, [BATCHES])[0]
        for one in BATCHES:
            time.sleep(0.5)
            task, answer = reference.server.waiting.get(timeout=5)
            answer.set_result(answer_to(task))
            assert next(found).tolist() == (-one.target_ids).tolist()


def test_a_request_that_is_sent_again_is_computed_once(world, address):
    with Reference(address, answers=False) as reference, client(address) as line:
        found = asked(line, [BATCHES[:1]])
        time.sleep(1.0)
        assert reference.server.metrics()["requests"] > 2, "it was sent again"
        assert reference.server.traffic.in_hand == 1
        reference._answers = True
        assert_answers(found, [BATCHES[:1]])
        assert reference.computed == 1


def test_told_to_stop_a_learner_leaves_the_batch_that_was_not_begun(world, address):
    with client(address) as line, pytest.raises(Abandoned, match="waited for the reference"):
        asked(line, [BATCHES], stopping=lambda: True)


def test_told_to_stop_within_a_step_it_waits_a_little_and_ends(world, address, monkeypatch):
    monkeypatch.setattr(ranks_module, "PATIENCE_S", 0.3)
    with Reference(address, answers=False), client(address) as line:
        (found,) = asked(line, [BATCHES], stopping=lambda: True)
        with pytest.raises(TimeoutError, match="told to stop, and the reference does not answer"):
            next(found)


GOOD = work_of(BATCHES[0], 0.8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_ids": GOOD.token_ids + 40}, "token_ids: expected 0 to 39"),
        ({"token_ids": GOOD.token_ids[:-1]}, "token_ids: 13 of them, and the segments have 14"),
        ({"target_positions": GOOD.target_positions + 14}, "target_positions: expected 0 to 13"),
        ({"target_ids": GOOD.target_ids[:-1]}, "target_positions: 8, and 7 target_ids"),
        ({"segments": ((3,),)}, "segments: expected lists of a prompt's length"),
        ({"segments": ((3, 0),)}, "segments: expected an integer from 1"),
        ({"segments": ((3, 62),)}, "segments: 65 tokens, expected 1 to 64"),
        ({"temperature": 0.0}, "temperature: expected a number"),
    ],
)
def test_what_is_malformed_is_refused_by_field_and_ends_nothing(world, address, change, told):
    fields = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    with Reference(address) as reference, client(address) as line:
        bad = type(GOOD)(**fields | change)
        with pytest.raises(BadMessage, match=told):
            line.ask(lambda of: of.of_targets(Task("logprobs", (bad,)))).result(10)
        assert_answers(asked(line, [BATCHES]), [BATCHES])
        assert reference.server.metrics()["bad_messages"] == 1


def test_a_frame_beyond_the_largest_micro_batch_is_never_read(world, address):
    with Reference(address) as reference, client(address) as line:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        request = WireRequest("id", "run", "weights", "raw", Task("logprobs", (GOOD,)))
        header, about, *_ = encode_request(REFERENCE, request)
        raw.send_multipart([header, about, b"\0" * (LIMITS.max_message_bytes + 1), b"", b""])
        assert not raw.poll(500)
        raw.close(linger=0)
        context.term()
        assert_answers(asked(line, [BATCHES]), [BATCHES])
        assert reference.server.metrics()["bad_messages"] == 0
    assert len(encode_work(GOOD)) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path / "whole")
    LlamaForCausalLM.from_pretrained(path / "whole").save_pretrained(path / "cut", max_shard_size="3KB")
    return path


def of(path, dtype="float32", init_from=None):
    return fingerprint(ModelConfig(path=str(path), dtype=dtype), init_from)


def test_the_same_weights_have_the_same_fingerprint_however_they_lie_in_files(folder, tmp_path):
    assert len(list((folder / "cut").glob("*.safetensors"))) > 1
    assert of(folder / "whole") == of(folder / "cut")
    assert of(folder / "whole") != of(folder / "whole", "bfloat16")
    for number, change in enumerate(("trained", "theta", "missing")):
        other = tmp_path / str(number)
        shutil.copytree(folder / "whole", other)
        if change == "theta":
            text = (other / "config.json").read_text()
            (other / "config.json").write_text(text.replace("10000.0", "20000.0"))
            assert (other / "config.json").read_text() != text
        else:
            tensors = load_file(other / "model.safetensors")
            name = "model.layers.1.mlp.up_proj.weight"
            tensors[name] = tensors[name] + 1e-5
            if change == "missing":
                del tensors[name]
            save_file(tensors, other / "model.safetensors", {"format": "pt"})
        assert of(other) != of(folder / "whole"), change


def test_a_checkpoint_to_start_from_has_a_fingerprint_of_its_own(folder, tmp_path):
    conversion.hf_to_megatron(folder / "whole", tmp_path / "one", ParallelConfig(), None)
    found = of(folder / "whole", init_from=str(tmp_path / "one"))
    assert found == of(folder / "whole", init_from=str(tmp_path / "one"))
    assert found != of(folder / "whole")
    with pytest.raises(ValueError, match=r"no meta\.json in it"):
        of(folder / "whole", init_from=str(tmp_path))
