"""Weights between Hugging Face's layout and Megatron's shards, in both directions, one tensor at a time.

`slots` lists every parameter of the whole model in Hugging Face's order, the same on every rank; loading
takes the ones of this rank's stage, exporting sends each to global rank 0 as it is asked for. No rank ever
holds more than its own shard, one whole tensor, and while saving one file's worth.
"""

import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from learner import parallel
from learner.safetensors_folder import SafetensorsFolder
from learner.slots import Slot, slots
from sync.manifest import TensorSpec

if TYPE_CHECKING:
    from learner.model import PolicyModel

FILE_BYTES = 2 << 30
"""A saved file holds at most this, unless one tensor is larger."""


@torch.no_grad()
def load_hf(model: "PolicyModel", path: str | Path) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only their slices.

    Raises:
        ValueError: A tensor is missing or has another shape than config.json says.
    """
    folder = SafetensorsFolder(path)
    parameters = dict(model.named_parameters())
    for slot in slots(model.family, parallel.tp_size(), parallel.pp_size()):
        if slot.stage != parallel.pp_rank():
            continue
        for spec in slot.whole:
            folder.check(spec.name, spec.shape)
        shard = slot.read(folder, parallel.tp_rank())
        parameters.pop(slot.parameter).copy_(shard)
    # Tied embeddings lie once more on a last stage that is not the first.
    if (extra := parameters.pop("output_layer.weight", None)) is not None:
        (embedding, *_) = slots(model.family, parallel.tp_size(), parallel.pp_size())
        extra.copy_(embedding.read(folder, parallel.tp_rank()))
    assert not parameters, f"parameters without a place in the Hugging Face layout: {sorted(parameters)}"


def export_specs(model: "PolicyModel") -> list[TensorSpec]:
    """Name, dtype and shape of every tensor of `export_hf`, in its order; the same on every rank."""
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    places = slots(model.family, parallel.tp_size(), parallel.pp_size())
    return [TensorSpec(spec.name, dtype, spec.shape) for slot in places for spec in slot.whole]


def export_hf(model: "PolicyModel") -> Generator[tuple[str, Tensor], None, None]:
    """The whole model in Hugging Face's layout, gathered just in time. Collective over the first model copy.

    Global rank 0 gets every (name, tensor). A tensor may share memory with a parameter: copy it before the
    next optimizer step. The other ranks get nothing, and must exhaust the iterator all the same: that is what
    sends their shards. A rank 0 that stops early must close the iterator, which takes what the others still
    send.
    """
    parameters = dict(model.named_parameters())
    remaining = iter(slots(model.family, parallel.tp_size(), parallel.pp_size()))
    try:
        for slot in remaining:
            shards = _collect(slot, parameters, model.config.params_dtype)
            if shards:
                yield from zip((spec.name for spec in slot.whole), slot.join(shards), strict=True)
    finally:
        for slot in remaining:
            _collect(slot, parameters, model.config.params_dtype)


@torch.no_grad()
def _collect(slot: Slot, parameters: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    """On global rank 0 the slot's shards, by tensor rank; elsewhere nothing, after sending what is held."""
    copy = parallel.first_copy()
    size = parallel.tp_size()
    owners = copy[slot.stage * size : slot.stage * size + (size if slot.is_split else 1)]
    rank = parallel.rank()
    if rank != 0:
        if rank in owners:
            dist.send(parameters[slot.parameter].detach().contiguous(), 0, parallel.export_group())
        return []
    shards = []
    for owner in owners:
        if owner == 0:
            shards.append(parameters[slot.parameter].detach())
            continue
        shard = torch.empty(slot.shard_shape, dtype=dtype, device=parallel.device())
        dist.recv(shard, owner, parallel.export_group())
        shards.append(shard)
    return shards


def save_hf(model: "PolicyModel", source: str | Path, target: str | Path) -> None:
    """Write the model as a Hugging Face folder; `target` appears whole or not at all. Collective.

    Args:
        model: Its parameters are written as they are: loading them again gives the same bits.
        source: Folder whose config and tokenizer files are taken over.
        target: Replaced if it exists.
    """
    tensors = export_hf(model)
    if parallel.rank() != 0:
        for _ in tensors:
            pass
        return
    target = Path(target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_weights(tensors, _files(export_specs(model)), partial)
    _write_rest(Path(source), partial, model.config.params_dtype)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)


def _files(specs: list[TensorSpec]) -> list[list[TensorSpec]]:
    """Consecutive tensors, as many to a file as fit."""
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if files[-1] and size + spec.size_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.size_bytes
    return files


def _write_weights(
    tensors: Iterator[tuple[str, Tensor]], files: list[list[TensorSpec]], folder: Path
) -> None:
    homes: dict[str, str] = {}
    for number, specs in enumerate(files, start=1):
        name = (
            f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        )
        held = dict(next(tensors) for _ in specs)
        save_file({k: v.cpu().contiguous() for k, v in held.items()}, folder / name, {"format": "pt"})
        homes |= dict.fromkeys(held, name)
    # Runs the iterator to its end.
    assert next(tensors, None) is None
    if len(files) > 1:
        total = sum(spec.size_bytes for specs in files for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_rest(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Config with this dtype, and every small file beside it: tokenizer, chat template, generation config."""
    for file in source.iterdir():
        if (
            file.suffix in (".json", ".jinja", ".model", ".txt")
            and file.name != "model.safetensors.index.json"
        ):
            shutil.copy2(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
