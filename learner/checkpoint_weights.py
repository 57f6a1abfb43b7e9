"""The weights of a checkpoint by Hugging Face's names: as they lie there, or adapters fused with their base.

A checkpoint of a run with `learner.lora` holds what was trained and no more, and so does its part of a value
model with `learner.value.lora`; its meta.json names the folder, or the checkpoint, that the run started from.
"""

from pathlib import Path
from typing import Any

import torch

from learner.checkpoint_files import EMA, VALUE, named_meta
from learner.config import LoraConfig, ParallelConfig
from learner.families import Family, Head
from learner.lora import FusedFolder, trained_slots
from learner.megatron_folder import MegatronFolder, StoredTensors
from learner.safetensors_folder import SafetensorsFolder, WholeTensors


def stored_head(folder: Path) -> Head:
    """Of the model in a checkpoint, or in its folder of a value model."""
    return "score" if "score.weight" in StoredTensors(folder).shapes else "vocabulary"


def open_checkpoint(
    path: Path, family: Family, model: Path | None = None, averaged: bool = False
) -> WholeTensors:
    """
    Args:
        path: A checkpoint.
        model: The folder of adapters' base, if it is not where meta.json says.
        averaged: The moving average of what was trained, in its place.

    Raises:
        ValueError: It is no checkpoint, or the base of its adapters is not there.
    """
    meta = named_meta(path)
    folder = path / EMA if averaged else path
    if not meta.get("lora"):
        return MegatronFolder(folder, family)
    base = Path(meta["init_from"] or model or meta["model"])
    if not base.is_dir():
        raise ValueError(f"{path}: its adapters are of the weights in {base}, which is not there")
    weights = open_checkpoint(base, family) if meta["init_from"] else SafetensorsFolder(base)
    return _fused(weights, folder, family, meta["lora"], meta["dtype"])


def open_value(path: Path, family: Family, model: Path) -> WholeTensors:
    """The value model's, in a checkpoint of a run that has one.

    Args:
        model: The folder that it started from.
    """
    meta = named_meta(path)
    if not meta.get("value_lora"):
        return MegatronFolder(path / VALUE, family)
    return _fused(SafetensorsFolder(model), path / VALUE, family, meta["value_lora"], meta["dtype"])


def _fused(base: WholeTensors, folder: Path, family: Family, adapters: Any, dtype: str) -> FusedFolder:
    config = LoraConfig.model_validate(adapters)
    trained = MegatronFolder(folder, family, trained_slots(family, ParallelConfig(), config))
    return FusedFolder(base, trained, family, config, getattr(torch, dtype))
