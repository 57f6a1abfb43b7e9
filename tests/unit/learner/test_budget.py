"""The plan's arithmetic against Megatron's models of every layout, our packing, and what autograd keeps."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from buffer.records import Group, Trajectory
from learner import budget, families, parallel
from learner.adapter import attach
from learner.attention import pack_segments
from learner.budget import Machine
from learner.config import LearnerConfig, LoraConfig, ParallelConfig
from learner.model import PolicyModel, build_model
from learner.packing import pack

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32
    ),
}
ALL = CONFIGS | MIXTURES
LORA = (LoraConfig(rank=3), LoraConfig(rank=2, modules=("q_proj", "v_proj", "o_proj")))
"""Of a dense model, of one with experts."""
CPU = Machine(gpu=False, weight_bytes=4, compute_bytes=4)


def family_of(name):
    config = ALL[name]
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    return families.from_config(config.to_dict() | {"architectures": [architecture]}, name)


LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (1, 1, 4), (2, 2, 2)]
LAYOUTS += [(8, 1, 1), (1, 3, 1), (2, 3, 2)]
"""The last ones share key-value heads, or have stages of one and of two layers."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_are_those_of_megatrons_model_on_every_rank(layout, as_rank):
    tensor, pipeline, expert = layout
    config = ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert)
    for rank in range(max(tensor, expert) * pipeline):
        with as_rank(config, rank):
            stage = parallel.pp_rank()
            for name in MIXTURES if expert > 1 else ALL:
                family = family_of(name)
                model = PolicyModel(family, family.transformer_config(config, torch.float32, False))
                expected = sum(parameter.numel() for parameter in model.parameters())
                assert budget.parameters(family, config, stage) == expected, name
                adapters = LORA[family.mixture is not None]
                made = PolicyModel(family, family.transformer_config(config, torch.float32, False), True)
                attach(made, adapters)
                trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
                assert budget.adapter_parameters(family, adapters, config, stage) == trained, name


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("tensor", [2, 8])
def test_activations_of_a_tensor_rank_are_what_autograd_keeps(as_rank, tmp_path, kind, tensor):
    """On two ranks each has a key-value head; eight share the two."""
    config = kind(**SIZES | {"num_key_value_heads": 2}, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    layout, family = ParallelConfig(tensor=tensor), families.read(tmp_path)
    (batch, *_) = micro_batches(400, 96, 4, 496)
    largest = budget.largest_micro_batch(496, 96, 4, 496)
    with as_rank(layout, 0):
        model = build_model(tmp_path, layout, torch.float32)
        found = kept_bytes(model, batch)
    layers = budget.kept_activations(
        family, LearnerConfig(parallel=layout, processes=tensor), 0, largest, CPU
    )
    output, _ = budget.output_bytes(family, tensor, largest, CPU)
    assert found == pytest.approx(sum(layers.values()) + output, rel=0.06)


@pytest.mark.parametrize("name", ALL)
def test_the_published_model_has_as_many_parameters_as_hugging_faces(name):
    expected = AutoModelForCausalLM.from_config(ALL[name]).num_parameters()
    assert budget.whole_parameters(family_of(name)) == expected


def full_group(prompt, completion, size):
    """Completions of equal length, none of advantage 0."""
    length = prompt + completion
    rows = [
        Trajectory(
            index=i,
            token_ids=np.arange(length, dtype=np.int32) % 131,
            loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
            behavior_logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            reward=1.0,
            reward_parts={},
            finish_reason="stop",
        )
        for i in range(size)
    ]
    return Group("g", "l", "0/0", "train", tuple(rows))


def micro_batches(prompt, completion, size, tokens):
    return pack([full_group(prompt, completion, size)], [np.ones(size)], tokens)


@pytest.mark.parametrize(
    ("prompt", "completion", "size", "tokens"),
    [(40, 24, 4, 136), (40, 24, 4, 112), (40, 24, 4, 64), (40, 88, 4, 64), (8, 56, 6, 344)],
)
def test_the_largest_micro_batch_is_what_packing_makes(prompt, completion, size, tokens):
    found = budget.largest_micro_batch(prompt + completion, completion, size, tokens)
    largest = max(micro_batches(prompt, completion, size, tokens), key=lambda m: m.num_tokens)
    family = family_of("llama")
    packed = pack_segments(largest.segments, largest.position_ids, family.rope, 6, torch.float32)
    masks = sum(block.mask.numel() for block in packed.blocks if block.mask is not None)
    assert (found.tokens, found.targets) == (largest.num_tokens, len(largest.target_ids))
    assert (found.keys, found.mask) == (packed.key_index.numel(), masks)


def test_segments_are_repeated_up_to_the_budget():
    one = budget.largest_micro_batch(64, 24, 4, 136)
    three = budget.largest_micro_batch(64, 24, 4, 408)
    assert (three.tokens, three.keys, three.mask, three.targets) == (
        3 * one.tokens,
        3 * one.keys,
        3 * one.mask,
        3 * one.targets,
    )


def kept_bytes(model, batch):
    """Of every storage that the forward pass leaves for the backward pass, but parameters."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def remember(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        logprobs, _ = model(batch)
    return sum(kept.values()) + sum(logits.nbytes for logits in logprobs.grad_fn.kept.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("prompt", "tokens"), [(40, 424), (400, 496)], ids=["together", "alone"])
def test_activations_are_what_autograd_keeps(one_process, tmp_path, name, recompute, prompt, tokens):
    completion, size = 96, 4
    AutoModelForCausalLM.from_config(ALL[name]).save_pretrained(tmp_path)
    model = build_model(tmp_path, ParallelConfig(), torch.float32, recompute)
    (batch, *_) = micro_batches(prompt, completion, size, tokens)
    largest = budget.largest_micro_batch(prompt + completion, completion, size, tokens)
    family = family_of(name)
    layers = budget.kept_activations(family, LearnerConfig(recompute=recompute), 0, largest, CPU)
    output, _ = budget.output_bytes(family, 1, largest, CPU)
    assert kept_bytes(model, batch) == pytest.approx(sum(layers.values()) + output, rel=0.06)


def test_the_fuller_of_the_output_layer_and_the_last_layer_counts():
    family, learner = family_of("llama"), LearnerConfig(recompute=True)
    inputs = budget.kept_activations(family, learner, 0, largest := budget.MicroBatch(512, 600, 0, 8), CPU)
    layer = budget.layer_activations(family, 1, largest, CPU) + budget.layer_workspace(
        family, 1, largest, CPU
    )
    few_targets = sum(budget.stage_activations(family, learner, 0, largest, CPU).values())
    assert few_targets == sum(inputs.values()) + layer
    many = budget.MicroBatch(512, 600, 0, 100_000)
    kept, moment = budget.output_bytes(family, 1, many, CPU)
    found = sum(budget.stage_activations(family, learner, 0, many, CPU).values())
    assert found == sum(inputs.values()) + kept + moment


def test_optimizer_state_is_twelve_bytes_a_weight_in_mixed_precision():
    assert budget.optimizer_bytes(100, 2, 1) == 1200
    assert budget.optimizer_bytes(100, 2, 4) == 300
    assert budget.optimizer_bytes(100, 4, 1) == 800
