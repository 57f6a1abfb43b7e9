"""Examples in micro-batches: what predicts which token, where scores are read, and that nothing is split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.offline.encoding import Encoded
from learner.offline.packing import empty, pack


def encoded(prompt, *responses, scores=()):
    return Encoded(np.array(prompt, np.int32), tuple(np.array(r, np.int32) for r in responses), scores)


def seen_from(batch, position):
    """The tokens that the hidden state at a position has seen, by the segments."""
    ids = batch.token_ids[0].tolist()
    for s in batch.segments:
        at = s.start + s.prompt_length
        if s.start <= position < at:
            return ids[s.start : position + 1]
        for length in s.completion_lengths:
            if at <= position < at + length:
                return ids[s.start : s.start + s.prompt_length] + ids[at : position + 1]
            at += length
    raise AssertionError(position)


def read(batch):
    """(what the output layer has seen, the target, prompt number, score) of every target."""
    rows = zip(
        batch.target_positions.tolist(), batch.target_ids.tolist(), batch.sequence_index.tolist(), strict=True
    )
    prompts, scores = batch.prompts.tolist(), batch.scores.tolist()
    return [(seen_from(batch, p), t, prompts[s], scores[s]) for p, t, s in rows]


def test_a_token_is_predicted_from_what_stands_before_it():
    """One that has seen the token already would know it."""
    (batch,) = pack([encoded([1, 2], [3, 4, 0], [5, 0], scores=(1.0, 0.0))], 64)
    assert read(batch) == [
        ([1, 2], 3, 0, 1.0),
        ([1, 2, 3], 4, 0, 1.0),
        ([1, 2, 3, 4], 0, 0, 1.0),
        ([1, 2], 5, 0, 0.0),
        ([1, 2, 5], 0, 0, 0.0),
    ]


def test_a_score_is_read_at_the_end_mark_itself():
    (batch,) = pack([encoded([1, 2], [3, 4, 0], [5, 0], [0], scores=(1.0, 0.0, 0.5))], 64, only_ends=True)
    assert read(batch) == [
        ([1, 2, 3, 4, 0], 0, 0, 1.0),
        ([1, 2, 5, 0], 0, 0, 0.0),
        ([1, 2, 0], 0, 0, 0.5),
    ]


token = st.integers(0, 30)
examples = st.lists(
    st.builds(
        lambda prompt, responses: encoded(
            prompt, *responses, scores=tuple(map(float, range(len(responses))))
        ),
        st.lists(token, min_size=1, max_size=9),
        st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=100)
@given(examples=examples, budget=st.integers(8, 60), only_ends=st.booleans())
def test_every_response_is_trained_once_whole_beside_its_rivals(examples, budget, only_ends):
    batches = pack(examples, budget, only_ends)
    found = []
    for batch in batches:
        assert batch.num_tokens <= budget or len(set(batch.prompts.tolist())) == 1
        assert torch.equal(batch.weights, torch.ones(len(batch.target_ids)))
        assert sorted(set(batch.sequence_index.tolist())) == list(range(len(batch.scores)))
        found += [(prompt, score, tuple(seen), target) for seen, target, prompt, score in read(batch)]
    expected = []
    for number, example in enumerate(examples):
        homes = [batch for batch in batches if number in batch.prompts.tolist()]
        assert len(homes) == 1
        prompt = example.prompt.tolist()
        for score, response in enumerate(r.tolist() for r in example.responses):
            for at in range(len(response) - 1 if only_ends else 0, len(response)):
                seen = tuple(prompt + response[: at + only_ends])
                expected.append((number, float(score), seen, response[at]))
    assert sorted(found) == sorted(expected)


def test_the_prompt_is_laid_out_once():
    (batch,) = pack([encoded([1, 2, 3, 4], [5], [6], [7])], 64)
    assert batch.num_tokens == 7
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 4]]


@pytest.mark.parametrize("field", ["weights", "scores"])
def test_an_empty_micro_batch_has_one_response_that_counts_nothing(field):
    assert getattr(empty(), field).tolist() == [0.0]
