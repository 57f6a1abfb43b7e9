"""Clients of a service that talks nonsense: they get what they asked for, or end in order, with a reason."""

import asyncio
import math

import msgpack
import numpy as np
import pytest
from counting import fuzzed, within
from hypothesis import strategies as st
from mutations import cell_faults, faults, messages, packed
from seeds import (
    APART_ENVELOPE,
    APART_REPLIES,
    ARRAYS,
    FOUND,
    GROUP,
    KIB,
    META,
    META_TREE,
    REFUSED,
    REPLIES,
    SCORE,
    SCORES,
    UNDONE,
    UNSCORED,
    VALUES,
    WELCOME,
    a_count,
    a_number,
    a_text,
    made_group,
    of_schema,
)

from buffer import wire
from buffer.client import BufferClient
from buffer.errors import Refusal
from learner.apart import wire as apart_wire
from learner.apart.client import ApartClient
from learner.apart.work import Work
from learner.feed import decode_batch, encode_batch
from rollout.scorer import wire as scorer_wire
from rollout.scorer.client import ScorerClient

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module", autouse=True)
def _runner():
    """One event loop for all examples: most of an example's time would go into its own."""
    global RUNNER
    with asyncio.Runner() as RUNNER:
        yield


class Says:
    """In the place of a connection: whatever is asked, it answers with the same frames."""

    heard = math.inf

    def __init__(self, envelope, raw, frames=()):
        self.envelope, self.raw, self._frames = envelope, raw, [memoryview(frame) for frame in frames]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def ask(self, *_):
        _, reply = self.envelope.open_reply(self.raw)
        return reply, self._frames


def answered(client, says, question):
    """What a client makes of it, in little memory; None where it is refused."""

    async def ask():
        client._requester = says
        async with client:
            return await question(client)

    with within(KIB):
        try:
            found = RUNNER.run(ask())
        except Refusal:
            return None
    of_schema(says.raw, says.envelope.schema)
    assert "refused" not in msgpack.unpackb(says.raw)
    return found


QUESTIONS = {
    "lease": lambda client: client.lease(2, 0.0),
    "renew": lambda client: client.renew(["a", "b"]),
    "deliver": lambda client: client.deliver(made_group()),
    "give_up": lambda client: client.give_up("a", "why", True),
    "status": lambda client: client.status(),
    "batch": lambda client: client.batch(1, 0, 1, 0.0),
}


def of_a_buffer(raw, verb, frames=()):
    client = BufferClient(NOBODY, "learner", "run", "name", 0.0)
    return answered(client, Says(wire.ENVELOPE, raw, frames), QUESTIONS[verb])


@fuzzed(
    60,
    messages(REFUSED, *REPLIES.values()),
    st.sampled_from([verb for verb in REPLIES if verb != "batch"]),
    faults=[
        *(
            (packed(tree), verb)
            for verb, reply in REPLIES.items()
            if verb != "batch"
            for tree in faults(reply)
        ),
        *((packed(tree), "status") for tree in faults(REFUSED)),
        *((packed(reply | REFUSED), verb) for verb, reply in REPLIES.items() if verb != "batch"),
    ],
)
def test_buffer_replies(raw, verb):
    match verb, of_a_buffer(raw, verb):
        case _, None:
            pass
        case "lease", leases:
            assert isinstance(leases, list)
            for lease in leases:
                a_text(lease.lease_id)
                a_text(lease.prompt.prompt_id)
                assert lease.kind in ("train", "eval")
                a_count(lease.version)
                assert all(isinstance(key, str) for key in lease.prompt.row)
        case "renew", lost:
            assert isinstance(lost, set)
            assert all(map(a_text, lost))
        case "deliver", stored:
            assert isinstance(stored, bool)
        case "give_up", outcome:
            a_count(outcome.tries)
            a_count(outcome.most)
            assert isinstance(outcome.queued, bool)
        case _, status:
            assert all(isinstance(key, str) for key in status)


