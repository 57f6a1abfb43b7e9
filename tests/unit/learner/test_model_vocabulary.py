import math

import pytest
import torch

from learner import vocabulary
from learner.vocabulary import VocabShard, target_logprobs

VOCAB, PADDED, HIDDEN, TARGETS = 37, 40, 8, 11


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TARGETS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (TARGETS,), generator=generator)


def oracle(hidden, weight, targets, temperature):
    logprobs = ((hidden @ weight[:VOCAB].t()) / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("chunk", "kept"), [(1 << 24, 1 << 27), (3 * VOCAB, 4 * VOCAB), (3 * VOCAB, 0)])
def test_values_and_gradients_equal_a_plain_log_softmax(inputs, temperature, chunk, kept, monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(vocabulary, "KEPT_NUMBERS", kept)
    hidden, weight, targets = inputs
    slopes = torch.linspace(-1, 2, TARGETS)
    expected = oracle(hidden, weight, targets, temperature)
    loss = (expected[0] * slopes).sum() + (expected[1] * slopes.flip(0)).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))

    found = target_logprobs(hidden, weight, targets, VocabShard(0, VOCAB, None), temperature)
    loss = (found[0] * slopes).sum() + (found[1] * slopes.flip(0)).sum()
    found_grads = torch.autograd.grad(loss, (hidden, weight))

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_grads, grads, atol=1e-5, rtol=1e-5)
    assert found_grads[1][VOCAB:].abs().max() == 0


def test_logits_of_bfloat16_are_reduced_in_float32(inputs):
    hidden, weight = (x.detach().bfloat16() for x in inputs[:2])
    logits = hidden.matmul(weight[:VOCAB].t()).float() / 0.7
    expected = logits.log_softmax(-1).gather(1, inputs[2][:, None])[:, 0]
    logprobs, entropy = target_logprobs(hidden, weight, inputs[2], VocabShard(0, VOCAB, None), 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_gradient_is_the_slope_of_the_value(inputs):
    hidden, weight, targets = (x.detach().double() if x.is_floating_point() else x for x in inputs)

    def logprobs(hidden, weight):
        return target_logprobs(hidden, weight, targets, VocabShard(0, VOCAB, None), 0.9)[0]

    # Reductions are float32, so a wide step and a wide tolerance. A second backward pass computes the logits
    # again that the first one used up, equal up to float32.
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        logprobs, (hidden, weight), eps=1e-2, atol=1e-3, rtol=1e-2, nondet_tol=1e-5, fast_mode=True
    )


def test_entropy_of_equal_logits_is_that_of_the_real_vocabulary():
    shard = VocabShard(0, VOCAB, None)
    weight = torch.ones(PADDED, HIDDEN)
    logprobs, entropy = target_logprobs(torch.ones(2, HIDDEN), weight, torch.tensor([0, 5]), shard, 1.0)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(VOCAB)))
    torch.testing.assert_close(logprobs, -entropy)


def test_no_targets_give_no_logprobs_and_zero_gradients(inputs):
    hidden, weight, targets = inputs
    logprobs, _ = target_logprobs(hidden[:0], weight, targets[:0], VocabShard(0, VOCAB, None), 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad.abs().max() == 0
