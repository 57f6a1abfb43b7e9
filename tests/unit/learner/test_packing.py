"""Packing lays every trained token out exactly once, behind the right tokens, within the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.records import Group, Trajectory
from learner.packing import MicroBatch, empty, pack


def trajectory(prompt, completion, mask=None, index=0, version=3):
    ids = np.array([*prompt, *completion], np.int32)
    full = np.array([0] * len(prompt) + list(mask or [1] * len(completion)), np.uint8)
    logprobs = np.where(full, -0.01 * np.arange(len(ids)) - 1, 0).astype(np.float32)
    return Trajectory(
        index=index,
        token_ids=ids,
        loss_mask=full,
        behavior_logprobs=logprobs,
        versions=np.where(full, version, 0).astype(np.int32),
        reward=0.0,
        reward_parts={},
        finish_reason="stop",
    )


def group(*trajectories, name="g"):
    return Group(f"{name}", "lease", "0/1", "train", tuple(trajectories))


def values(groups):
    """Advantages that name their trajectory: 0, 1, 2…"""
    starts = np.cumsum([0] + [len(g.trajectories) for g in groups])
    return [
        np.arange(a, a + len(g.trajectories), dtype=np.float64) for a, g in zip(starts, groups, strict=False)
    ]


def contexts(batch: MicroBatch) -> list[tuple[int, tuple[int, ...], int]]:
    """(sequence, tokens the predicting position attends to, target) of every target, by the segments."""
    out = []
    owner: dict[int, tuple[int, int]] = {}
    for s in batch.segments:
        at = s.start + s.prompt_length
        for length in s.completion_lengths:
            owner.update(dict.fromkeys(range(at, at + length), (s.start, at)))
            at += length
    ids = batch.token_ids[0].tolist()
    positions = batch.position_ids[0].tolist()
    for sequence, position, target in zip(
        batch.sequence_index.tolist(), batch.target_positions.tolist(), batch.target_ids.tolist(), strict=True
    ):
        if position in owner:
            start, own = owner[position]
            segment = next(s for s in batch.segments if s.start == start)
            seen = ids[start : start + segment.prompt_length] + ids[own : position + 1]
        else:
            segment = next(s for s in batch.segments if s.start <= position < s.start + s.prompt_length)
            seen = ids[segment.start : position + 1]
        assert positions[position] == len(seen) - 1
        out.append((sequence, tuple(seen), target))
    return out


def expected(groups):
    out, sequence = [], 0
    for g in groups:
        for t in g.trajectories:
            ids = t.token_ids.tolist()
            out += [(sequence, tuple(ids[:i]), ids[i]) for i in range(len(ids)) if t.loss_mask[i]]
            sequence += 1
    return out


@st.composite
def shards(draw):
    token = st.integers(0, 50)
    groups = []
    for n in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        members = []
        for index in range(draw(st.integers(1, 4))):
            own = draw(st.booleans()) and draw(st.lists(token, min_size=1, max_size=6))
            completion = draw(st.lists(token, min_size=1, max_size=8))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(completion), max_size=len(completion)))
            members.append(trajectory(own or prompt, completion, mask, index))
        groups.append(group(*members, name=f"g{n}"))
    return groups


@settings(max_examples=150, deadline=None)
@given(shards(), st.integers(4, 60))
def test_every_trained_token_once_behind_its_own_context_within_the_budget(groups, budget):
    batches = pack(groups, values(groups), budget)
    assert sorted(c for b in batches for c in contexts(b)) == sorted(expected(groups))
    for b in batches:
        assert torch.equal(b.advantages, b.sequence_index.float())
        assert b.num_tokens == sum(s.length for s in b.segments) == b.position_ids.shape[1]
        alone = len(b.segments) == 1 and len(b.segments[0].completion_lengths) == 1
        assert b.num_tokens <= budget or alone
    owners = [set(b.sequence_index.tolist()) for b in batches]
    assert sum(map(len, owners)) == len(set().union(*owners)), "a trajectory lies in one micro-batch"


def test_a_shared_prompt_is_laid_out_once():
    (batch,) = pack(
        [group(*(trajectory([1, 2, 3], [4 + i, 9], index=i) for i in range(4)))], [np.zeros(4)], 64
    )
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 9, 5, 9, 6, 9, 7, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 3, 4, 3, 4]]
    assert batch.target_positions.tolist() == [2, 3, 2, 5, 2, 7, 2, 9]


def test_prompts_that_differ_in_one_token_are_not_shared():
    (batch,) = pack(
        [group(trajectory([1, 2, 3], [4]), trajectory([1, 8, 3], [4], index=1))], [np.zeros(2)], 64
    )
    assert [s.prompt_length for s in batch.segments] == [3, 3]


def test_gaps_inside_a_completion_are_context_and_no_target():
    (batch,) = pack([group(trajectory([1, 2], [3, 4, 5, 6, 7, 8], [1, 1, 0, 0, 1, 0]))], [np.ones(1)], 64)
    assert batch.target_ids.tolist() == [3, 4, 7]
    assert batch.target_positions.tolist() == [1, 2, 5]
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]], (
        "what follows the last trained token is not computed"
    )


def test_per_target_arrays_line_up_with_their_tokens():
    t = trajectory([1, 2], [3, 4, 5], [1, 0, 1], version=7)
    (batch,) = pack([group(t)], [np.ones(1)], 64)
    assert batch.behavior_logprobs.tolist() == t.behavior_logprobs[[2, 4]].tolist()
    assert batch.versions.tolist() == [7, 7]


def test_a_group_beyond_the_budget_is_split_between_completions():
    g = group(*(trajectory(range(10), range(6), index=i) for i in range(5)))
    batches = pack([g], values([g]), 22)
    assert [b.num_tokens for b in batches] == [22, 22, 16]
    assert sorted(c for b in batches for c in contexts(b)) == sorted(expected([g]))


def test_little_is_wasted_on_mixed_lengths():
    lengths = np.random.default_rng(0).integers(20, 400, 200)
    groups = [group(trajectory(range(10), [1] * int(n)), name=str(i)) for i, n in enumerate(lengths)]
    batches = pack(groups, values(groups), 1024)
    filled = sum(b.num_tokens for b in batches)
    assert filled / (1024 * len(batches)) > 0.97


def test_the_same_shard_packs_the_same_way():
    groups = [group(*(trajectory([n], [1, 2, i], index=i) for i in range(3)), name=str(n)) for n in range(9)]
    one, two = (pack(groups, values(groups), 16) for _ in range(2))
    assert [b.token_ids.tolist() for b in one] == [b.token_ids.tolist() for b in two]


def test_trajectories_without_a_trained_token_are_left_out():
    g = group(trajectory([1], [2], [0]), trajectory([1], [3], index=1))
    (batch,) = pack([g], values([g]), 64)
    assert batch.sequence_index.tolist() == [1]
    assert pack([group(trajectory([1], [2], [0]))], [np.zeros(1)], 64) == []


def test_a_sampled_first_token_is_refused():
    with pytest.raises(ValueError, match="group g trajectory 0: its first token is marked as sampled"):
        pack([group(trajectory([], [1, 2]))], [np.zeros(1)], 64)


def test_arrays_of_unequal_length_are_refused_by_name():
    t = trajectory([1], [2, 3])
    bad = Trajectory(0, t.token_ids, t.loss_mask, t.behavior_logprobs[:2], t.versions, 0.0, {}, "stop")
    with pytest.raises(ValueError, match="behavior_logprobs has 2 entries for 3 tokens"):
        pack([group(bad)], [np.zeros(1)], 64)


def test_an_empty_micro_batch_carries_no_weight():
    assert float(empty().weights.sum()) == 0
    assert len(empty().target_ids) == 1


def test_trajectories_without_advantage_can_be_left_out_and_keep_the_others_numbers():
    groups = [group(trajectory([1, 2], [3, 4]), trajectory([1, 2], [5])), group(trajectory([6], [7, 8]))]
    (batch,) = pack(groups, [np.array([0.0, 0.5]), np.array([-0.5])], 64, only_moving=True)
    assert batch.target_ids.tolist() == [5, 7, 8] or batch.target_ids.tolist() == [7, 8, 5]
    assert sorted(batch.sequence_index.tolist()) == [1, 2, 2]
    assert pack(groups, [np.zeros(2), np.zeros(1)], 64, only_moving=True) == []


@settings(max_examples=100, deadline=None)
@given(shards(), st.integers(4, 60))
def test_whole_groups_lie_in_one_micro_batch_each_and_are_trained_all_the_same(groups, budget):
    batches = pack(groups, values(groups), budget, whole_groups=True)
    assert sorted(c for b in batches for c in contexts(b)) == sorted(expected(groups))
    owner = [number for number, g in enumerate(groups) for _ in g.trajectories]
    found = [{owner[s] for s in b.sequence_index.tolist()} for b in batches]
    assert sum(map(len, found)) == len(set().union(*found))
    assert all(b.num_tokens <= budget or len(own) == 1 for b, own in zip(batches, found, strict=True))
