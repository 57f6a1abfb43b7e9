"""A manifest is compared with the checkpoint that the server was started from."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sync.errors import ManifestRefused
from sync.expected import ExpectedModel, read_shapes, read_specs
from sync.manifest import BLOCK_BYTES, Manifest, TensorSpec

SPECS = [
    TensorSpec("model.embed_tokens.weight", "bfloat16", (8, 4)),
    TensorSpec("model.layers.0.mlp.up_proj.weight", "bfloat16", (6, 4)),
    TensorSpec("model.layers.0.router.bias", "float32", (3,)),
]


def manifest(*specs: TensorSpec) -> Manifest:
    return Manifest.layout(specs, BLOCK_BYTES)


def test_specs_come_from_the_files(tmp_path):
    tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS}
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:2]}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({name: tensors[name] for name in names[2:]}, tmp_path / "model-2.safetensors")
    assert sorted(read_specs(tmp_path), key=lambda s: s.name) == sorted(SPECS, key=lambda s: s.name)
    assert read_specs(tmp_path / "nowhere") == []


def test_only_what_the_index_names_counts(tmp_path):
    for name in ("model-1", "consolidated"):
        save_file({f"{name}.weight": torch.zeros(2, 3)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"model-1.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [s.name for s in read_specs(tmp_path)] == ["model-1.weight"]
    assert read_shapes(tmp_path) == {"model-1.weight": ("F32", (2, 3))}
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a map of tensors to files"):
        read_specs(tmp_path)


def test_the_same_model_passes_in_any_order_and_in_the_engines_dtype():
    ExpectedModel(SPECS, "bfloat16", tied=False).check(manifest(*reversed(SPECS)))
    cast = [TensorSpec(s.name, "float32", s.shape) for s in SPECS]
    ExpectedModel(SPECS, "float32", tied=False).check(manifest(*cast))


def test_a_tied_head_may_be_sent_or_not():
    head = TensorSpec("lm_head.weight", "bfloat16", (8, 4))
    for stored in (SPECS, [*SPECS, head]):
        for sent in (SPECS, [*SPECS, head]):
            ExpectedModel(stored, "bfloat16", tied=True).check(manifest(*sent))
    with pytest.raises(ManifestRefused, match="lm_head"):
        ExpectedModel(SPECS, "bfloat16", tied=False).check(manifest(*SPECS, head))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (SPECS[1:], "model.embed_tokens.weight: not in the manifest"),
        ([*SPECS, TensorSpec("extra", "bfloat16", (1,))], "extra: in the manifest, but not"),
        ([TensorSpec(SPECS[0].name, "bfloat16", (4, 8)), *SPECS[1:]], r"bfloat16\[4, 8\].*bfloat16\[8, 4\]"),
        ([TensorSpec(SPECS[0].name, "float16", (8, 4)), *SPECS[1:]], r"float16\[8, 4\] in the manifest"),
    ],
)
def test_a_difference_is_refused_by_name(sent, message):
    with pytest.raises(ManifestRefused, match=message):
        ExpectedModel(SPECS, "bfloat16", tied=False).check(manifest(*sent))
