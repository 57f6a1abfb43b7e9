import sys
import types

import pytest
import torch

from learner import cpu_backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_every_listed_place_is_where_it_was_and_is_adapted_once():
    cpu_backend.apply()
    cpu_backend.apply()
    assert torch.cuda.current_device() == torch.device("cpu")
    for place in cpu_backend.LITERAL_PLACES:
        with pytest.raises(cpu_backend.MovedPlaceError, match="has no CUDA literal"):
            cpu_backend.rewrite_literals(place)


def test_a_place_that_moved_is_named():
    with pytest.raises(cpu_backend.MovedPlaceError, match=r"optimizer\.clip_grads:gone"):
        cpu_backend.rewrite_literals("optimizer.clip_grads:gone")


def test_literals_are_swapped_in_nested_code(monkeypatch):
    def outer(flag):
        def inner():
            return "cuda", ("torch.cuda.FloatTensor", "kept")

        return inner() if flag else "cuda"

    module = types.ModuleType("megatron.core.made_up")
    module.outer = outer
    monkeypatch.setitem(sys.modules, "megatron.core.made_up", module)
    cpu_backend.rewrite_literals("made_up:outer")
    assert outer(True) == ("cpu", ("torch.FloatTensor", "kept"))
    assert outer(False) == "cpu"
