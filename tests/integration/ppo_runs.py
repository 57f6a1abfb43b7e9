"""Settings of runs of PPO with a value model, and what two of them are compared by."""

import pytest
import torch
from learner_runs import Run, assert_same

PPO = {
    "updates_per_batch": 2,
    "algorithm": {
        "advantage": "gae",
        "kl": {"coefficient": 0.1, "placement": "reward", "target": 0.5, "horizon": 100},
    },
    "value": {"optimizer": {"lr": 1e-2, "clip_grad": 0.4}},
    "checkpoint": {"every": 2, "export": True},
}
COMPARED = (
    *("value/loss", "value/grad_norm", "value/return_mean", "value/explained_variance"),
    *("kl/coefficient", "kl/completion"),
)


def assert_same_ppo(got: Run, expected: Run, rel: float) -> None:
    """The value model and the KL coefficient's control too."""
    assert_same(got, expected, rel)
    for one, two in zip(got.rows, expected.rows, strict=True):
        for key in COMPARED:
            assert one[key] == pytest.approx(two[key], rel=rel, abs=rel / 10), (one["step"], key)
    for name, tensor in expected.values.items():
        assert torch.allclose(got.values[name], tensor, rtol=rel, atol=rel), name
