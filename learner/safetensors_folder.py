"""Reads tensors, or slices of them, out of a Hugging Face folder without loading the rest."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class SafetensorsFolder:
    """One open file at a time; pages are read only where a slice asks for them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._homes = _homes(self.path)
        self._open_name: str | None = None
        self._file: Any = None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or of another shape.

        Raises:
            ValueError: Names the tensor, and the shape that config.json asks for.
        """
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise ValueError(f"{self.path}: {name} has shape {found}; config.json asks for {shape}")

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """Some rows, and of those some columns."""
        part = self._slice(name)
        return part[rows] if columns is None else part[rows, columns]

    def _slice(self, name: str) -> Any:
        home = self._homes.get(name)
        if home is None:
            raise ValueError(f"{self.path}: the weights have no tensor {name}")
        if home != self._open_name:
            self._file = safe_open(self.path / home, framework="pt")
            self._open_name = home
        return self._file.get_slice(name)


def _homes(path: Path) -> dict[str, str]:
    """Which file each tensor lies in."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    single = path / "model.safetensors"
    if not single.exists():
        raise ValueError(f"model.path: {path} has no model.safetensors; expected a Hugging Face folder")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)
