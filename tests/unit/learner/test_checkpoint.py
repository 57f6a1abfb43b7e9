"""Which checkpoint counts as whole, and what a resume brings back; killed runs are in tests/integration."""

import json
import os
import resource
import shutil
from dataclasses import asdict, replace
from traceback import StackSummary
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from learner import checkpoint, parallel
from learner.checkpoint import CheckpointNotWritten, Checkpoints, Setup
from learner.checkpoint_files import (
    UNREAD,
    VALUE,
    DamagedCheckpoint,
    being_written,
    complete,
    digests,
    files_in,
    named_meta,
    read_meta,
    verify,
)
from learner.checkpoint_parts import reason_of
from learner.config import OptimizerConfig, ParallelConfig
from learner.model import build_model
from learner.optimizer import Trainable, apply_gradients, make_trainable
from learner.resuming import Terms, obstacle

SETUP = Setup("float32", False, 1, 1, 1, 1, "digest", "model")


@pytest.fixture
def alone():
    """A job of one rank, this one."""
    parallel.initialize(ParallelConfig(), seed=3)
    yield
    parallel.shutdown()


def facts(step):
    return {"step": step, "position": None, **asdict(SETUP)}


@pytest.fixture
def written(tmp_path):
    """Completes a checkpoint of one file, as `save` does after Megatron wrote it."""

    def write(step):
        target = tmp_path / "checkpoints" / f"step-{step:06d}"
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.mkdir(parents=True)
        (temporary / "weights").write_bytes(bytes(range(200)))
        complete(temporary, target, facts(step))
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
    path = tmp_path / "checkpoints/step-000010"
    complete(partial.parent, path, facts(10))
    verify(path)
    (path / "value" / "weights").write_bytes(b"of another model..")
    with pytest.raises(DamagedCheckpoint, match=r"value/weights is not what was written"):
        verify(path)


