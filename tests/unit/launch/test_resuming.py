"""A change that a stopped run cannot go on with is told in one line, before anything starts."""

import io
import json
import sqlite3
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file, save_file

from buffer.prompts import EVAL_SEED, load_rows, open_prompts
from buffer.store import Sources, Store
from launch import local, resuming
from launch.experiment import dump, read
from learner import ending
from learner.checkpoint_files import complete
from learner.reference.fingerprint import fingerprint
from learner.resuming import shape_of

ADDRESSES = ["buffer.address=tcp://127.0.0.1:0", "sync.address=tcp://127.0.0.1:0"]


@pytest.fixture
def stopped(config_file, tmp_path):
    """A run that was stopped at step 4, of which the buffer keeps the batches from 2 on; reads it again, with
    overrides."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(20)))
    settings = yaml.safe_load(config_file.read_text())
    settings["data"] = {"train": {"kind": "jsonl", "path": str(rows)}}
    settings["model"]["dtype"] = "bfloat16"
    settings["eval"] = {"source": {"kind": "jsonl", "path": str(rows)}}
    config_file.write_text(yaml.safe_dump(settings))

    def again(*overrides):
        return read(config_file, [*ADDRESSES, *overrides])

    e = again()
    run_dir = Path(e.run_dir)
    with open_store(e) as store, store.transaction():
        store.published(0)
        store.published(4)
        store.committed(2)
    write_checkpoint(e, 4)
    return again, run_dir


class open_store:
    def __init__(self, e):
        Path(e.run_dir).mkdir(parents=True, exist_ok=True)
        rows = load_rows(e.eval.source, e.seed + EVAL_SEED) if e.eval else []
        temperature = e.rollout.sampling.temperature
        sources = Sources(open_prompts(e.data, e.seed), rows, None, e.seed, temperature)
        self.store = Store(Path(e.run_dir), e.name, e.buffer, sources, time.monotonic)

    def __enter__(self):
        return self.store

    def __exit__(self, *_):
        self.store.close()


def write_checkpoint(e, step, **facts):
    target = Path(e.run_dir) / "checkpoints" / f"step-{step:06d}"
    temporary = target.with_name("made")
    temporary.mkdir(parents=True)
    (temporary / "weights").write_bytes(b"weights")
    shape = json.loads(json.dumps(shape_of(e.model.path)))
    written = {"step": step, "dtype": e.model.dtype, "distributed_optimizer": False, "lora": None}
    complete(temporary, target, written | {"shape": shape} | facts)


ALLOWED = {
    "another layout": ["learner.processes=2", "learner.parallel.tensor=1", "learner.parallel.pipeline=2"],
    "data-parallel ranks": ["learner.processes=2"],
    "more servers": ["rollout.servers=3"],
    "less staleness": ["buffer.max_staleness=0"],
    "more staleness": ["buffer.max_staleness=5"],
    "larger batches": ["buffer.groups_per_batch=16"],
    "smaller batches": ["buffer.groups_per_batch=1"],
    "an evaluation's temperature": ["eval.temperature=0.3"],
    "longer completions": ["rollout.sampling.max_tokens=20"],
    "larger groups": ["rollout.group_size=4"],
    "another rate": ["learner.optimizer.lr=1e-7"],
    "more steps": ["learner.steps=100"],
    "epochs": ["data.epochs=7"],
    "evaluations": ["eval.every=3"],
    "checkpoints": ["learner.checkpoint.every=1"],
}
REFUSED = {
    "seed": (["seed=2"], "order is 'shuffled with seed 1', this run's is 'shuffled with seed 2'"),
    "shuffle": (["data.shuffle=false"], "order is 'shuffled with seed 1', this run's is 'as the rows stand'"),
    "temperature": (
        ["rollout.sampling.temperature=0.7"],
        "temperature is '1.0', this run's is '0.7': set rollout.sampling.temperature back",
    ),
    "another split": (['data.split="2,4,4"'], "the training rows changed; use another run_dir"),
    "dtype": (["model.dtype=float32"], "written with model.dtype=bfloat16, this run has float32"),
    "optimizer": (
        ["learner.parallel.distributed_optimizer=true"],
        "written with learner.parallel.distributed_optimizer=False, this run has True",
    ),
    "adapters": (["learner.lora.rank=4"], "written with learner.lora=null, this run has {rank: 4"),
    "average": (
        ["learner.ema.decay=0.9"],
        "written without an average of the weights, this run has learner.ema",
    ),
    "no evaluation while there is one": (["eval=null"], "the evaluation of version 0 is under way"),
}


@pytest.mark.parametrize("change", ALLOWED)
def test_what_may_change(stopped, change):
    again, _ = stopped
    resuming.check(again(*ALLOWED[change]))


@pytest.mark.parametrize("change", REFUSED)
def test_what_may_not(stopped, change):
    again, run_dir = stopped
    overrides, reason = REFUSED[change]
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(ValueError, match="run_dir") as refused:
        resuming.check(again(*overrides))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="run_dir"):
        local.run(again(*overrides), "slipstream run it.yaml", Console(file=io.StringIO()), nothing_starts)
    assert [p for p in sorted(run_dir.rglob("*")) if p.suffix != ".lock" and "sqlite-" not in p.name] == [
        p for p in before if "sqlite-" not in p.name
    ], "and nothing was written"


def nothing_starts(*_):
    raise AssertionError("it was to be refused before")


def test_the_store_itself_refuses_another_order_too(stopped):
    again, _ = stopped
    with pytest.raises(ValueError, match=r"set seed and data\.shuffle back"):
        open_store(again("seed=2"))


def test_a_store_that_does_not_know_its_temperature_goes_on(stopped):
    """As one that was begun before it was kept; from now on it does."""
    again, run_dir = stopped
    with sqlite3.connect(run_dir / "buffer.sqlite") as connection:
        connection.execute("DELETE FROM facts WHERE name = 'temperature'")
    warm = again("rollout.sampling.temperature=0.7")
    resuming.check(warm)
    with open_store(warm) as store, store.transaction():
        assert store.status()["temperature"] == 0.7
    with pytest.raises(ValueError, match=r"temperature is '0\.7', this run's is '1\.0'"):
        resuming.check(again())


def test_another_order_matters_only_where_there_is_one(stopped, tmp_path):
    again, _ = stopped
    run_dir = f"run_dir={tmp_path / 'in-order'}"
    with open_store(again(run_dir, "data.shuffle=false")):
        pass
    resuming.check(again(run_dir, "data.shuffle=false", "seed=2"), ["buffer"])


def test_another_model_is_told_by_what_differs(stopped, make_model):
    again, _ = stopped
    asked = {"q_proj": (128, 8), "k_proj": (64, 8), "v_proj": (64, 8), "o_proj": (8, 128)}
    shapes = {f"model.layers.{i}.self_attn.{n}.weight": shape for i in (0, 1) for n, shape in asked.items()}
    other = make_model("other", shapes, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"another model than model\.path .*heads 2 → 4, kv_heads 1 → 2"):
        resuming.check(again(f"model.path={other}"), ["learner"])


def test_rows_that_changed(stopped, tmp_path):
    again, _ = stopped
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(ValueError, match="the training rows changed"):
        resuming.check(again())
    resuming.check(again(), ["learner"])  # whose host need not have them


def test_batches_that_the_buffer_forgot(stopped):
    again, run_dir = stopped
    (run_dir / "checkpoints/step-000004").rename(run_dir / "checkpoints/gone")
    with pytest.raises(ValueError, match="batches below 2 are in a checkpoint and not kept"):
        resuming.check(again())
    write_checkpoint(again(), 1)
    with pytest.raises(ValueError, match="checkpoint step-000001: bring back the checkpoint of step 2"):
        resuming.check(again())


@pytest.fixture
def finished(stopped):
    """It, once it is finished; `local.run` of it, and its experiment."""
    again, run_dir = stopped
    e = again("eval=null", "learner.steps=4")
    write_checkpoint(e, 4, start=fingerprint(e.model, None))
    (run_dir / "config.yaml").write_text(dump(e))
    (run_dir / "metrics.jsonl").write_text('{"step": 4, "time": 1, "time/step": 1.0}\n')
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    ending.write(run_dir, ending.End(step=4, evaluated=False, exported=True, epochs=None))
    output = io.StringIO()

    def run():
        return local.run(e, "slipstream run it.yaml", Console(file=output, width=200), nothing_starts)

    return run, e, output


def test_a_finished_run_whose_start_was_trained_again_is_not_told_as_this_one(finished):
    """As the old `rl` of a pipeline whose `sft` was trained again."""
    run, e, output = finished
    assert run() == 0
    assert "is finished. To train on" in output.getvalue()
    file = Path(e.model.path) / "model.safetensors"
    kept = file.read_bytes()
    save_file({n: t + 1 for n, t in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"run: finished, but started from other weights than .*/model has"):
        run()
    with pytest.raises(ValueError, match=r"bring them back, or train again in another run_dir$"):
        resuming.check(e, ["learner"])
    longer = e.model_copy(update={"learner": e.learner.model_copy(update={"steps": 5})})
    resuming.check(longer, ["learner"])  # it goes on from weights of its own
    file.write_bytes(kept)
    assert run() == 0


def test_a_finished_run_is_told_under_another_dtype_and_where_its_start_is_not_known(finished):
    run, e, _ = finished
    other = e.model.model_copy(update={"dtype": "float32"})
    resuming.check_trained_from(e.model_copy(update={"model": other}))
    write_checkpoint(e, 4)
    file = Path(e.model.path) / "model.safetensors"
    save_file({n: t + 1 for n, t in load_file(file).items()}, file)
    assert run() == 0


def test_weights_that_were_made_by_convert(stopped):
    again, _ = stopped
    write_checkpoint(again(), 9, weights_only=True)
    with pytest.raises(ValueError, match=r"made by `slipstream convert`.*learner\.init_from"):
        resuming.check(again())


def test_a_run_that_never_started_may_begin_with_anything(config_file):
    resuming.check(read(config_file, ADDRESSES))


def test_a_damaged_database_is_told_to_the_learner_too_and_an_empty_one_is_none(stopped):
    again, run_dir = stopped
    (run_dir / "buffer.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match=r"buffer\.sqlite: damaged: .*; restore it, or use another run_dir"):
        resuming.check(again(), {"learner"})
    (run_dir / "buffer.sqlite").write_bytes(b"")  # as a buffer that was killed in its first moment leaves it
    resuming.check(again(), {"learner"})
