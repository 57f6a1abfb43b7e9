"""Which checkpoint counts as whole; saving and loading are in tests/integration."""

import json
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from learner.checkpoint import Checkpoints, Setup, reason_of
from learner.checkpoint_files import DamagedCheckpoint, verify
from learner.optimizer import Trainable

SETUP = Setup("float32", False, 1, 1, 1, "digest", "model")


@pytest.fixture
def written(tmp_path):
    """Completes a checkpoint of one file, as `save` does after Megatron wrote it."""

    def write(step, keep=2):
        checkpoints = Checkpoints(tmp_path, keep, SETUP)
        target = tmp_path / "checkpoints" / f"step-{step:06d}"
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.mkdir(parents=True)
        (temporary / "weights").write_bytes(bytes(range(200)))
        checkpoints._complete(temporary, target, step)
        return target

    return write


def test_a_complete_one_is_whole_and_says_what_it_is(written):
    path = written(10)
    verify(path)
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["step"], meta["dtype"], meta["files"]["weights"]["bytes"]) == (10, "float32", 200)


def test_what_lies_in_a_folder_of_it_is_part_of_it(tmp_path):
    partial = tmp_path / "checkpoints" / ".step-000010.tmp" / "value"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"of the value model")
    Checkpoints(tmp_path, 2, SETUP)._complete(partial.parent, tmp_path / "checkpoints/step-000010", 10)
    path = tmp_path / "checkpoints/step-000010"
    verify(path)
    (path / "value" / "weights").write_bytes(b"of another model..")
    with pytest.raises(DamagedCheckpoint, match=r"value/weights is not what was written"):
        verify(path)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "meta"])
def test_every_kind_of_damage_is_found(written, damage):
    path = written(10)
    file = path / "weights"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[100] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:150])
    elif damage == "remove":
        file.unlink()
    else:
        (path / "meta.json").write_text('{"step": 1')
    with pytest.raises(DamagedCheckpoint, match=r"weights|meta\.json"):
        verify(path)


def test_the_newest_whole_one_is_taken_and_leftovers_are_cleared(written, tmp_path, caplog):
    written(5)
    (written(10) / "weights").write_bytes(b"")
    leftover = tmp_path / "checkpoints" / ".step-000015.tmp"
    leftover.mkdir()
    assert Checkpoints(tmp_path, 2, SETUP)._newest_whole() == 5
    assert "DAMAGED CHECKPOINT" in caplog.text
    assert not leftover.exists()


def test_a_folder_without_meta_is_no_checkpoint(written, tmp_path):
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    assert Checkpoints(tmp_path, 2, SETUP)._newest_whole() == 0


def test_all_damaged_is_refused(written, tmp_path):
    (written(5) / "weights").unlink()
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        Checkpoints(tmp_path, 2, SETUP)._newest_whole()


def test_the_buffer_may_forget_only_what_no_fallback_needs(written, tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, SETUP)
    assert checkpoints.safe_step() == 0
    written(5)
    assert checkpoints.safe_step() == 0, "were this one damaged, the run would start again"
    written(10)
    assert checkpoints.safe_step() == 5


def test_the_reason_of_a_failed_write_is_one_line_out_of_what_is_wrapped_around_it():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as full:
            raise RuntimeError(f"Worker failure: {full}") from full
    except RuntimeError as error:
        wrapped = CheckpointException("write", {0: (error, StackSummary())})
    assert reason_of(wrapped) == "[Errno 28] No space left on device"


def test_a_run_with_a_value_model_does_not_go_on_from_a_checkpoint_without_one(tmp_path):
    path = tmp_path / "checkpoints/step-000010"
    (tmp_path / "partial").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, 2, SETUP)
    path.parent.mkdir()
    checkpoints._complete(tmp_path / "partial", path, 10)
    some = Trainable(None, None)
    with pytest.raises(ValueError, match=r"without a value model, this run has learner\.value; set it back"):
        checkpoints._load(path, some, some)
