"""What goes before the first publish."""

import time

import pytest

from learner import parallel
from learner.config import ParallelConfig
from learner.layout_config import ReferenceConfig
from learner.publishing import NoMembers, Publishing
from sync.config import SyncConfig


class Sender:
    """Has its first member at the given look."""

    def __init__(self, at: int) -> None:
        self.left = at

    def wait_for_members(self, count, timeout_s):
        self.left -= 1
        time.sleep(0.001)
        return self.left < 0

    def wants_publish(self):
        raise AssertionError

    def publish(self, version, specs, tensors):
        raise AssertionError

    def wait_loaded(self):
        raise AssertionError

    def counted(self):
        raise AssertionError


@pytest.fixture(scope="module", autouse=True)
def world():
    parallel.initialize(ParallelConfig())
    yield
    parallel.shutdown()


def test_the_first_member_is_waited_for():
    assert Publishing(None, Sender(3), None, 60).await_member(lambda: False)


def test_a_signal_ends_the_wait_for_the_first_member():
    looks = iter([False, False, True])
    assert not Publishing(None, Sender(1000), None, 60).await_member(lambda: next(looks))


def test_nobody_within_the_time_is_told():
    with pytest.raises(NoMembers, match=r"no rollout server joined within 0\.05 s"):
        Publishing(None, Sender(1000), None, 0.05).await_member(lambda: False)


def test_a_server_has_as_long_to_load_its_model_as_those_beside_the_learner():
    assert SyncConfig().join_timeout_s == ReferenceConfig(address="tcp://127.0.0.1:1").timeout_s
