"""What is another path on a GPU: Transformer Engine's layers, NCCL, pinned memory. Elsewhere it is skipped.

Whatever else the tests start finds the GPU by itself, as the services do.
"""

import threading
import time
from functools import partial

import pytest
import torch
from learner_runs import Run, assert_same, learn, make_model

from sync.buckets import pack, spec_of, unpack
from sync.group import Seat
from sync.manifest import Manifest
from sync.sender import BucketMemory, BucketSender
from sync.stager import Stager
from sync.stand_in import connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

BUCKET = 1 << 20
LAYOUTS = {"one": {}, "tensor": {"layout": {"tensor": 2}}, "pipeline": {"layout": {"pipeline": 2}}}
SETTINGS = {"updates_per_batch": 2, "algorithm": {"kl": {"coefficient": 0.1}, "entropy": 0.01}}


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(n, marks=two_devices) for n in ("tensor", "pipeline"))]
)
def test_a_learner_on_gpus_makes_the_numbers_of_one_on_a_cpu(layout, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    on_gpu = Run(tmp_path / "gpu", model, **SETTINGS, **LAYOUTS[layout])
    learn(1 if layout == "one" else 2, [on_gpu])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = Run(tmp_path / "cpu", model, **SETTINGS)
    learn(1, [on_cpu])
    assert_same(on_gpu, on_cpu, rel=1e-3)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_devices)])
def test_a_version_of_one_gpu_lands_in_the_pinned_memory_of_another(backend):
    """By gloo through the host's memory, where one device will do."""
    host, first, last = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    sending, receiving = (first, last) if backend == "nccl" else (host, first)
    sent = {f"layer.{i}": torch.randn(513, 257, device=first).to(torch.bfloat16) for i in range(12)}
    manifest = Manifest.layout([spec_of(name, tensor) for name, tensor in sent.items()], BUCKET)
    seats = [Seat("127.0.0.1", 1, "nonce", rank, 2, backend, 30.0) for rank in (0, 1)]
    stager = Stager(receiving)
    stager.begin(seats[1], True, 1, manifest)
    group = connect(seats[0], sending, stager)
    sender = BucketSender(group, BucketMemory(BUCKET, sending), 30.0, threading.Condition(), lambda: None)
    sender.start(1)
    for bucket, total in pack(manifest, sent.items(), sender.lend):
        sender.send(bucket, total)
    sender.finish()
    while stager.status()["state"] == "receiving":
        time.sleep(0.01)
    _, stream = stager.staged(1)
    assert stream.is_pinned()
    for name, tensor in unpack(manifest, stream):
        assert torch.equal(tensor, sent[name].cpu())
    stager.close(30.0)


def test_buckets_of_a_gpu_are_those_of_a_cpu():
    tensors = {f"layer.{i}": torch.randn(513, 257) for i in range(12)}
    manifest = Manifest.layout([spec_of(name, tensor) for name, tensor in tensors.items()], BUCKET)

    def packed(device: str) -> list[tuple[list[int], int]]:
        moved = ((name, tensor.to(device)) for name, tensor in tensors.items())
        lend = partial(torch.zeros, dtype=torch.uint8, device=device)
        return [(bucket.tolist(), total) for bucket, total in pack(manifest, moved, lend)]

    assert packed("cuda") == packed("cpu")
