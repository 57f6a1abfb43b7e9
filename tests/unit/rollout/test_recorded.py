"""The server that gives out recorded groups."""

import asyncio

import numpy as np
import pytest
from pydantic import ValidationError

from buffer.records import Group, Lease, Prompt, Trajectory
from rollout.config import RolloutExperiment
from rollout.metrics import Meters
from rollout.recorded import RecordedGroups


def group(name: str) -> Group:
    mask = np.array([0, 1, 0, 1], np.uint8)
    ids, versions = np.arange(4, dtype=np.int32), mask.astype(np.int32) * 9
    logprobs = (np.float32(-1) * mask).astype(np.float32)
    made = Trajectory(0, ids, mask, logprobs, versions, float(len(name)), {}, "stop")
    return Group(name, "old-lease", "0/0", "train", (made,))


def lease(number: int) -> Lease:
    return Lease(f"lease-{number}", Prompt(f"0/{number}", {"prompt": "x"}), "train", 5)


def test_every_lease_gets_the_next_group_as_if_the_loaded_version_had_sampled_it():
    version, meters = 5, Meters("s")
    runner = RecordedGroups([group("a"), group("bb")], lambda: version, meters)
    first = asyncio.run(runner.run(lease(1)))
    version = 6
    second, third = (asyncio.run(runner.run(lease(n))) for n in (2, 3))
    assert [g.trajectories[0].reward for g in (first, second, third)] == [1, 2, 1]
    assert [(g.lease_id, g.prompt_id) for g in (first, third)] == [("lease-1", "0/1"), ("lease-3", "0/3")]
    assert len({g.group_id for g in (first, second, third)}) == 3, "the buffer stores a group once"
    assert first.trajectories[0].versions.tolist() == [0, 5, 0, 5]
    assert second.trajectories[0].versions.tolist() == [0, 6, 0, 6]
    assert (meters.completions, meters.tokens) == (3, 6)


def test_evaluation_is_refused_where_nothing_is_generated():
    source = {"kind": "function", "path": "rollout.tasks.addition:train"}
    settings = {
        "name": "x", "run_dir": "r", "model": {"path": "m"}, "data": {"train": source},
        "rollout": {"recorded": "somewhere"},
    }  # fmt: skip
    RolloutExperiment.model_validate(settings)
    with pytest.raises(ValidationError, match="set eval: null"):
        RolloutExperiment.model_validate(settings | {"eval": {"source": source}})