def test_what_nobody_loads_may_lie_beside(written):
    path = written(10)
    (path / "notes.txt").write_text("nobody loads this")
    verify(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt"])
def test_what_would_be_loaded_and_is_not_named_is_not_whole(written, name):
    path = written(10)
    (path / name).write_bytes(b"a pickle, say")
    with pytest.raises(DamagedCheckpoint, match=f"{name} is not named in meta.json"):
        verify(path)


def test_every_bit_of_meta_json_is_guarded(written, tmp_path):
    path = written(10)
    read = read_meta(path)
    raw = (path / "meta.json").read_bytes()
    harmless = 0
    for place in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[place // 8] ^= 1 << place % 8
        (path / "meta.json").write_bytes(damaged)
        try:
            assert read_meta(path) == read, place
            harmless += 1
        except DamagedCheckpoint:
            pass
    assert harmless < 0.1 * 8 * len(raw), "white space, and no more"


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


def test_the_newest_whole_one_is_taken(alone, written, tmp_path, caplog):
    written(5)
    (written(10) / "weights").write_bytes(b"")
    assert Checkpoints(tmp_path, 2, SETUP)._newest_whole() == 5
    assert "DAMAGED CHECKPOINT" in caplog.text


def test_a_folder_without_meta_is_no_checkpoint(alone, written, tmp_path):
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    assert Checkpoints(tmp_path, 2, SETUP)._newest_whole() == 0


def test_steps_beyond_a_million_are_newer_and_a_copy_by_another_name_is_nobodys(alone, written, tmp_path):
    copied = written(999_990)
    for name in ("step-999999.kept", "step-0999999"):
        shutil.copytree(copied, copied.with_name(name))
    written(1_000_000)
    checkpoints = Checkpoints(tmp_path, 2, SETUP)
    assert checkpoints._newest_whole() == 1_000_000
    assert checkpoints.safe_step() == 999_990
    with pytest.raises(ValueError, match=r"the newest in it is .*step-1000000"):
        named_meta(tmp_path)


def test_all_damaged_is_refused(alone, written, tmp_path):
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


def test_every_rank_reads_its_share_of_a_checkpoint_and_knows_all_of_it(tmp_path):
    folder, store = tmp_path / "step-000010", tmp_path / "store"
    (folder / "value").mkdir(parents=True)
    for number in range(7):
        (folder / ("value" if number % 2 else "") / f"file-{number}").write_bytes(
            bytes([number]) * 1000 * number
        )
    (folder / "meta.json").write_text("{}")
    spawn(share, (folder, store, 3), 3)
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    read = [name for rank in told for name in rank["read"]]
    assert sorted(read) == files_in(folder), "each file once"
    assert [len(rank["read"]) for rank in told] == [3, 2, 2]
    expected = {name: [size, digest.hex()] for name, (size, digest) in digests(folder, read).items()}
    gone = expected.pop("value/file-5")
    assert gone != [-1, bytes(16).hex()]
    for rank in told:
        assert rank["found"] == expected | {"value/file-5": [-1, bytes(16).hex()]}, "one cannot be read"


def share(rank, folder, store, size):
    """On each rank; one of the files is there for rank 0, which lists them, and for none that reads it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    parallel.rank, parallel.world_size = dist.get_rank, dist.get_world_size  # type: ignore[assignment]
    read = []

    def noted(path, names):
        read.extend(names)
        found = digests(path, names)
        return found | {name: UNREAD for name in names if name == "value/file-5"}

    checkpoint.digests = noted
    found = checkpoint.shared_digests(folder)
    told = {name: (length, digest.hex()) for name, (length, digest) in found.items()}
    (folder.parent / f"rank-{rank}").write_text(json.dumps({"read": read, "found": told}))
    dist.destroy_process_group()


def test_a_file_that_a_rank_cannot_read_is_told_and_the_checkpoint_stays_unfinished(tmp_path):
    temporary, target = tmp_path / ".step.tmp", tmp_path / "step-000010"
    temporary.mkdir()
    with pytest.raises(OSError, match=r"weights cannot be read by each rank; they have to see one run_dir"):
        complete(temporary, target, facts(10), {"weights": UNREAD})
    assert not target.exists()


def test_a_run_with_a_value_model_does_not_go_on_from_a_checkpoint_without_one(tmp_path):
    path = tmp_path / "checkpoints/step-000010"
    (tmp_path / "partial").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, 2, SETUP)
    path.parent.mkdir()
    complete(tmp_path / "partial", path, facts(10))
    some = Trainable(None, None)
    with pytest.raises(ValueError, match=r"without a value model, this run has learner\.value; set it back"):
        checkpoints._load(path, some, some)


@pytest.fixture
def make(tmp_path):
    """Makes trainables of one made model, in one process."""
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    layout = ParallelConfig(distributed_optimizer=False)
    parallel.initialize(layout, seed=3)

    def make():
        model = build_model(tmp_path / "model", layout, torch.float32)
        return make_trainable(model, OptimizerConfig(lr=1e-2), layout)

    yield make
    parallel.shutdown()


def step(trainable, seed):
    """With made gradients."""
    draw = torch.Generator().manual_seed(seed)
    trainable.model.zero_grad_buffer()
    for parameter in trainable.model.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
    apply_gradients(trainable.optimizer, 1.0)


def weights(trainable):
    return {name: p.detach().clone() for name, p in trainable.model.named_parameters()}


def drawn():
    """From torch's generator, and from Megatron's for what tensor-parallel ranks draw apart."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        apart = torch.rand(3)
    return [*apart.tolist(), *torch.rand(3).tolist()]


def test_a_resume_brings_back_weights_moments_generators_and_position(make, tmp_path):
    checkpoints, first = Checkpoints(tmp_path, 2, SETUP), make()
    step(first, 1)
    checkpoints.save(3, first, {"place": 7})
    saved, numbers = weights(first), drawn()
    step(first, 2)

    again = make()
    drawn()
    assert checkpoints.resume(again) == 3
    assert checkpoints.position(3) == {"place": 7}
    assert drawn() == numbers
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(again).items())
    step(again, 2)
    assert all(torch.equal(tensor, weights(first)[name]) for name, tensor in weights(again).items()), (
        "a step after it is the step that would have come"
    )


def test_no_process_that_may_die_on_its_own_writes_it(make, tmp_path, monkeypatch):
    def fork():
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", fork)
    Checkpoints(tmp_path, 2, SETUP).save(3, make())
    verify(tmp_path / "checkpoints/step-000003")


def test_what_the_disk_does_not_take_is_told_by_its_reason_and_leaves_the_one_before(make, tmp_path):
    checkpoints, trainable = Checkpoints(tmp_path, 2, SETUP), make()
    checkpoints.save(3, trainable)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(CheckpointNotWritten, match=r"step-000006 cannot be written: .*File too large"):
            checkpoints.save(6, trainable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.resume(make()) == 3


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(make, tmp_path, keep):
    checkpoints, trainable, steps = Checkpoints(tmp_path, keep, SETUP), make(), [3, 8, 9, 20, 21]
    for made, step in enumerate(steps, 1):
        checkpoints.save(step, trainable)
        left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
        assert left == [f"step-{kept:06d}" for kept in steps[max(0, made - keep) : made]]
    assert checkpoints.resume(make()) == 21


def test_leftovers_are_cleared_once_no_value_model_can_be_writing_into_one(make, tmp_path):
    leftover = tmp_path / "checkpoints" / ".step-000015.tmp"
    leftover.mkdir(parents=True)
    found = []

    class Elsewhere:
        def load(self, step):
            found.append((step, leftover.exists()))

    assert Checkpoints(tmp_path, 2, SETUP).resume(make(), cast(Any, Elsewhere())) == 0
    assert found == [(0, True)]
    assert not leftover.exists()


def test_the_one_before_stays_while_a_value_model_elsewhere_may_be_loading_it(make, tmp_path):
    """A job that is started again when its part of the next one is written loads the one before, until all
    copies of the learner know of the next."""
    checkpoints, trainable, root = Checkpoints(tmp_path, 1, SETUP), make(), tmp_path / "checkpoints"

    class Elsewhere:
        def begin_save(self, step):
            (being_written(root, step) / VALUE).mkdir()

        def end_save(self):
            return None

        def saved(self, step):
            return None

    for number in (1, 2, 3):
        step(trainable, number)
        checkpoints.save(number, trainable, value=cast(Any, Elsewhere()))
    assert [path.name for path in checkpoints.found()] == ["step-000002", "step-000003"]
    checkpoints.save(4, trainable)
    assert [path.name for path in checkpoints.found()] == ["step-000004"]


def test_a_value_model_goes_on_under_the_optimizer_that_it_was_written_with(tmp_path):
    """On the policy's ranks it is that of `learner.parallel`; older checkpoints tell of that alone."""
    (tmp_path / "value").mkdir()
    terms = Terms("float32", distributed_optimizer=False, value=True)
    for written, wanted, fits in (
        (None, None, True),
        (None, False, True),
        (None, True, False),
        (True, True, True),
        (True, None, False),
        (False, None, True),
    ):
        meta = {"dtype": "float32", "distributed_optimizer": False}
        meta |= {} if written is None else {"value_distributed_optimizer": written}
        why = obstacle(tmp_path, meta, replace(terms, value_distributed_optimizer=wanted))
        assert (why is None) == fits, (written, wanted)
        assert fits or f"its value model was written with distributed_optimizer={bool(written)}" in why


def test_a_value_model_goes_on_with_the_adapters_and_upon_the_weights_that_it_had(tmp_path):
    (tmp_path / "value").mkdir()
    adapters = {"rank": 4, "alpha": 8.0, "modules": ["q_proj"]}
    meta = {"dtype": "float32", "distributed_optimizer": False, "value_lora": adapters, "value_start": "a"}
    same = Terms("float32", distributed_optimizer=False, value=True, value_lora=adapters, value_start="a")
    assert obstacle(tmp_path, meta, same) is None
    other = obstacle(tmp_path, meta, replace(same, value_lora=None, value_start=None))
    assert other is not None
    assert (
        "written with learner.value.lora={rank: 4, alpha: 8, modules: [q_proj]}, this run has null" in other
    )
    moved = obstacle(tmp_path, meta, replace(same, value_start="b"))
    assert moved is not None
    assert "adapters are of other weights than learner.value.path has now" in moved
