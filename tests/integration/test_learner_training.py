"""Real Megatron over gloo: all layouts give the same numbers, and a killed learner goes on exactly.

Starting processes takes most of the time, so all runs of a world size share them (`learner_runs.py`).
"""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from learner_runs import STEPS, Run, assert_same, begin, continued, learn, learning, make_model
from ppo_runs import PPO
from safetensors.torch import load_file

from learner import conversion, ending
from learner.config import ParallelConfig

pytestmark = pytest.mark.slow

SEVERAL_UPDATES = {
    "updates_per_batch": 2,
    "algorithm": {
        "advantage": "reinforce_plus_plus",
        "aggregate": "sequence",
        "entropy": 0.01,
        "kl": {"coefficient": 0.1},
    },
}

OF_THE_WHOLE_BATCH = {
    "normalised": {
        "updates_per_batch": 2,
        "algorithm": {"loss": "gspo", "correction": {"cap": 1.002, "mask": "none", "normalize": True}},
    },
    "m2po": {
        "updates_per_batch": 2,
        "algorithm": {"loss": "m2po", "correction": {"kind": "bypass"}, "m2po": {"second_moment": 0.01}},
    },
}
"""What a token is trained with depends on all of an optimizer step's."""

LORA = {**SEVERAL_UPDATES, "lora": {"rank": 2, "alpha": 8}}
"""With a reference, which is the policy without its adapters."""

