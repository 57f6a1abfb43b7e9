"""What of a batch is compared with what."""

import numpy as np
import pytest

from buffer.records import Batch, Group, Trajectory
from learner import parallel
from learner.advantages import grpo
from learner.config import LearnerExperiment, ParallelConfig
from learner.parts import parts_of


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    parallel.initialize(ParallelConfig(), seed=3)
    yield
    parallel.shutdown()


def experiment(**algorithm) -> LearnerExperiment:
    return LearnerExperiment.model_validate(
        {
            "name": "x",
            "run_dir": "r",
            "model": {"path": "m", "dtype": "float32", "max_length": 64},
            "buffer": {"groups_per_batch": 2},
            "rollout": {"group_size": 2},
            "learner": {"tokens_per_microbatch": 64, "algorithm": algorithm},
        }
    )


def group(name: str, rewards: tuple[float, ...]) -> Group:
    """Every group asks the very same prompt."""
    made = []
    for index, reward in enumerate(rewards):
        ids = np.array([5, 6, 7, 10 + index, 2], np.int32)
        mask = np.array([0, 0, 0, 1, 1], np.uint8)
        made.append(Trajectory(index, ids, mask, mask * -1.0, mask * 0, reward, {}, "stop"))
    return Group(name, f"lease-{name}", f"prompt-{name}", "train", tuple(made))


def test_a_prompt_that_comes_twice_in_a_batch_makes_two_groups():
    """Told apart by their ids, not by the prompt's tokens: were they merged, each would be compared with
    completions of the other."""
    rewards = [(1.0, 0.0), (3.0, 7.0)]
    shard = Batch(0, tuple(group(f"g{i}", r) for i, r in enumerate(rewards)), {})
    (part,) = parts_of(shard, experiment())
    found: dict[int, float] = {}
    for batch in part.micro_batches:
        found |= dict(zip(batch.sequence_index.tolist(), batch.advantages.tolist(), strict=True))
    expected = np.concatenate([grpo(np.array(r)) for r in rewards])
    assert [found[i] for i in range(4)] == pytest.approx(expected.tolist())


def test_a_prompt_that_comes_twice_makes_pairs_within_its_groups_alone():
    shard = Batch(0, (group("a", (1.0, 0.0)), group("b", (3.0, 7.0))), {})
    (part,) = parts_of(shard, experiment(loss="dpo"))
    assert part.ranking.groups.tolist() == [0, 0, 1, 1]
    assert part.total.groups == 2