@fuzzed(
    30,
    messages(REPLIES["batch"]),
    st.lists(st.one_of(messages(META_TREE), st.sampled_from(GROUP)), max_size=4),
    faults=[
        *((packed(tree), GROUP) for tree in faults(REPLIES["batch"])),
        *(
            (packed(REPLIES["batch"]), frames)
            for frames in ([], GROUP[:1], GROUP * 2, [*GROUP, b""], GROUP[::-1])
        ),
        (packed(REPLIES["batch"]), [META, bytes(ARRAYS[:-4])]),
        (packed(REPLIES["batch"] | {"groups": 0}), []),
        (packed(REPLIES["batch"] | REFUSED), GROUP),
    ],
)
def test_batches_from_a_buffer_that_talks_nonsense(raw, frames):
    batch = of_a_buffer(raw, "batch", frames)
    if batch is None:
        return
    a_count(batch.index)
    for name, share in batch.shares.items():
        assert isinstance(name, str)
        a_count(share)
    assert msgpack.unpackb(raw)["groups"] == len(batch.groups) == len(frames) / 2
    for group in batch.groups:
        assert group.oldest_version >= 0
        for t in group.trajectories:
            assert len(t.token_ids) == len(t.loss_mask) == len(t.behavior_logprobs) == len(t.versions) > 0
            assert np.isfinite(t.behavior_logprobs).all()
            a_number(t.reward)
    again = decode_batch([bytes(frame) for frame in encode_batch(batch)])
    assert (again.index, again.shares, len(again.groups)) == (batch.index, batch.shares, len(batch.groups))


WORDS = scorer_wire.Words("prompt", "completion", ended=True)


@fuzzed(
    30,
    messages(*SCORES),
    faults=[
        *((packed(tree),) for reply in SCORES for tree in faults(reply)),
        (packed(WELCOME | {"model": "x" * 4097}),),
        *((packed(reply | UNSCORED),) for reply in (SCORE, WELCOME)),
    ],
)
def test_scorer_replies(raw):
    says = Says(scorer_wire.ENVELOPE, raw)
    client = ScorerClient("helpful", NOBODY, "run", "name", 0.0)
    score = answered(client, says, lambda client: client.score(WORDS))
    assert score is None or math.isfinite(a_number(score))
    welcome = answered(client, says, lambda client: client.hello(0.0))
    if welcome is not None:
        a_text(welcome.model, 4096)
        a_text(welcome.tokenizer, 64)
        assert a_count(welcome.max_length) >= 1


TARGETS = np.array([1, 2], np.int32)
PASS = apart_wire.Task("values", (Work(((1, 2),), np.arange(3, dtype=np.int32), TARGETS, TARGETS, 1.0),))


@fuzzed(
    30,
    messages(*APART_REPLIES),
    st.lists(st.one_of(st.just(VALUES), st.binary(max_size=12)), max_size=2),
    faults=[
        *((packed(tree), [VALUES]) for reply in APART_REPLIES for tree in faults(reply)),
        *((packed(FOUND), [frame]) for frame in cell_faults(VALUES)),
        *((packed(FOUND), frames) for frames in ([], [VALUES] * 2)),
        (packed(FOUND | UNDONE), [VALUES]),
    ],
)
def test_replies_of_models_on_ranks_of_their_own(raw, frames):
    says = Says(APART_ENVELOPE, raw, frames)
    client = ApartClient(apart_wire.VALUE, NOBODY, "run", "weights", "name", 0.0)
    answer = answered(client, says, lambda client: client.ask(PASS))
    if answer is not None:
        assert [array.tobytes() for array in answer.arrays] == frames
        assert all(isinstance(key, str) for key in answer.numbers)
        assert all(type(value) is float for value in answer.numbers.values())
        assert not any(isinstance(value, bool) for value in msgpack.unpackb(raw)["numbers"].values())
    found = answered(client, says, lambda client: client.of_targets(PASS))
    if found is not None:
        assert [array.shape for array in found.arrays] == [TARGETS.shape]
        assert found.arrays[0].dtype == np.float32


def test_what_is_good_is_read():
    """The seeds are what the clients take: else nothing would come past the first check."""
    for verb, reply in REPLIES.items():
        assert of_a_buffer(packed(reply), verb, GROUP) is not None
    scorer = ScorerClient("helpful", NOBODY, "run", "name", 0.0)
    assert answered(scorer, Says(scorer_wire.ENVELOPE, packed(SCORE)), lambda s: s.score(WORDS)) == 1.5
    assert answered(scorer, Says(scorer_wire.ENVELOPE, packed(WELCOME)), lambda s: s.hello(0.0)) is not None
    model = ApartClient(apart_wire.VALUE, NOBODY, "run", "weights", "name", 0.0)
    values = Says(APART_ENVELOPE, packed(FOUND), [VALUES])
    assert answered(model, values, lambda m: m.of_targets(PASS)) is not None
