"""The average of the weights against a loop over steps, in the model's place, and around a checkpoint."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.checkpoint import Checkpoints, Setup
from learner.config import EmaConfig, OptimizerConfig, ParallelConfig
from learner.model import build_model
from learner.optimizer import Trainable, make_trainable, set_rates

DECAY = 0.7
KINDS = [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=True, **sizes)).save_pretrained(path)
    return path


@pytest.fixture
def make(one_process, folder):
    def trainable(dtype: str, sharded: bool, ema: EmaConfig | None = None) -> Trainable:
        layout = ParallelConfig(distributed_optimizer=sharded)
        model = build_model(folder, layout, getattr(torch, dtype))
        return make_trainable(model, OptimizerConfig(lr=0.1), layout, ema or EmaConfig(decay=DECAY))

    return trainable


def step(trainable: Trainable, seed: int, value: float = 1.0) -> bool:
    set_rates(trainable.optimizer, 0.1, OptimizerConfig())
    trainable.model.zero_grad_buffer()
    trainable.optimizer.zero_grad()
    draw = torch.Generator().manual_seed(seed)
    for parameter in trainable.model.parameters():
        parameter.main_grad.copy_(value * torch.randn(parameter.shape, generator=draw))
    return trainable.step(0.0)[1]


def masters(trainable: Trainable) -> list[torch.Tensor]:
    return [m.detach().flatten().clone() for m in trainable.optimizer.get_parameters()]


def weights(trainable: Trainable) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainable.model.parameters()]


def averaged(trainable: Trainable) -> list[torch.Tensor]:
    """The master weights while the average is in their place."""
    assert trainable.ema is not None
    with trainable.ema.in_place():
        return masters(trainable)


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("dtype", "sharded"), KINDS)
def test_against_a_loop_over_steps(make, dtype, sharded):
    trainable = make(dtype, sharded)
    expected = [m.double() for m in masters(trainable)]
    assert same(averaged(trainable), masters(trainable)), "it starts as the initial weights"
    for number in range(4):
        before = masters(trainable)
        assert step(trainable, number, math.nan if number == 2 else 1.0) == (number != 2)
        assert same(before, masters(trainable)) == (number == 2)
        if number != 2:  # a step that is not made does not count
            expected = [
                DECAY * e + (1 - DECAY) * m.double()
                for e, m in zip(expected, masters(trainable), strict=True)
            ]
    for found, e in zip(averaged(trainable), expected, strict=True):
        assert torch.allclose(found.double(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "sharded"), KINDS)
def test_in_the_models_place_and_back_bit_by_bit(make, dtype, sharded):
    trainable = make(dtype, sharded)
    for number in range(2):
        step(trainable, number)
    own, own_masters = weights(trainable), masters(trainable)
    assert trainable.ema is not None
    with trainable.ema.in_place():
        inside = weights(trainable)
        flat = torch.cat(masters(trainable)).sort().values
        shown = torch.cat([w.flatten() for w in inside]).sort().values
        assert torch.equal(shown, flat.to(shown.dtype)), "the model shows the average, rounded to its type"
    assert not same(inside, own)
    assert same(weights(trainable), own)
    assert same(masters(trainable), own_masters)


@pytest.mark.parametrize(("dtype", "sharded"), KINDS)
def test_a_checkpoint_brings_it_back_and_the_next_steps_are_the_same(make, dtype, sharded, tmp_path):
    setup = Setup(dtype, sharded, 1, 1, 1, 1, "digest", "model")
    first = make(dtype, sharded)
    for number in range(2):
        step(first, number)
    Checkpoints(tmp_path, 2, setup).save(2, first)
    second = make(dtype, sharded)
    assert Checkpoints(tmp_path, 2, setup).resume(second) == 2
    assert same(averaged(second), averaged(first))
    for trainable in (first, second):
        step(trainable, 7)
    assert same(averaged(second), averaged(first))
    assert same(weights(second), weights(first))


def test_a_run_with_one_does_not_go_on_from_a_checkpoint_without(make, tmp_path):
    setup = Setup("float32", False, 1, 1, 1, 1, "digest", "model")
    trainable = make("float32", False)
    step(trainable, 0)
    plain = Trainable(trainable.model, trainable.optimizer)
    Checkpoints(tmp_path, 2, setup).save(1, plain)
    with pytest.raises(ValueError, match=r"without an average of the weights, this run has learner\.ema"):
        Checkpoints(tmp_path, 2, setup).resume(trainable)
    assert Path(tmp_path / "checkpoints/step-000001").is_dir()
    assert Checkpoints(tmp_path, 2, setup).resume(plain) == 1
