"""Recorded groups come back as they went; what is no record is told with its place."""

import msgpack
import numpy as np
import pytest

from buffer.recording import append_groups, read_groups
from buffer.records import Group, Trajectory


def group(name: str, tokens: int) -> Group:
    mask = np.array([0] + [1] * tokens, np.uint8)
    ids, logprobs = np.arange(tokens + 1, dtype=np.int32), np.float32(-0.5) * mask
    made = Trajectory(0, ids, mask, logprobs.astype(np.float32), mask.astype(np.int32) * 3, 1.0, {}, "stop")
    return Group(name, "lease", "0/1", "train", (made,))


def test_groups_come_back_in_the_order_of_files_and_of_writing(tmp_path):
    append_groups(tmp_path / "r/1.groups", [group("c", 2)])
    append_groups(tmp_path / "r/0.groups", [group("a", 3)])
    append_groups(tmp_path / "r/0.groups", [group("b", 1)])
    found = read_groups(tmp_path / "r")
    assert [g.group_id for g in found] == ["a", "b", "c"]
    (trajectory,) = found[0].trajectories
    assert trajectory.token_ids.tolist() == [0, 1, 2, 3]
    assert trajectory.versions.tolist() == [0, 3, 3, 3]
    assert trajectory.behavior_logprobs.tolist() == [0, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xc1nothing", "group 0: "),
        (msgpack.packb(["x"]), "group 0: "),
        (msgpack.packb([b"\x80", b""]), "group 0: lengths: missing"),
        (msgpack.packb(7), "group 0: "),
    ],
)
def test_a_damaged_file_is_one_line_with_its_place(tmp_path, content, told):
    (tmp_path / "0.groups").write_bytes(content)
    with pytest.raises(ValueError, match=r"0\.groups: group 0: ") as raised:
        read_groups(tmp_path)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_cut_off_in_a_group_is_told_after_the_whole_ones(tmp_path):
    append_groups(tmp_path / "0.groups", [group("a", 3), group("b", 3)])
    whole = (tmp_path / "0.groups").read_bytes()
    (tmp_path / "0.groups").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="group 1: cut off"):
        read_groups(tmp_path)


def test_a_folder_without_a_record_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="slipstream measure"):
        read_groups(tmp_path)
