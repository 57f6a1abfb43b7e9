"""What a version consists of: every tensor, with its place in one byte stream sent in buckets. No torch.

The tensors of a model lie in one stream, in the order given, each at an aligned offset; bucket k is simply
the k-th slice of `bucket_bytes` of that stream. A tensor larger than a bucket therefore spans several, none
ever exceeds its size, and a receiver that lays the buckets side by side finds every tensor in one piece.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Self, cast

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""The dtypes that may be published, by torch's names, and the bytes of one element."""

ALIGN_BYTES = 256
"""Each tensor starts at a multiple of this: enough for any dtype's view and for coalesced device copies."""

BLOCK_BYTES = 4096
"""Streams and buckets are whole blocks of this size: the unit of the checksum."""

MAX_TENSORS = 1_000_000
MAX_STREAM_BYTES = 1 << 45
MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its Hugging Face name, torch dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_CHARS:
            raise ValueError(f"tensor name of {len(self.name)} characters: expected 1 to {MAX_NAME_CHARS}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
        if len(self.shape) > 16 or any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape}: expected at most 16 sizes, none negative")
        if self.size_bytes > MAX_STREAM_BYTES:
            raise ValueError(f"{self.name}: shape {self.shape} is larger than any model")

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of one version: `tensors[i]` begins at byte `offsets[i]` of the stream."""

    bucket_bytes: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]

    @classmethod
    def layout(cls, specs: Iterable[TensorSpec], bucket_bytes: int) -> Self:
        """Lay tensors out in the order given.

        Raises:
            ValueError: Two tensors of one name, or a bucket size that is not a positive number of blocks.
        """
        tensors = tuple(specs)
        if bucket_bytes <= 0 or bucket_bytes % BLOCK_BYTES:
            raise ValueError(f"bucket_bytes {bucket_bytes}: expected a positive multiple of {BLOCK_BYTES}")
        seen: set[str] = set()
        offsets: list[int] = []
        end = 0
        for spec in tensors:
            if spec.name in seen:
                raise ValueError(f"{spec.name}: named twice in one manifest")
            seen.add(spec.name)
            offsets.append(end)
            end = _round_up(end + spec.size_bytes, ALIGN_BYTES)
        return cls(bucket_bytes, tensors, tuple(offsets))

    @property
    def stream_bytes(self) -> int:
        """Bytes on the wire: up to the end of the last tensor, in whole blocks."""
        if not self.tensors:
            return 0
        return _round_up(self.offsets[-1] + self.tensors[-1].size_bytes, BLOCK_BYTES)

    @property
    def num_buckets(self) -> int:
        return -(-self.stream_bytes // self.bucket_bytes)

    def bucket(self, index: int) -> tuple[int, int]:
        """First byte and end of a bucket within the stream."""
        assert 0 <= index < self.num_buckets, f"bucket {index} of {self.num_buckets}"
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.stream_bytes)

    def to_wire(self) -> dict[str, Any]:
        rows = zip(self.tensors, self.offsets, strict=True)
        return {
            "bucket_bytes": self.bucket_bytes,
            "tensors": [[spec.name, spec.dtype, list(spec.shape), offset] for spec, offset in rows],
        }

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Check and rebuild what `to_wire` made.

        Raises:
            ValueError: Not a manifest, or places that are not where both sides would put them.
        """
        fields = _mapping(value)
        bucket_bytes, rows = fields.get("bucket_bytes"), fields.get("tensors")
        if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool):
            raise ValueError(f"manifest: bucket_bytes {bucket_bytes!r}: expected an integer")
        if not isinstance(rows, list | tuple) or len(cast(list[object], rows)) > MAX_TENSORS:
            raise ValueError(f"manifest: tensors: expected a list of at most {MAX_TENSORS}")
        placed = [_row(row) for row in cast(list[object], rows)]
        manifest = cls.layout((spec for spec, _ in placed), bucket_bytes)
        for (spec, offset), expected in zip(placed, manifest.offsets, strict=True):
            if offset != expected:
                raise ValueError(f"manifest: {spec.name}: offset {offset}: expected {expected}")
        return manifest


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _mapping(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError(f"manifest: expected a map, found {type(value).__name__}")
    return cast(dict[object, object], value)


def _row(row: object) -> tuple[TensorSpec, int]:
    cells = cast(list[object], row) if isinstance(row, list | tuple) else []
    if len(cells) != 4:
        raise ValueError("manifest: tensors: expected rows of name, dtype, shape, offset")
    name, dtype, shape, offset = cells
    sizes = cast(list[object], shape) if isinstance(shape, list | tuple) else [None]
    integers = [size for size in [*sizes, offset] if isinstance(size, int) and not isinstance(size, bool)]
    if not isinstance(name, str) or not isinstance(dtype, str) or len(integers) != len(sizes) + 1:
        raise ValueError(f"manifest: tensors: {name!r}: expected text, text, integers, integer")
    return TensorSpec(name, dtype, tuple(integers[:-1])), integers[-1]
