"""How a batch is split into updates, and what a gradient that is not finite does."""

import math
from types import SimpleNamespace

import pytest
import torch

from learner.optimizer import apply_gradients
from learner.parts import update_of_groups


def digests(count):
    return [bytes([7 * n % 251]) * 16 for n in range(count)]


@pytest.mark.parametrize(("count", "updates"), [(8, 1), (8, 2), (7, 3), (3, 3)])
def test_updates_get_evenly_many_groups(count, updates):
    homes = update_of_groups(digests(count), updates)
    sizes = [list(homes.values()).count(n) for n in range(updates)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_the_split_does_not_depend_on_who_holds_the_group():
    one, two = digests(9), list(reversed(digests(9)))
    assert update_of_groups(one, 4) == update_of_groups(two, 4)


class Optimizer(SimpleNamespace):
    def prepare_grads(self):
        return False

    def get_grad_norm(self):
        return math.sqrt(sum(float((p.grad**2).sum()) for p in self.parameters))

    def get_parameters(self):
        return self.parameters

    def step_with_ready_grads(self):
        self.stepped = True


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_makes_no_step(bad, caplog):
    weight = torch.zeros(2)
    weight.grad = torch.tensor([1.0, bad])
    optimizer = Optimizer(parameters=[weight], stepped=False)
    norm, made = apply_gradients(optimizer, 1.0)
    assert not math.isfinite(norm)
    assert not made
    assert not optimizer.stepped
    assert "skipped" in caplog.text
