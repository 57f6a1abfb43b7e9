"""Layout, packing and checksums of a version's byte stream."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.buckets import checksum, combine, pack, spec_of, unpack
from sync.manifest import ALIGN_BYTES, BLOCK_BYTES, Manifest, TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) * (seed % 2 or 1)


def send(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Pack through two lent buffers, as the publisher does; returns the stream and the buckets' sizes."""
    buffers = [torch.zeros(manifest.bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    stream, sizes = torch.zeros(manifest.stream_bytes, dtype=torch.uint8), []
    packed = pack(manifest, tensors.items(), lambda size: buffers[len(sizes) % 2][:size])
    for index, (bucket, summed) in enumerate(packed):
        assert summed == checksum(bucket)
        start, end = manifest.bucket(index)
        stream[start:end] = bucket
        sizes.append(bucket.numel())
    return stream, sizes


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12), st.integers(1, 4))
def test_any_tensors_come_back_from_buckets_of_any_size(parts, blocks):
    tensors = {f"t{i}": make(shape, dtype, i) for i, (shape, dtype) in enumerate(parts)}
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    manifest = Manifest.layout(specs, blocks * BLOCK_BYTES)
    stream, sizes = send(manifest, tensors)
    assert len(sizes) == manifest.num_buckets
    assert sum(sizes) == manifest.stream_bytes
    assert all(size <= blocks * BLOCK_BYTES for size in sizes)
    assert all(offset % ALIGN_BYTES == 0 for offset in manifest.offsets)
    for name, tensor in unpack(manifest, stream):
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    assert Manifest.from_wire(manifest.to_wire()) == manifest


@pytest.mark.parametrize("blocks", [3, 40, 200])
def test_a_bucket_that_is_summed_piece_by_piece_has_the_checksum_of_the_whole(blocks):
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate((5, 60_000, 3, 1, 130_000, 77, 300_000))}
    manifest = Manifest.layout([spec_of(*pair) for pair in tensors.items()], blocks * BLOCK_BYTES)
    stream, sizes = send(manifest, tensors)
    assert len(sizes) == manifest.num_buckets
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in unpack(manifest, stream))


def test_tensor_larger_than_a_bucket_spans_several_and_none_grows():
    tensors = {"small": torch.ones(3), "large": torch.arange(5000), "last": torch.zeros(1)}
    manifest = Manifest.layout([spec_of(*pair) for pair in tensors.items()], BLOCK_BYTES)
    stream, sizes = send(manifest, tensors)
    assert max(sizes) == BLOCK_BYTES
    assert torch.equal(dict(unpack(manifest, stream))["large"], tensors["large"])


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ({"a": torch.zeros(2)}, "b: in the manifest, but not yielded"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)},
            "c: yielded, but the manifest has only 2",
        ),
        (
            {"a": torch.zeros(2), "b": torch.zeros(4)},
            "shape=\\(4,\\).*where the manifest has.*shape=\\(3,\\)",
        ),
        ({"a": torch.zeros(2), "b": torch.zeros(3).half()}, "float16.*where the manifest has.*float32"),
        ({"b": torch.zeros(3), "a": torch.zeros(2)}, "name='b'.*where the manifest has.*name='a'"),
    ],
)
def test_tensors_that_are_not_the_manifest_are_named(yielded, message):
    manifest = Manifest.layout(
        [TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))], BLOCK_BYTES
    )
    with pytest.raises(ValueError, match=message):
        send(manifest, yielded)


def test_checksum_sees_every_word_and_the_order_of_blocks_and_buckets():
    bucket = torch.arange(3 * BLOCK_BYTES // 8).view(torch.uint8).clone()
    reference = checksum(bucket)
    assert checksum(bucket.clone()) == reference
    for place in (0, 7, BLOCK_BYTES, 3 * BLOCK_BYTES - 1):
        changed = bucket.clone()
        changed[place] ^= 1
        assert checksum(changed) != reference
    swapped = torch.cat(
        [bucket[BLOCK_BYTES : 2 * BLOCK_BYTES], bucket[:BLOCK_BYTES], bucket[2 * BLOCK_BYTES :]]
    )
    assert checksum(swapped) != reference
    assert combine([1, 2, 3]) != combine([2, 1, 3])
    assert -(1 << 63) <= reference < 1 << 63


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda wire: wire.update(bucket_bytes="64"), "bucket_bytes"),
        (lambda wire: wire.update(bucket_bytes=100), "multiple"),
        (lambda wire: wire["tensors"].append(wire["tensors"][0]), "named twice"),
        (lambda wire: wire["tensors"][1].__setitem__(3, 4), "offset 4: expected"),
        (lambda wire: wire["tensors"][0].__setitem__(1, "object"), "dtype 'object'"),
        (lambda wire: wire["tensors"][0].__setitem__(2, [-1]), "none negative"),
        (lambda wire: wire["tensors"][0].__setitem__(2, [1 << 50]), "larger than any model"),
        (lambda wire: wire["tensors"][0].pop(), "rows of name"),
        (lambda wire: wire.update(tensors=5), "expected a list"),
    ],
)
def test_manifest_from_the_wire_is_checked(change, message):
    wire = Manifest.layout(
        [TensorSpec("a", "float32", (2,)), TensorSpec("b", "int8", (3,))], BLOCK_BYTES
    ).to_wire()
    change(wire)
    with pytest.raises(ValueError, match=message):
        Manifest.from_wire(wire)
