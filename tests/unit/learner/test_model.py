import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from learner.config import ParallelConfig
from learner.layout import Segment
from learner.model import build_model
from learner.slots import slots

SMOLLM = Path(".cache/models/SmolLM2-135M-Instruct")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SMOLLM_SIZES = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
"""Heads as SmolLM2-135M's: odd numbers of them, three queries to a key."""
SMOLLM_ROPE = {"rope_type": "default", "rope_theta": 100000.0}
EXPERTS = {"head_dim": 16, "num_experts": 6, "moe_intermediate_size": 24}
MODELS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=8),
    "llama-3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5, head_dim=8),
    "llama-2": LlamaConfig(**(SIZES | {"num_key_value_heads": 6}), head_dim=8),
    "smollm": LlamaConfig(**(SIZES | SMOLLM_SIZES), rope_parameters=SMOLLM_ROPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    # As long as the longest sequence here: full attention is then the same.
    "mistral": MistralConfig(**SIZES, sliding_window=70, head_dim=8),
    "mixtral": MixtralConfig(**SIZES, sliding_window=None, head_dim=8, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts_per_tok=2, norm_topk_prob=True),
    "qwen3-moe-plain": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts_per_tok=1, norm_topk_prob=False),
}


@dataclass
class Packed:
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: list[Segment]
    target_positions: torch.Tensor
    target_ids: torch.Tensor


def pack(groups):
    """Lay (prompt, completions) pairs out behind each other, every completion token a target."""
    tokens, positions, segments, targets, wanted = [], [], [], [], []
    for prompt, completions in groups:
        start = len(tokens)
        segments.append(Segment(start, len(prompt), tuple(map(len, completions))))
        tokens += prompt
        positions += range(len(prompt))
        for completion in completions:
            targets += [start + len(prompt) - 1, *range(len(tokens), len(tokens) + len(completion) - 1)]
            wanted += completion
            tokens += completion
            positions += range(len(prompt), len(prompt) + len(completion))
    tensors = [torch.tensor(x) for x in (tokens, positions, targets, wanted)]
    return Packed(tensors[0][None], tensors[1][None], segments, tensors[2], tensors[3])


def random_groups(vocab, shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(0, vocab, (length,), generator=generator).tolist()

    return [(draw(prompt), [draw(n) for n in lengths]) for prompt, lengths in shapes]


def hf_logprobs(model, groups, temperature):
    """Sequence by sequence, as plain as can be."""
    found = []
    for prompt, completions in groups:
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            logprobs = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
            found.append(logprobs[len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    """A made model in float32 whose norms and biases are not all ones and zeros."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    # Models ship dropout: in training it would make the ratio of a policy to itself another than 1.
    config = json.loads((path / "config.json").read_text())
    assert config["attention_dropout"] == 0
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    return path


def hf_model(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def hf_gradients(model):
    """By the names in the folder, where experts lie one by one and not stacked."""
    expert, (gate, up, down) = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
    if model.config.model_type == "mixtral":
        expert, (gate, up, down) = "block_sparse_moe.experts", ("w1", "w3", "w2")
    found = {}
    for name, parameter in model.named_parameters():
        layer, inside, which = name.partition(".mlp.experts.")
        if not inside:
            found[name.replace("mlp.gate.", f"{expert.split('.')[0]}.gate.")] = parameter.grad
            continue
        for number, grad in enumerate(parameter.grad):
            parts = zip((gate, up), grad.chunk(2), strict=True) if which == "gate_up_proj" else [(down, grad)]
            found |= {f"{layer}.{expert}.{number}.{part}.weight": rows for part, rows in parts}
    return found


def gradients_as_hf(model):
    parameters = dict(model.named_parameters())
    found = {}
    for slot in slots(model.family, ParallelConfig()):
        names = (whole.name for whole in slot.whole)
        found |= dict(zip(names, slot.join([parameters[slot.parameter].grad]), strict=True))
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_groups_give_hugging_faces_logprobs_and_gradients(one_process, folder, recompute):
    groups = random_groups(131, [(9, (7, 3, 12)), (20, (5,)), (1, (4, 4)), (40, (11, 2, 30, 8))])
    reference = hf_model(folder)
    expected = hf_logprobs(reference, groups, 0.8)
    slopes = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    (expected * slopes).sum().backward()

    model = build_model(folder, ParallelConfig(), torch.float32, recompute).train()
    found, entropy = model(pack(groups), 0.8)
    (found * slopes).sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (entropy > 0).all()
    gradients = gradients_as_hf(model)
    wanted = hf_gradients(reference)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4 * scale, rtol=0, msg=name)


def test_the_order_of_the_groups_does_not_matter(one_process, folder):
    groups = random_groups(131, [(9, (7, 3)), (4, (5,)), (6, (2, 2, 6))])
    model = build_model(folder, ParallelConfig(), torch.float32)
    with torch.no_grad():
        together, _ = model(pack(groups), 1.0)
        alone = torch.cat([model(pack([group]), 1.0)[0] for group in groups])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_bfloat16_is_as_near_to_the_truth_as_hugging_faces_bfloat16(one_process, folder):
    # Rounding errors differ from processor to processor: enough tokens for a mean of them to mean something.
    groups = random_groups(131, [(9, (40,) * 6)] * 4)
    with torch.no_grad():
        model = build_model(folder, ParallelConfig(), torch.bfloat16)
        found, _ = model(pack(groups), 1.0)
        rounded = hf_model(folder, torch.bfloat16)
        theirs = hf_logprobs(rounded, groups, 1.0)
        truth = hf_logprobs(rounded.float(), groups, 1.0)
    assert found.dtype == torch.float32
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert (found - truth).abs().mean() <= 1.2 * (theirs - truth).abs().mean()


def test_a_second_frozen_instance_gives_the_same_and_takes_no_gradient(one_process, folder):
    groups = random_groups(131, [(9, (7, 3))])
    policy = build_model(folder, ParallelConfig(), torch.float32)
    reference = build_model(folder, ParallelConfig(), torch.float32).requires_grad_(False)
    policy(pack(groups), 1.0)[0].sum().backward()
    with torch.no_grad():
        policy.embedding.word_embeddings.weight.zero_()
        kept, _ = reference(pack(groups), 1.0)
    torch.testing.assert_close(kept, hf_logprobs(hf_model(folder), groups, 1.0), atol=1e-4, rtol=0)
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM.exists(), reason="python -m launch.demo_model has not run")
def test_a_real_model_in_float32_gives_hugging_faces_logprobs(one_process):
    groups = random_groups(49152, [(30, (12, 20, 5))])
    with torch.no_grad():
        expected = hf_logprobs(hf_model(SMOLLM), groups, 1.0)
        found, _ = build_model(SMOLLM, ParallelConfig(), torch.float32)(pack(groups), 1.0)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
