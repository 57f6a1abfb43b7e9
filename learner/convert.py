"""Weights between Hugging Face's layout and Megatron's shards, in both directions, one tensor at a time.

`slots` lists every parameter of the whole model in Hugging Face's order, the same on every rank; loading
takes the ones of this rank's stage, exporting sends each to global rank 0 as it is asked for. No rank ever
holds more than its own shard and one whole tensor.
"""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from learner import families, lora, parallel
from learner.adapter import adapter_of
from learner.config import LoraConfig
from learner.safetensors_folder import WholeTensors, write_adapter, write_folder
from learner.slots import Slot, slots
from sync.manifest import TensorSpec

if TYPE_CHECKING:
    from learner.model import PolicyModel


@torch.no_grad()
def load(model: "PolicyModel", folder: WholeTensors) -> None:
    """Fill this rank's parameters, reading only their slices.

    Raises:
        ValueError: A tensor is missing or has another shape than config.json says.
    """
    parameters = dict(model.named_parameters())
    for slot in slots(model.family, parallel.layout()):
        elsewhere = slot.expert is not None and slot.holder != parallel.ep_rank()
        if slot.stage != parallel.pp_rank() or elsewhere:
            continue
        if slot.parameter == "score.weight" and not model.family.has_score:
            parameters.pop(slot.parameter)  # new, as the model made it
            continue
        for spec in slot.whole:
            folder.check(spec.name, spec.shape)
        shard = slot.read(folder, parallel.tp_rank() if slot.expert is None else 0)
        parameters.pop(slot.parameter).copy_(shard)
    # Tied embeddings lie once more on a last stage that is not the first.
    if (extra := parameters.pop("output_layer.weight", None)) is not None:
        (embedding, *_) = slots(model.family, parallel.layout())
        extra.copy_(embedding.read(folder, parallel.tp_rank()))
    assert not parameters, f"parameters without a place in the Hugging Face layout: {sorted(parameters)}"


def export_specs(model: "PolicyModel") -> list[TensorSpec]:
    """Name, dtype and shape of every tensor of `export_hf`, in its order; the same on every rank."""
    return _specs(model, slots(model.family, parallel.layout()))


def _specs(model: "PolicyModel", places: list[Slot]) -> list[TensorSpec]:
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return [TensorSpec(spec.name, dtype, spec.shape) for slot in places for spec in slot.whole]


def export_hf(model: "PolicyModel") -> Generator[tuple[str, Tensor], None, None]:
    """The whole model in Hugging Face's layout, gathered just in time. Collective over the first model copy.

    Global rank 0 gets every (name, tensor), adapters fused with their weights. A tensor may share memory with
    a parameter: copy it before the next optimizer step. The other ranks get nothing, and must exhaust the
    iterator all the same: that is what sends their shards. A rank 0 that stops early must close the iterator,
    which takes what the others still send.
    """
    return _gathered(model, slots(model.family, parallel.layout()))


def _gathered(model: "PolicyModel", places: list[Slot]) -> Generator[tuple[str, Tensor], None, None]:
    remaining = iter(places)
    try:
        for slot in remaining:
            shards = _collect(slot, model)
            if shards:
                yield from zip((spec.name for spec in slot.whole), slot.join(shards), strict=True)
    finally:
        for slot in remaining:
            _collect(slot, model)


@torch.no_grad()
def _collect(slot: Slot, model: "PolicyModel") -> list[Tensor]:
    """On global rank 0 the slot's shards, by tensor rank; elsewhere nothing, after sending what is held."""
    owners = [parallel.first_of_stage(slot.stage) + owner for owner in slot.owners]
    rank = parallel.rank()
    if rank != 0:
        if rank in owners:
            dist.send(_shard(slot, model).contiguous(), 0, parallel.export_group())
        return []
    shards = []
    for owner in owners:
        if owner == 0:
            shards.append(_shard(slot, model))
            continue
        shard = torch.empty(slot.shard_shape, dtype=model.config.params_dtype, device=parallel.device())
        dist.recv(shard, owner, parallel.export_group())
        shards.append(shard)
    return shards


def _shard(slot: Slot, model: "PolicyModel") -> Tensor:
    """What this rank holds of a slot; of a weight with an adapter the two fused."""
    weight = model.get_parameter(slot.parameter).detach()
    adapter = adapter_of(model, slot.parameter)
    return weight if adapter is None else adapter.fused(weight)


def save_adapter(model: "PolicyModel", config: LoraConfig, base: str | Path, target: Path) -> None:
    """Write the adapters alone, and a score model's row, in the format of Hugging Face's `peft`. Collective.

    Args:
        config: Of the adapters.
        base: Folder of the model that they belong to.
        target: Appears whole or not at all; replaced if it exists.
    """
    places = lora.trained_slots(model.family, parallel.layout(), config)
    tensors = _gathered(model, places)
    if parallel.rank() != 0:
        for _ in tensors:
            pass
        return
    described = lora.peft_config(model.family, config, Path(base).absolute())
    write_adapter(target, described, _specs(model, places), tensors)


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
    amend = partial(families.score_config, model.family) if model.family.head == "score" else None
    write_folder(Path(target), Path(source), export_specs(model), tensors, amend)
