"""The weights of a checkpoint by Hugging Face's names: as they lie there, or adapters fused with their base.

A checkpoint of a run with `learner.lora` holds what was trained and no more, and so does its part of a value
model with `learner.value.lora`; its meta.json names the folder, or the checkpoint, that the run started from.
"""

from pathlib import Path
from typing import Any

import torch

from buffer.experiment import ModelConfig
from learner.checkpoint_files import EMA, VALUE, named_meta
from learner.config import LoraConfig, ParallelConfig
from learner.families import Family, Head
from learner.lora import FusedFolder, trained_slots
from learner.megatron_folder import MegatronFolder, StoredTensors
from learner.reference.fingerprint import fingerprint
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
        ValueError: It is no checkpoint, or the base of its adapters is not there, or not what it was.
    """
    meta = named_meta(path)
    folder = path / EMA if averaged else path
    if not meta.get("lora"):
        return MegatronFolder(folder, family)
    base = Path(meta["init_from"] or model or meta["model"])
    if not base.is_dir():
        raise ValueError(f"{path}: its adapters are of the weights in {base}, which is not there")
    _check_base(path, "adapters", meta.get("start"), meta, model or Path(meta["model"]))
    weights = open_checkpoint(base, family) if meta["init_from"] else SafetensorsFolder(base)
    return _fused(weights, folder, family, meta["lora"], meta["dtype"])


def open_value(path: Path, family: Family, model: Path) -> WholeTensors:
    """The value model's, in a checkpoint of a run that has one.

    Args:
        model: The folder that it started from.

    Raises:
        ValueError: It is no checkpoint, or that folder is not what it was below its adapters.
    """
    meta = named_meta(path)
    if not meta.get("value_lora"):
        return MegatronFolder(path / VALUE, family)
    _check_base(path, "value model's adapters", meta.get("value_start"), meta | {"init_from": None}, model)
    return _fused(SafetensorsFolder(model), path / VALUE, family, meta["value_lora"], meta["dtype"])


def _check_base(path: Path, whose: str, start: str | None, meta: dict[str, Any], model: Path) -> None:
    """Adapters are a difference to the very weights that they were trained on, and add noise to any other.

    Args:
        path: A checkpoint, for the line.
        whose: What it has of adapters, for the line.
        start: Fingerprint of the weights below them; None in an older one, which is not compared. Nor is one
            above another checkpoint, of which nobody has the model's config any more.
        meta: Its `dtype`, `model` and `init_from`.
        model: Folder of the base, or of its config where the base is a checkpoint.

    Raises:
        ValueError: The base has other weights now.
    """
    init_from = meta["init_from"]
    # Of a checkpoint below them the config counts that the run had, whatever folder describes it today.
    described = Path(meta["model"]) if init_from and Path(meta["model"]).is_dir() else model
    if start is None or not described.is_dir():
        return
    if fingerprint(ModelConfig(path=str(described), dtype=meta["dtype"]), init_from) == start:
        return
    elsewhere = (
        "" if init_from else "; `slipstream convert megatron-to-hf --model FOLDER` takes them elsewhere"
    )
    raise ValueError(
        f"{path}: its {whose} were trained on other weights than {init_from or model} has now; bring those "
        f"back{elsewhere}"
    )


def _fused(base: WholeTensors, folder: Path, family: Family, adapters: Any, dtype: str) -> FusedFolder:
    config = LoraConfig.model_validate(adapters)
    trained = MegatronFolder(folder, family, trained_slots(family, ParallelConfig(), config))
    return FusedFolder(base, trained, family, config, getattr(torch, dtype))
