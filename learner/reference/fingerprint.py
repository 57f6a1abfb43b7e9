"""Which weights a run starts from, told without reading all of them: the same for the same on every host."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from buffer.experiment import ModelConfig
from learner import families
from learner.checkpoint_files import META, named_meta
from sync.expected import weight_files

DIGEST_BYTES = 12


def fingerprint(model: ModelConfig, init_from: str | None) -> str:
    """Of a folder's facts and some rows of every tensor, in which any training shows; of a checkpoint its
    meta.json, which has every file's digest.

    Args:
        model: Its folder and the type that the weights are used in.
        init_from: The checkpoint that has the weights in the folder's place.

    Raises:
        ValueError: The weights cannot be read.
    """
    path = Path(init_from) if init_from else Path(model.path)
    family = families.read(model.path, families.own_head(model.path))
    digest = hashlib.blake2b(f"{model.dtype} {family}".encode(), digest_size=DIGEST_BYTES)
    digest.update(_of_checkpoint(path) if init_from else _of_folder(path))
    return digest.hexdigest()


def _of_checkpoint(path: Path) -> bytes:
    meta = named_meta(path)
    found = (path / META).read_bytes()
    if meta.get("lora"):
        # It holds the adapters alone.
        base = meta["init_from"]
        found += _of_checkpoint(Path(base)) if base else _of_folder(Path(meta["model"]))
    return found


def _of_folder(path: Path) -> bytes:
    """However its tensors are dealt over files."""
    found: dict[str, bytes] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: _of_tensor(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    joined = hashlib.blake2b()
    for name in sorted(found):
        joined.update(name.encode() + found[name])
    return joined.digest()


def _of_tensor(tensor: Any) -> bytes:
    """A safetensors slice's type, shape, and first, middle and last row."""
    shape = tensor.get_shape()
    digest = hashlib.blake2b(f"{tensor.get_dtype()} {shape}".encode())
    rows = shape[0] if shape else 0
    for row in sorted({0, rows // 2, rows - 1}) if rows else ():
        digest.update(tensor[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