OWN_FUNCTIONS = {
    **SEVERAL_UPDATES,
    "loop": "own_functions:loop",
    "algorithm": {**SEVERAL_UPDATES["algorithm"], "loss": "own_functions:ppo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two pipeline stages have two layers and one, and two tensor ranks share the key-value head."""
    return make_model(tmp_path_factory.mktemp("model"), layers=3, kv_heads=1)


@pytest.fixture(scope="module")
def killed(model, tmp_path_factory):
    """Runs that ended by SIGKILL: alone at batch 3, and two ranks with sharded optimizer state at batch 2."""
    root = tmp_path_factory.mktemp("killed")
    alone = Run(root / "alone", model, checkpoint={"every": 1}, options={"kill_at": 3})
    shard = Run(root / "shard", model, layout={"distributed_optimizer": True}, options={"kill_at": 2})
    learn(1, [alone], killed=True)
    learn(2, [shard], killed=True)
    return {"alone": alone, "shard": shard}


def from_step_two(run: Run) -> Run:
    """Two steps are left: the loss of the second shows what the first one's optimizer state was."""
    shutil.rmtree(run.folder / "run/checkpoints/step-000003")
    return run


def damage(run: Run) -> str:
    newest = run.folder / "run/checkpoints/step-000003"
    file = max(newest.glob("*.distcp"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    """The model's weights as a checkpoint cut for four ranks, beside a folder that has its shape alone."""
    folder = tmp_path_factory.mktemp("converted")
    conversion.hf_to_megatron(model, folder / "checkpoint", ParallelConfig(tensor=2, pipeline=2))
    shutil.copytree(model, folder / "shape")
    (folder / "shape" / "model.safetensors").unlink()
    return folder


def started_from(folder: Path, converted: Path, **settings) -> Run:
    return Run(folder, converted / "shape", init_from=str(converted / "checkpoint"), **settings)


def resharded(run: Run, step: int, **layout) -> Run:
    """Its checkpoint of that step, cut for another layout, is all that it goes on with."""
    checkpoints = run.folder / "run/checkpoints"
    whole = checkpoints.rename(checkpoints.with_name("as-written")) / f"step-{step:06d}"
    conversion.reshard(whole, checkpoints / whole.name, ParallelConfig(**layout))
    return run


@pytest.fixture(scope="module")
def one(model, converted, killed, tmp_path_factory):
    """Everything that one process does."""
    root = tmp_path_factory.mktemp("one")
    every = {"checkpoint": {"every": 1}, "options": {"frontier": 3}}
    bfloat16 = {"dtype": "bfloat16", "checkpoint": {"every": 3}}
    runs = {
        "whole": Run(root / "whole", model),
        "resumed": continued(killed["alone"], model, "resumed", **every),
        "damaged": continued(killed["alone"], model, "damaged", **every),
        "unsharded": continued(killed["shard"], model, "one", layout={"distributed_optimizer": True}),
        "stopped": Run(root / "stopped", model, options={"stop_at": 1}),
        "several": Run(root / "several", model, **SEVERAL_UPDATES),
        "bfloat16": Run(root / "bfloat16", model, dtype="bfloat16"),
        "bfloat16-cut": Run(root / "bfloat16-cut", model, options={"stop_at": 3}, **bfloat16),
        "converted": started_from(root / "converted", converted, **SEVERAL_UPDATES),
        "own": Run(root / "own", model, **OWN_FUNCTIONS),
        "lora": Run(root / "lora", model, **LORA),
        **{name: Run(root / name, model, **settings) for name, settings in OF_THE_WHOLE_BATCH.items()},
        "over": Run(root / "over", model, steps=1),
        "over-again": Run(root / "over", model, steps=1),
        "over-more": Run(root / "over", model, steps=2),
        "ended": Run(root / "ended", model, options={"ends_at": 2}, checkpoint={"every": 3, "export": True}),
    }
    runs["damaged"].damaged_file = damage(runs["damaged"])
    again = [Run(root / "stopped", model), Run(root / "bfloat16-cut", model, **bfloat16)]
    learn(1, list(runs.values()))
    shutil.copytree(root / "stopped", root / "stopped-first")
    runs["stopped-first"] = Run(root / "stopped-first", model)
    learn(1, again)
    return runs


@pytest.fixture(scope="module")
def two(model, converted, killed, tmp_path_factory):
    """Everything that two processes do."""
    root = tmp_path_factory.mktemp("two")
    sharded = {"distributed_optimizer": True}
    tensor, pipeline = {"layout": {"tensor": 2}}, {"layout": {"pipeline": 2}}
    runs = {
        "data": Run(root / "data", model),
        "shard": Run(root / "shard", model, layout=sharded),
        "tensor": Run(root / "tensor", model, **tensor),
        "pipeline": Run(root / "pipeline", model, **pipeline),
        "lora-data": Run(root / "lora-data", model, layout=sharded, **LORA),
        "lora-tensor": Run(root / "lora-tensor", model, **tensor, **LORA),
        "lora-pipeline": Run(root / "lora-pipeline", model, **pipeline, **LORA),
        "own-data": Run(root / "own-data", model, **OWN_FUNCTIONS),
        "several-data": Run(root / "several-data", model, **SEVERAL_UPDATES),
        "several-pipeline": Run(root / "several-pp", model, layout={"pipeline": 2}, **SEVERAL_UPDATES),
        "resumed": continued(killed["shard"], model, "two", layout=sharded),
        "resumed-tensor": continued(killed["shard"], model, "tensor", layout={**sharded, "tensor": 2}),
        "resumed-pipeline": continued(killed["shard"], model, "pipeline", layout={**sharded, "pipeline": 2}),
        "alone-tensor": from_step_two(continued(killed["alone"], model, "alone-tensor", **tensor)),
        "alone-pipeline": from_step_two(continued(killed["alone"], model, "alone-pipeline", **pipeline)),
        "converted": started_from(root / "converted", converted, layout={"tensor": 2}),
        "resharded": continued(killed["shard"], model, "resharded", layout={**sharded, "tensor": 2}),
        "resharded-alone": continued(killed["alone"], model, "resharded-alone", layout={"pipeline": 2}),
    }
    for name, settings in OF_THE_WHOLE_BATCH.items():
        runs[f"{name}-data"] = Run(root / f"{name}-data", model, **settings)
        runs[f"{name}-pipeline"] = Run(root / f"{name}-pp", model, layout={"pipeline": 2}, **settings)
    resharded(runs["resharded"], 2, tensor=2)
    resharded(runs["resharded-alone"], 2, pipeline=2)
    learn(2, list(runs.values()))
    return runs


def test_each_named_part_of_the_reward_has_its_mean_over_the_completions_that_have_it(one):
    for row in one["whole"].rows:
        assert row["reward_parts/drawn"] == pytest.approx(row["reward/mean"])
        assert row["reward_parts/rare"] == 2.0


def test_a_run_reports_publishes_and_confirms_every_version(one):
    run = one["whole"]
    rows = run.rows
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert run.told("sent") == [0, 1, 2, 3, 4]
    assert run.told("published") == [0, 1, 2, 3, 4]
    assert run.told("committed") == [0, 0, 2], "kept is what a resume may need"
    assert run.told("finished") == [4]
    assert all(0 < r["ess"] <= 1 for r in rows)
    assert rows[-1]["staleness/histogram"] == [8, 8, 8]
    assert rows[0]["samples"] == 24
    assert len((run.folder / "run/samples.jsonl").read_text().splitlines()) == 3 * 4
    assert len({r["loss"] for r in rows}) == STEPS
    assert [r["servers/wasted_tokens"] for r in rows] == [1] * STEPS, "of what the sender's servers count"


@pytest.mark.parametrize("layout", ["data", "shard", "tensor", "pipeline"])
def test_every_layout_gives_the_same_numbers(layout, one, two):
    assert_same(two[layout], one["whole"], rel=1e-3)


@pytest.mark.parametrize("layout", ["data", "pipeline"])
@pytest.mark.parametrize("name", OF_THE_WHOLE_BATCH)
def test_what_is_of_the_whole_batch_is_the_same_under_every_layout(name, layout, one, two):
    assert_same(two[f"{name}-{layout}"], one[name], rel=1e-3)
    told = [row["cap_fraction"] + row["clip_fraction"] for row in one[name].rows]
    assert any(0 < share < 1 for share in told), "the case is to tell something"


def test_two_kinds_of_parallelism_together_give_the_same_numbers(one, model, tmp_path):
    sharded = {"distributed_optimizer": True}
    layouts = {
        "tensor-pipeline": {"tensor": 2, "pipeline": 2},
        "tensor-data": {"tensor": 2, **sharded},
        "pipeline-data": {"pipeline": 2, **sharded},
    }
    runs = [Run(tmp_path / name, model, layout=layout) for name, layout in layouts.items()]
    learn(4, runs)
    for run in runs:
        assert_same(run, one["whole"], rel=1e-3)
        assert_converts_to_what_was_published(run, run.folder / "hf")


def assert_converts_to_what_was_published(run: Run, target: Path) -> None:
    conversion.megatron_to_hf(run.folder / f"run/checkpoints/step-{STEPS:06d}", target)
    found, expected = load_file(target / "model.safetensors"), run.weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_killed_learner_goes_on_exactly(one, killed):
    assert [r["step"] for r in killed["alone"].rows] == [1, 2, 3]
    assert_same(one["resumed"], one["whole"], rel=0)
    assert "resumed from" in one["resumed"].log
    assert one["resumed"].told("sent") == [0, 1, 2, 3, 3, 4]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(one):
    run = one["damaged"]
    assert "DAMAGED CHECKPOINT" in run.log
    assert run.damaged_file in run.log
    assert_same(run, one["whole"], rel=0)
    assert run.told("sent") == [0, 1, 2, 3, 3, 4], "batch 2 is repeated, version 3 is the frontier"


def test_sharded_optimizer_state_resumes_exactly_and_under_other_layouts(one, two):
    assert_same(two["resumed"], two["shard"], rel=0)
    assert_same(two["resumed-tensor"], one["whole"], rel=1e-3)
    assert_same(two["resumed-pipeline"], one["whole"], rel=1e-3)
    assert_same(one["unsharded"], one["whole"], rel=1e-3)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_whole_optimizer_state_resumes_under_other_layouts(layout, one, two):
    run = two[f"alone-{layout}"]
    assert run.told("sent") == [0, 1, 2, 3, 2, 3, 4], "it went on from step 2"
    assert_same(run, one["whole"], rel=1e-3)


def test_sigterm_ends_with_a_checkpoint_and_says_how_to_go_on(one):
    first = one["stopped-first"]
    assert "stopped after step 1: the same command goes on from there" in first.log
    assert [r["step"] for r in first.rows] == [1]
    assert_same(one["stopped"], one["whole"], rel=0)


def test_a_run_whose_data_ends_first_is_finished_with_what_it_has(one):
    run = one["ended"]
    assert [r["step"] for r in run.rows] == [1, 2]
    assert json.loads((run.folder / "run/data_end.json").read_text()) == {"step": 2}
    assert "the data ended after 2 of 4 steps" in run.log
    assert run.told("finished") == [2]
    assert (run.folder / "run/checkpoints/step-000002").is_dir()
    exported = load_file(run.folder / "run/model/model.safetensors")
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in exported.items())


def test_a_finished_run_is_told_before_anybody_is_waited_for_and_goes_on_for_more_steps(one):
    run = one["over"]
    assert run.log.count("/run is finished, with step 1; to train on, raise learner.steps") == 1
    assert run.told("sent") == [0, 1, 1, 2], "to the servers of the first start, and of the third"
    assert run.told("finished") == [1, 2]


def test_a_run_whose_data_ended_exports_alone_when_asked_to_later_and_goes_on_for_more_epochs(
    tmp_path, model
):
    """Nobody is waited for to export, since the buffer has ended."""
    ended = Run(tmp_path, model, options={"ends_at": 2}, steps=4)
    exported = Run(tmp_path, model, steps=5, checkpoint={"export": True})
    further = Run(tmp_path, model, steps=3)
    for run, epochs in ((ended, 1), (exported, 1), (further, 2)):
        run.experiment["data"] = {"epochs": epochs}
    learn(1, [ended, exported])
    assert ended.told("sent") == [0, 1, 2]
    assert ended.told("finished") == [2]
    assert "exported the model of step 2, with which the run was finished" in ended.log
    made = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(ended.weights[name], tensor) for name, tensor in made.items())
    end = ending.read(tmp_path / "run")
    assert end == ending.End(step=2, evaluated=False, exported=True, epochs=1)
    learn(1, [exported])
    assert "is finished, with step 2; to train on, raise data.epochs" in ended.log
    learn(1, [further])
    assert ended.told("finished") == [2, 3]
    end = ending.read(tmp_path / "run")
    assert end == ending.End(step=3, evaluated=False, exported=False, epochs=None)


WITH_AVERAGE = {"ema": {"decay": 0.5}}
EXPORTED = {
    "adapters": ({**LORA, **WITH_AVERAGE}, ("model", "adapter", "ema_model")),
    "value model": ({**PPO, **WITH_AVERAGE}, ("model", "value_model", "ema_model")),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_exported_alone_later_is_what_the_run_would_have_exported(kind, tmp_path, model):
    settings, folders = EXPORTED[kind]

    def made(name, export):
        options = {"steps": 2, "layout": {"tensor": 2}, "checkpoint": {"every": 2, "export": export}}
        return Run(tmp_path / name, model, **{**settings, **options})

    learn(2, [made("whole", True), made("later", False)])
    assert not any((tmp_path / "later/run" / folder).exists() for folder in folders)
    learn(2, [made("later", True)])
    for folder in folders:
        whole, later = (tmp_path / name / "run" / folder for name in ("whole", "later"))
        files = sorted(path.name for path in whole.iterdir())
        assert sorted(path.name for path in later.iterdir()) == files, folder
        weights = [name for name in files if name.endswith(".safetensors")]
        assert weights, folder
        for name in weights:
            assert (later / name).read_bytes() == (whole / name).read_bytes(), (folder, name)


def test_two_updates_and_a_reference_give_the_same_numbers_in_every_layout(one, two):
    assert one["several"].rows[-1]["kl/reference"] > 0
    assert_same(two["several-data"], one["several"], rel=1e-3)
    assert_same(two["several-pipeline"], one["several"], rel=1e-3)


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_adapters_give_the_same_losses_and_published_weights_in_every_layout(layout, model, one, two):
    assert one["lora"].rows[-1]["kl/reference"] > 0
    base = load_file(model / "model.safetensors")
    changed = {n for n, t in one["lora"].weights.items() if not torch.equal(t, base[n])}
    assert changed == {n for n in base if "_proj" in n}, "published are they, fused with what stays as it was"
    assert_same(two[f"lora-{layout}"], one["lora"], rel=1e-3)
    for one_row, two_row in zip(one["lora"].rows, two[f"lora-{layout}"].rows, strict=True):
        assert two_row["kl/reference"] == pytest.approx(one_row["kl/reference"], rel=1e-3, abs=1e-6)


def test_bfloat16_trains_with_float32_masters_and_resumes_exactly(one):
    assert one["bfloat16"].weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert_same(one["bfloat16-cut"], one["bfloat16"], rel=0)


def test_a_learner_starts_from_a_converted_checkpoint_under_any_layout(one, two):
    """Its reference too."""
    assert_same(one["converted"], one["several"], rel=0)
    assert_same(two["converted"], one["whole"], rel=1e-3)


def test_a_resharded_checkpoint_resumes_with_its_optimizer(one, two):
    for name in ("resharded", "resharded-alone"):
        assert "resumed from" in two[name].log
        assert_same(two[name], one["whole"], rel=1e-3)


@pytest.mark.parametrize("name", ["whole", "bfloat16"])
def test_a_checkpoint_converts_to_the_weights_that_were_published(name, one, tmp_path):
    assert_converts_to_what_was_published(one[name], tmp_path / "hf")


def test_a_loop_and_a_loss_of_ones_own_that_do_the_same_give_the_same(one, two):
    assert_same(one["own"], one["several"], rel=1e-6)
    assert_same(two["own-data"], one["several"], rel=2e-3)
    assert [row["own/halves"] for row in one["own"].rows] == [0.5 * (i + 1) for i in range(STEPS)]
    assert "own/halves" not in one["several"].rows[0]
    assert one["own"].told("committed") == one["several"].told("committed")


def test_ranks_wait_for_a_silent_buffer_longer_than_a_collective_may_take(tmp_path, model):
    """For the shard of the second one, and for what only the first one tells."""
    options = {"collective_s": 3.0, "silent_s": 6.0}
    run = Run(tmp_path, model, options=options, steps=2, checkpoint={"every": 1})
    learn(2, [run])
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.told("published") == [0, 1, 2]
    assert run.told("committed")[-1] == 1, "the checkpoint before the last is kept"


def test_ranks_that_wait_for_one_without_a_shard_stop_when_told_to(tmp_path, model):
    options = {"silent": ["batch"], "silent_s": 200.0}
    run = Run(tmp_path, model, options=options)
    process = begin(2, [run])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out/told.jsonl").exists() or 0 not in run.told("published"):
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2.0)  # rank 0 has its shard
        process.terminate()
        process.communicate(timeout=25)
    finally:
        process.kill()
    assert "stopped after step 0: the same command goes on from there" in run.log


def test_a_buffer_of_another_bound_is_refused(tmp_path, model):
    run = Run(tmp_path, model, options={"bound": 5})
    started = begin(1, [run])
    told, _ = started.communicate(timeout=120)
    assert started.returncode != 0
    assert "buffer.max_staleness=2 here, and the buffer was started with 5" in told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_learner_in_the_same_folder_is_refused(ranks, tmp_path, model):
    run = Run(tmp_path, model, options={"gates": [1]})
    with learning(run) as first:
        first.made(1)
        second = begin(ranks, [run])
        told, _ = second.communicate(timeout=120)
        assert second.returncode != 0
        assert f"in use by another learner (process {first.process.pid})" in told
        assert told.count("in use by another learner") >= ranks
        assert [row["step"] for row in run.rows] == [1], "the first one's metrics lie there as they were"
        first.open(1)
        first.made(STEPS)
