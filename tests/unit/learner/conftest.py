"""What tests of the learner's parts share."""

from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from learner import parallel
from learner.config import ParallelConfig


@pytest.fixture(scope="module")
def one_process():
    """A job of one rank, this one."""
    parallel.initialize(ParallelConfig(), seed=3)
    yield
    parallel.shutdown()


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process any rank of a layout. Only the group is torch's fake one: what its collectives would
    bring from other ranks has its shape, and no meaning."""
    new_group = dist.new_group
    # Megatron asks for gloo groups beside the default ones: those would look for the other processes.
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **_: new_group(ranks, backend="fake"))

    @contextmanager
    def as_rank(layout, rank):
        world = max(layout.tensor, layout.expert) * layout.pipeline
        monkeypatch.setenv("WORLD_SIZE", str(world))
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            parallel.initialize(layout)
            yield
        finally:
            parallel.shutdown()

    return as_rank
