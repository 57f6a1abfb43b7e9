"""A learner that is killed with -9 while it writes: the same losses afterwards, and a whole model."""

import pytest
from learner_runs import STEPS, Run, assert_same, learn, make_model

pytestmark = pytest.mark.slow

WRITES = {"every": 1, "keep": 2, "export": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("whole"), model, checkpoint=WRITES)
    learn(1, [run])
    return run


def killed_in(moment, survived, model, folder) -> Run:
    run = Run(folder, model, checkpoint=WRITES, options={"kill_in": [moment, survived]})
    learn(1, [run], killed=True)
    return run


def gone_on_with(run: Run, model, frontier) -> Run:
    again = Run(run.folder, model, checkpoint=WRITES, options={"frontier": frontier})
    learn(1, [again])
    return again


def files(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_in_the_middle_of_a_checkpoint_the_one_before_it_is_gone_on_from(whole, model, tmp_path):
    killed = killed_in("checkpoint", 2, model, tmp_path)
    checkpoints = tmp_path / "run/checkpoints"
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {"step-000001", "step-000002", ".step-000003.tmp"}
    assert list((checkpoints / ".step-000003.tmp").glob("*.distcp"))
    again = gone_on_with(killed, model, frontier=3)
    assert_same(again, whole, 1e-6)
    assert {path.name for path in checkpoints.iterdir()} == {f"step-{n:06d}" for n in (STEPS - 1, STEPS)}
    assert files(tmp_path / "run/model") == files(whole.folder / "run/model")


def test_in_the_middle_of_an_export_it_is_made_again(whole, model, tmp_path):
    killed = killed_in("export", 0, model, tmp_path)
    assert (tmp_path / "run/model.partial/model.safetensors").exists()
    assert not (tmp_path / "run/model").exists()
    again = gone_on_with(killed, model, frontier=STEPS)
    assert_same(again, whole, 1e-6)
    assert not (tmp_path / "run/model.partial").exists()
    assert files(tmp_path / "run/model") == files(whole.folder / "run/model")
