from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from learner.attention import SegmentAttention, pack_segments
from learner.families import Rope

HEADS, GROUPS, DIM = 6, 2, 8
ROPE = Rope(theta=10000.0)


def segment(start, prompt, *completions):
    return SimpleNamespace(start=start, prompt_length=prompt, completion_lengths=completions)


def layout(segments):
    """Position of each token, and bool [S, S]: who sees whom, token by token."""
    owners, positions = [], []
    for number, s in enumerate(segments):
        owners += [(number, None)] * s.prompt_length
        positions += list(range(s.prompt_length))
        for index, length in enumerate(s.completion_lengths):
            owners += [(number, index)] * length
            positions += list(range(s.prompt_length, s.prompt_length + length))
    size = len(owners)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for q in range(size):
        for k in range(q + 1):
            same_segment = owners[q][0] == owners[k][0]
            seen[q, k] = same_segment and owners[k][1] in (None, owners[q][1])
    return torch.tensor(positions), seen


def oracle(query, key, value, positions, seen):
    """Rotary embedding as a rotation of each (i, i + D/2) pair, then a full masked softmax."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)

    def rotate(heads):
        first, second = heads[..., : DIM // 2], heads[..., DIM // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    shape = (HEADS // GROUPS, 1)
    query = rotate(query[:, 0]).transpose(0, 1)
    key = rotate(key[:, 0]).transpose(0, 1).repeat_interleave(shape[0], 0)
    value = value[:, 0].transpose(0, 1).repeat_interleave(shape[0], 0)
    scores = query @ key.transpose(1, 2) / DIM**0.5
    weights = F.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (weights @ value).transpose(0, 1).flatten(1).unsqueeze(1)


@pytest.mark.parametrize(
    "segments",
    [
        [segment(0, 5, 4)],
        [segment(0, 3, 4, 4, 4)],
        [segment(0, 3, 4, 1, 6), segment(14, 7, 2, 2), segment(25, 2, 5)],
        [segment(0, 4, 0, 3, 2)],
        [segment(0, 1, 3, 1)],
    ],
    ids=["plain", "equal", "ragged", "empty completion", "prompt of one"],
)
def test_attention_equals_a_full_softmax_under_the_layouts_mask(segments):
    positions, seen = layout(segments)
    size = len(positions)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(size, 1, HEADS, DIM, generator=generator, requires_grad=True)
    key = torch.randn(size, 1, GROUPS, DIM, generator=generator, requires_grad=True)
    value = torch.randn(size, 1, GROUPS, DIM, generator=generator, requires_grad=True)
    slopes = torch.randn(size, 1, HEADS * DIM, generator=generator)
    expected = oracle(query, key, value, positions, seen)
    grads = torch.autograd.grad(expected, (query, key, value), slopes)

    packed = pack_segments(segments, positions[None], ROPE, DIM, torch.float32)
    attention = SegmentAttention(SimpleNamespace(kv_channels=DIM))
    found = attention(query, key, value, None, packed_seq_params=packed)
    found_grads = torch.autograd.grad(found, (query, key, value), slopes)

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_grads, grads, atol=1e-5, rtol=1e-5)


def test_llama3_scaling_stretches_long_waves_only():
    plain = ROPE.inverse_frequencies(64)
    scaled = Rope(10000.0, (8.0, 1.0, 4.0, 128)).inverse_frequencies(64)
    wavelengths = 2 * torch.pi / plain
    torch.testing.assert_close(scaled[wavelengths < 32], plain[wavelengths < 32])
    torch.testing.assert_close(scaled[wavelengths > 128], plain[wavelengths > 128] / 8)
    between = (wavelengths > 32) & (wavelengths < 128)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()
