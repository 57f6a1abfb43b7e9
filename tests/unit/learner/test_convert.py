import itertools
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from learner import convert, safetensors_folder
from learner.config import ParallelConfig
from learner.model import build_model
from sync.expected import ExpectedModel, read_specs
from sync.manifest import Manifest

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


@pytest.fixture
def make(tmp_path):
    def make(kind="llama", dtype=torch.bfloat16):
        torch.manual_seed(2)
        path = tmp_path / f"source-{kind}"
        AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")
        return path

    return make


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_was_loaded_is_exported_and_saved_bit_by_bit(one_process, make, tmp_path, kind, dtype):
    source = make(kind, dtype)
    expected = load_file(source / "model.safetensors")
    model = build_model(source, ParallelConfig(), dtype)
    exported = list(convert.export_hf(model))
    same(dict(exported), expected)
    told = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in exported]
    specs = convert.export_specs(model)
    assert told == [(spec.name, spec.dtype, spec.shape) for spec in specs]
    # A server that was started from the folder takes them.
    expected_there = ExpectedModel(read_specs(source), specs[0].dtype, model.family.tied)
    expected_there.check(Manifest.layout(specs, 1 << 20))

    target = tmp_path / "out"
    convert.save_hf(model, source, target)
    same(load_file(target / "model.safetensors"), expected)
    assert (target / "tokenizer.json").read_text() == "{}"
    reloaded = AutoModelForCausalLM.from_pretrained(target)
    assert reloaded.dtype == dtype


def test_a_large_model_is_saved_in_several_files_with_an_index(one_process, make, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_folder, "FILE_BYTES", 9000)
    source, target = make(), tmp_path / "out"
    model = build_model(source, ParallelConfig(), torch.bfloat16)
    convert.save_hf(model, source, target)
    convert.save_hf(model, source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 9000 + 2000 for file in files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    again = build_model(target, ParallelConfig(), torch.bfloat16)
    same(dict(convert.export_hf(again)), load_file(source / "model.safetensors"))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dies_at", range(4))
def test_whatever_of_a_replacement_was_made_the_folder_is_whole_or_not_there(
    one_process, make, tmp_path, monkeypatch, dies_at
):
    """A folder goes file by file, its config.json among the last."""
    source, target = make(), tmp_path / "out"
    model = build_model(source, ParallelConfig(), torch.bfloat16)
    convert.save_hf(model, source, target)
    whole, steps = {file.name for file in target.iterdir()}, itertools.count()

    def step(do):
        if next(steps) == dies_at:
            raise KeyboardInterrupt
        do()

    def remove(folder, ignore_errors):
        for file in sorted(folder.iterdir(), reverse=True) if folder.exists() else []:
            step(file.unlink)
        shutil.rmtree(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(safetensors_folder, "shutil", SimpleNamespace(rmtree=remove, copy2=shutil.copy2))
    monkeypatch.setattr(
        safetensors_folder, "os", SimpleNamespace(replace=lambda a, b: step(lambda: os.replace(a, b)))
    )
    with pytest.raises(KeyboardInterrupt):
        convert.save_hf(model, source, target)
    assert not target.exists() or {file.name for file in target.iterdir()} == whole
    monkeypatch.undo()
    convert.save_hf(model, source, target)
    assert {file.name for file in tmp_path.iterdir()} - {source.name} == {"out"}


def test_an_iterator_closed_early_leaves_nothing_behind(one_process, make):
    model = build_model(make(), ParallelConfig(), torch.bfloat16)
    tensors = convert.export_hf(model)
    next(tensors)
    tensors.close()
    assert next(tensors, None) is None


def test_weights_that_do_not_fit_the_config_are_refused_by_name(one_process, make):
    source = make()
    weights = load_file(source / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    save_file(weights | {norm: weights[norm][:5].clone()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{norm} has shape \(5,\); config.json asks for \(32,\)"):
        build_model(source, ParallelConfig(), torch.bfloat16)
    del weights[norm]
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"the weights have no tensor {norm}"):
        build_model(source, ParallelConfig(), torch.bfloat16)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        build_model(source, ParallelConfig(), torch.bfloat16)


def test_weights_are_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    synced = []
    target = tmp_path / "model"

    def sync(folder):
        synced.append((folder / "a").exists() and not target.exists())

    monkeypatch.setattr(safetensors_folder, "sync", sync)
    with safetensors_folder._whole(target) as partial:
        (partial / "a").write_text("weights")
    assert synced == [True]
    assert target.exists()
