"""What tests of the learner's parts share."""

import pytest

from learner import parallel
from learner.config import ParallelConfig


@pytest.fixture(scope="module")
def one_process():
    """A job of one rank, this one."""
    parallel.initialize(ParallelConfig(), seed=3)
    yield
    parallel.shutdown()
