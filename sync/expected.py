"""What tensors a server's model consists of, read from the checkpoint it was started from."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from sync.errors import ManifestRefused
from sync.manifest import Manifest, TensorSpec

logger = logging.getLogger(__name__)

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20
_COMPARED_BYTES = 4 << 20
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What a header of another shape raises somewhere."""
NO_WEIGHT = "rotary_emb.inv_freq"
"""Ends the names of what old checkpoints store and no model has."""
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a model consists of: those that its index names, without one all there are.

    A folder may hold the same weights once more under other names (Mistral's `consolidated.safetensors`).

    Raises:
        ValueError: The index cannot be read.
    """
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(weight_map(index).values()))]


def weight_map(index: Path) -> dict[str, str]:
    """Which file beside it each tensor lies in, as an index says.

    Raises:
        ValueError: It cannot be read, or names a file elsewhere.
    """
    try:
        homes: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: expected a map of tensors to files: {error!r}") from None
    for name in homes.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ValueError(f"{index}: expected files beside it, got {name!r}")
    return homes


def read_specs(folder: Path) -> list[TensorSpec]:
    """Every tensor of a Hugging Face folder, from its safetensors headers; [] where it has no such file.

    Raises:
        ValueError: A file is none.
    """
    specs: list[TensorSpec] = []
    for path in weight_files(folder):
        try:
            for name, entry in _header(path)[0].items():
                specs.append(TensorSpec(name, _DTYPES[entry["dtype"]], tuple(entry["shape"])))
        except (*_UNREADABLE, OSError) as error:
            raise ValueError(f"{path}: not a safetensors file: {error!r}") from None
    return specs


def read_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What every tensor of a Hugging Face folder is made of, in safetensors' words, and its shape."""
    entries = {name: entry for path in weight_files(folder) for name, entry in _header(path)[0].items()}
    return {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}


class _Place(NamedTuple):
    file: Path
    start: int
    size: int
    kind: tuple[str, tuple[int, ...]]


def untied(folder: Path) -> str | None:
    """What is wrong with a folder whose config.json ties the output layer to the embeddings, where its
    weights have both; None if nothing is.

    Hugging Face takes such weights at their word, and vLLM takes config.json at its own.
    """
    one, other = _place(folder, "model.embed_tokens.weight"), _place(folder, "lm_head.weight")
    if one is None or other is None or not _differ(one, other):
        return None
    return (
        "config.json has tie_word_embeddings true, and the weights a lm_head.weight that is not the "
        "embeddings and would be left out; set it to false if the model was trained with both, or remove the "
        "tensor"
    )


def _differ(one: _Place, other: _Place) -> bool:
    if one.kind != other.kind:
        return True
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for done in range(0, one.size, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, one.size - done)
            if left.read(size) != right.read(size):
                return True
    return False


def _place(folder: Path, tensor: str) -> _Place | None:
    for path in weight_files(folder):
        entries, begin = _header(path)
        if (entry := entries.get(tensor)) is not None:
            start, end = entry["data_offsets"]
            return _Place(path, begin + start, end - start, (entry["dtype"], tuple(entry["shape"])))
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a safetensors file, as far as its header and its size tell; None if nothing is."""
    try:
        entries, size = _header(path)
        expected = size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (*_UNREADABLE, OSError) as error:
        return f"{path}: not a safetensors file: {error!r}"
    found = path.stat().st_size
    return None if found == expected else f"{path}: {found} bytes, and its header tells of {expected}"


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A file's tensors as its header describes them, and where their data begins."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_MAX_HEADER_BYTES, path.stat().st_size):
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + size


class ExpectedModel:
    """The model that manifests must describe: the names and shapes of a checkpoint, in the engine's dtype."""

    def __init__(self, specs: list[TensorSpec], dtype: str, tied: bool) -> None:
        kinds = [spec.dtype for spec in specs]
        main = max(set(kinds), key=kinds.count) if kinds else dtype
        # The engine casts what is in the checkpoint's main dtype; the few tensors in another (a router's
        # float32 bias) stay in theirs.
        self._specs = {
            spec.name: TensorSpec(spec.name, dtype if spec.dtype == main else spec.dtype, spec.shape)
            for spec in specs
            if not spec.name.endswith(NO_WEIGHT)
        }
        self._optional = {"lm_head.weight"} if tied else set()

    def check(self, manifest: Manifest) -> None:
        """Compare name by name.

        Raises:
            ManifestRefused: The text names the first tensor that is missing, unknown or different.
        """
        if not self._specs:
            logger.warning("sync: no safetensors beside the model, so the manifest's tensors are not checked")
            return
        offered = {spec.name: spec for spec in manifest.tensors}
        for name, expected in self._specs.items():
            found = offered.pop(name, None)
            if found is None:
                if name not in self._optional:
                    raise ManifestRefused(f"{name}: not in the manifest, but in this server's model")
            elif found != expected:
                raise ManifestRefused(
                    f"{name}: {found.dtype}{list(found.shape)} in the manifest, "
                    f"{expected.dtype}{list(expected.shape)} in this server's model"
                )
        unknown = sorted(set(offered) - self._optional)
        if unknown:
            raise ManifestRefused(f"{unknown[0]}: in the manifest, but not in this server's model")
