"""The reward model against Hugging Face's sequence classification: scores, gradients, and its folder."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

from learner import convert, families
from learner.config import ParallelConfig
from learner.model import build_model
from learner.offline.encoding import Encoded
from learner.offline.packing import pack
from learner.slots import slots

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_labels=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_labels=1, head_dim=16),
}
LENGTHS = [(5, (3, 7, 1)), (9, (4, 2))]
"""Prompt and responses of each example."""


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "scored")
    return tmp_path / "scored"


def examples():
    draw = np.random.default_rng(4)
    return [
        Encoded(
            draw.integers(3, 67, prompt).astype(np.int32),
            tuple(draw.integers(3, 67, n).astype(np.int32) for n in lengths),
            tuple(map(float, range(len(lengths)))),
        )
        for prompt, lengths in LENGTHS
    ]


def build(path):
    return build_model(path, ParallelConfig(), torch.float32, head="score")


def test_scores_and_gradients_are_hugging_faces(one_process, folder):
    reference = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = torch.cat(
        [
            reference(torch.tensor(np.concatenate([e.prompt, r]))[None]).logits[0]
            for e in sorted(examples(), key=lambda e: -len(e.prompt) - sum(map(len, e.responses)))
            for r in e.responses
        ]
    )
    slopes = torch.linspace(-1, 2, len(expected))
    (expected * slopes).sum().backward()
    model = build(folder)
    (batch,) = pack(examples(), 64, only_ends=True)
    found = model(batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (found * slopes).sum().backward()
    parameters = dict(model.named_parameters())
    gradients = {}
    for slot in slots(model.family, ParallelConfig()):
        names = (whole.name for whole in slot.whole)
        gradients |= dict(zip(names, slot.join([parameters[slot.parameter].grad]), strict=True))
    assert gradients.keys() == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4 * scale, rtol=0, msg=name)


def test_a_folder_goes_in_and_out_unchanged_and_names_no_padding_that_is_the_end_mark(
    one_process, folder, tmp_path
):
    convert.save_hf(build(folder), folder, tmp_path / "out")
    expected, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, None)


def test_padding_that_is_another_token_stays(one_process, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 1}))
    convert.save_hf(build(folder), folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == 1


def test_on_a_language_model_the_row_is_new_and_the_seeds(one_process, tmp_path):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    first, second = build(tmp_path), build(tmp_path)
    assert torch.equal(first.score.weight, second.score.weight)
    assert 0.005 < first.score.weight.std().item() < 0.05
    assert not any("output_layer" in name for name, _ in first.named_parameters())


def test_what_is_no_score_model_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="ForSequenceClassification is not supported"):
        families.from_config(config, "config.json")
    labels = {"id2label": {"0": "bad", "1": "good", "2": "best"}}
    with pytest.raises(ValueError, match="with 3 labels; a reward model has num_labels 1"):
        families.from_config(config | labels, "config.json", "score")
