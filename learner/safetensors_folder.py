"""A Hugging Face folder: its tensors read slice by slice, and written one at a time."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from learner.checkpoint_files import sync
from sync.expected import INDEX as INDEX
from sync.expected import weight_map
from sync.manifest import TensorSpec

FILE_BYTES = 2 << 30
"""A written file holds at most this, unless one tensor is larger."""

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""torch's name → the format's, for the types that weights come in."""


class WholeTensors(Protocol):
    """Tensors by Hugging Face's names, wherever they lie."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or of another shape.

        Raises:
            ValueError: Names the tensor, and the shape that config.json asks for.
        """
        ...

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """Some rows, and of those some columns."""
        ...


DERIVED = ("lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names that some folders hold beside what is needed: a tied output layer, and what follows from the
configuration."""


class SafetensorsFolder:
    """`WholeTensors` of a folder: one open file at a time, and of it what a slice asks for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._homes = _homes(self.path)
        self._open_name: str | None = None
        self._file: Any = None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise ValueError(f"{self.path}: {name} has shape {found}; config.json asks for {shape}")

    def refuse_others(self, known: Collection[str]) -> None:
        """
        Raises:
            ValueError: There are weights beside those known, which would be lost: of a layer that
                `num_hidden_layers` leaves out, say.
        """
        others = [n for n in self._homes if n not in known and not n.endswith(DERIVED)]
        if others:
            raise ValueError(
                f"{self.path}: config.json asks for no tensor {others[0]} (one of {len(others)} such)"
            )

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        part = self._slice(name)
        return part[rows] if columns is None else part[rows, columns]

    def dtype(self, name: str) -> str:
        """Torch's name of a tensor's type.

        Raises:
            ValueError: It is of a type that weights are not trained in.
        """
        found = self._slice(name).get_dtype()
        for ours, theirs in SAFETENSORS_DTYPES.items():
            if theirs == found:
                return ours
        raise ValueError(
            f"{self.path}: {name} is of type {found}; expected one of {', '.join(SAFETENSORS_DTYPES)}"
        )

    def _slice(self, name: str) -> Any:
        home = self._homes.get(name)
        if home is None:
            raise ValueError(f"{self.path}: the weights have no tensor {name}")
        if home != self._open_name:
            try:
                self._file = safe_open(self.path / home, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / home} cannot be read: {error}") from error
            self._open_name = home
        return self._file.get_slice(name)


def _homes(path: Path) -> dict[str, str]:
    """Which file each tensor lies in."""
    index = path / INDEX
    if index.exists():
        return weight_map(index)
    single = path / "model.safetensors"
    if not single.exists():
        raise ValueError(f"model.path: {path} has no model.safetensors; expected a Hugging Face folder")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except SafetensorError as error:
        raise ValueError(f"{single} cannot be read: {error}") from error


def write_folder(
    target: Path,
    source: Path,
    specs: list[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    amend: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Write a Hugging Face folder; `target` appears whole or not at all, and is replaced if it exists.

    Args:
        source: Folder whose config and tokenizer files are taken over.
        specs: What `tensors` will yield, in this order, all of one dtype; each is written as it comes.
        amend: From the source's config to the one that is written, where the model has another head.
    """
    files = _files(specs)
    homes: dict[str, str] = {}
    with _whole(target) as partial:
        for number, held in enumerate(files, start=1):
            several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            name = several if len(files) > 1 else "model.safetensors"
            _write_file(partial / name, held, tensors)
            homes |= dict.fromkeys((spec.name for spec in held), name)
        # Runs the iterator to its end.
        assert next(tensors, None) is None
        if len(files) > 1:
            total = sum(spec.size_bytes for spec in specs)
            index = {"metadata": {"total_size": total}, "weight_map": homes}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        _write_rest(source, partial, specs[0].dtype, amend)


def write_adapter(
    target: Path, config: str, specs: list[TensorSpec], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write adapters as a folder of `peft`'s, whole or not at all; `target` is replaced if it exists."""
    with _whole(target) as partial:
        _write_file(partial / "adapter_model.safetensors", specs, tensors)
        # Runs the iterator to its end.
        assert next(tensors, None) is None
        (partial / "adapter_config.json").write_text(config)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name once it is whole, and is removed where it is not.

    What has the name goes aside first: half of that would look like a model.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        sync(partial)  # its name tells that it is whole, also after the power was gone
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


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


def _write_file(path: Path, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """One safetensors file, tensor by tensor; its library would want all of them in memory at once.

    The format: the header's length as eight bytes, little endian; the header, JSON padded with spaces to a
    multiple of eight; the tensors' bytes without gaps (github.com/huggingface/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        places = [end, end + spec.size_bytes]
        dtype = SAFETENSORS_DTYPES[spec.dtype]
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": places}
        end += spec.size_bytes
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for spec, (name, tensor) in zip(specs, tensors, strict=False):
            assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), f"{name} where {spec} was expected"
            raw = tensor.detach().to(getattr(torch, spec.dtype)).cpu().contiguous().reshape(-1)
            file.write(raw.view(torch.uint8).numpy().data)


def _write_rest(
    source: Path, folder: Path, dtype: str, amend: Callable[[dict[str, Any]], dict[str, Any]] | None
) -> None:
    """Config with this dtype, and every small file beside it: tokenizer, chat template, generation config."""
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != INDEX:
            shutil.copy2(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if amend is not None:
        config = amend(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
