"""The frozen reference on ranks of its own: the same numbers, and what becomes of a learner without it."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from apart_jobs import Job, jobs
from learner_runs import STEPS, Run, assert_same, begin, learn, learning, make_model, trained_elsewhere
from scripted_learner import group

from learner import parallel
from learner.apart.client import ApartClient
from learner.apart.layouts import work_of
from learner.apart.wire import REFERENCE, Task
from learner.config import ParallelConfig
from learner.line import Line
from learner.packing import pack
from learner.passes import target_logprobs
from learner.reference.fingerprint import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOBODY = "tcp://127.0.0.1:1"
LAYOUTS = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "data": {}}
OBJECTIVES = {
    "loss": {"algorithm": {"kl": {"coefficient": 0.1}}},
    "several": {
        "updates_per_batch": 2,
        "algorithm": {"advantage": "reinforce_plus_plus", "kl": {"coefficient": 0.1}},
    },
    "reward": {
        "algorithm": {
            "advantage": "reinforce_plus_plus",
            "kl": {"coefficient": 0.1, "placement": "reward"},
        }
    },
    "dpo": {"algorithm": {"loss": "dpo"}},
}
COMPARED = ("kl/reference", "kl/completion")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def address(free_address):
    return free_address()


def placed(folder, model, address, of="tensor", timeout_s=240, name="scripted", **learner) -> Run:
    """A run whose reference has two ranks of its own, in a layout of its own."""
    reference = {"processes": 2, "parallel": LAYOUTS[of], "threads": 1}
    reference |= {"address": address, "timeout_s": timeout_s}
    run = Run(folder, model, **{**OBJECTIVES["loss"], "reference": reference, **learner})
    run.experiment["name"] = name
    # These runs have no buffer: at the default address another run's may listen, which would end the job.
    run.experiment["buffer"]["address"] = NOBODY
    return run


def job_of(run: Run) -> Job:
    return Job(run.folder / "reference", run.experiment)


@pytest.mark.parametrize("of", LAYOUTS)
def test_logprobs_are_those_of_one_process(of, model, tmp_path, address):
    """At two temperatures, of more micro-batches than the job takes at a time."""
    run = placed(tmp_path, model, address, of)
    chance = np.random.default_rng(0)
    groups = [group(chance, f"{n}", 0) for n in range(24)]
    batches = pack(groups, [np.ones(4)] * len(groups), 64)
    assert len(batches) > 8
    parallel.initialize(ParallelConfig())
    try:
        from learner.model import build_model

        frozen = build_model(model, ParallelConfig(), torch.float32).requires_grad_(False)
        expected = {t: target_logprobs(frozen, batches, t) for t in (1.0, 0.7)}
    finally:
        parallel.shutdown()
    weights = fingerprint(run.parsed.model, None)
    job = job_of(run)
    with jobs(job):

        def connect() -> ApartClient:
            return ApartClient(REFERENCE, address, "scripted", weights, "test", 240)

        with Line[ApartClient](connect) as line:
            line.ask(lambda reference: reference.hello()).result(240)
            for t, wanted in expected.items():
                tasks = [Task("logprobs", (work_of(batch, t),)) for batch in batches]
                asked = [line.ask(lambda reference, task=task: reference.of_targets(task)) for task in tasks]
                for one, two in zip(asked, wanted, strict=True):
                    assert np.abs(one.result(60).arrays[0] - two.numpy()).max() <= 1e-5
        assert job.end() == 0, job.log
    assert "the reference ends: " in job.log


def assert_same_kl(got: Run, expected: Run, rel: float) -> None:
    assert_same(got, expected, rel)
    for one, two in zip(got.rows, expected.rows, strict=True):
        for key in COMPARED:
            assert one[key] == pytest.approx(two[key], rel=rel, abs=rel / 10), (one["step"], key)


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    """By one process, with the reference in it."""
    root = tmp_path_factory.mktemp("here")
    runs = {name: Run(root / name, model, **objective) for name, objective in OBJECTIVES.items()}
    learn(1, list(runs.values()))
    return runs


@pytest.fixture(scope="module")
def apart(model, tmp_path_factory, free_address):
    """By learners of two ranks, each with a reference on two others in another layout."""
    root = tmp_path_factory.mktemp("apart")
    at = {of: free_address() for of in LAYOUTS}
    pairs = {
        ("tensor", "pipeline"): ("loss", "dpo"),
        ("pipeline", "tensor"): ("loss", "several", "reward"),
        ("data", "tensor"): ("loss", "several", "dpo"),
        ("tensor", "data"): ("reward",),
    }
    runs = {
        f"{objective}-{own}-{of}": placed(
            root / f"{objective}-{own}-{of}", model, at[of], of, layout=LAYOUTS[own], **OBJECTIVES[objective]
        )
        for (own, of), objectives in pairs.items()
        for objective in objectives
    }
    served = {of: next(run for name, run in runs.items() if name.endswith(f"-{of}")) for of in LAYOUTS}
    with jobs(*(job_of(run) for run in served.values())):
        learn(2, list(runs.values()))
    return runs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_reference_of_another_layout_gives_the_same_losses_and_weights(objective, here, apart):
    found = [run for name, run in apart.items() if name.startswith(f"{objective}-")]
    assert found
    if objective != "dpo":
        assert all(row["kl/reference"] != 0 for row in here[objective].rows[1:])
    for run in found:
        assert_same_kl(run, here[objective], rel=1e-3)


@pytest.mark.long
def test_a_reference_that_is_late_wrong_killed_or_hung_costs_time_only(here, model, tmp_path, address):
    run = placed(tmp_path / "run", model, address)
    run.options = {"gates": [1, 2]}
    other_weights = placed(tmp_path / "a", trained_elsewhere(model, tmp_path / "model"), address)
    other_run = placed(tmp_path / "b", model, address, name="another")
    right, *wrong = (job_of(one) for one in (run, other_weights, other_run))
    with learning(run) as learner:
        learner.says(f"waiting for reference at {address} (hello")
        for job, why in zip(
            wrong, ("weights: this reference has ", "run_id: this reference serves run"), strict=True
        ):
            with jobs(job):
                learner.says(f"waiting for this run's reference at {address}, where another answers: {why}")
                assert job.end() == 0, job.log
        with jobs(right):
            learner.made(1)
            right.kill()
            learner.open(1)
            waited = learner.told("waiting for reference at")
            learner.says("waiting for reference at", waited + 1)
            right.start()
            learner.made(2)
            right.signal(signal.SIGSTOP)
            learner.open(2)
            waited = learner.told("waiting for reference at")
            learner.says("waiting for reference at", waited + 1)
            right.signal(signal.SIGCONT)
            learner.process.wait(120)
    assert_same_kl(run, here["loss"], rel=1e-3)
    assert run.told("published") == list(range(STEPS + 1))


@pytest.mark.long
def test_a_learner_that_is_stopped_without_its_reference_leaves_a_checkpoint(model, tmp_path, address):
    seldom = {"checkpoint": {"every": 4}}
    whole, run = (placed(tmp_path / name, model, address, **seldom) for name in ("whole", "run"))
    run.options = {"gates": [2]}
    job = job_of(run)
    with jobs(job):
        learn(1, [whole])
        with learning(run) as learner:
            learner.made(2)
            job.kill()
            learner.open(2)
            learner.says("waiting for reference at")
            learner.process.send_signal(signal.SIGTERM)
        assert "stopped while it waited for the reference" in run.log
        assert "stopped after step 2: the same command goes on from there" in run.log
        assert [p.name for p in (run.folder / "run/checkpoints").iterdir()] == ["step-000002"]
        job.start()
        learn(1, [run])
    assert "resumed from" in run.log
    assert_same_kl(run, whole, rel=0)


def test_a_learner_whose_reference_never_comes_ends_and_says_why(model, tmp_path, address):
    learner = begin(1, [placed(tmp_path, model, address, timeout_s=4)])
    told, _ = learner.communicate(timeout=120)
    assert learner.returncode == 1
    assert f"reference at {address}: no answer to hello within 4 s" in told


@pytest.mark.parametrize("apart", [False, True])
def test_a_resume_measures_from_the_weights_that_the_run_started_from(apart, model, tmp_path, address):
    shutil.copytree(model, tmp_path / "model")
    folder, options = tmp_path / "run", {"stop_at": 1}
    run = (
        placed(folder, tmp_path / "model", address)
        if apart
        else Run(folder, tmp_path / "model", **OBJECTIVES["loss"])
    )
    run.options = options
    with jobs(*([job_of(run)] if apart else [])):
        learn(1, [run])
    shutil.rmtree(tmp_path / "model")
    trained_elsewhere(model, tmp_path / "model")
    run.options = {}
    resumed = begin(1, [run])
    told, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 1
    assert f"its run started from other weights than {tmp_path / 'model'} has now" in told


@pytest.mark.long
def test_a_whole_run_behind_keys_has_its_reference_and_its_value_model_beside_it(make_experiment, made_model):
    """`slipstream run` starts them, watches them, and ends them with the run."""
    slipstream = str(Path(sys.executable).with_name("slipstream"))
    reference = {"processes": 2, "parallel": {"tensor": 2}, "address": "tcp://127.0.0.1:0"}
    learner = {"steps": 3, "optimizer": {"lr": 3e-3}, "reference": reference}
    learner["algorithm"] = {"kl": {"coefficient": 0.05}, "advantage": "gae"}
    ranks = {"processes": 2, "parallel": {"pipeline": 2}, "address": "tcp://127.0.0.1:0"}
    learner["value"] = {"path": str(made_model), "optimizer": {"lr": 3e-3}, "ranks": ranks}
    folder = make_experiment("placed", learner=learner)
    subprocess.run([slipstream, "keys", "keys"], cwd=folder, check=True, timeout=60, capture_output=True)
    command = [slipstream, "run", "experiment.yaml", "security.keys=keys"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 reference ranks, 2 value ranks, 1 learner rank" in done.stdout
    run = folder / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-6), "at first it is the policy itself"
    assert rows[-1]["kl/reference"] > 1e-6
    assert all(row["value/grad_norm"] > 0 for row in rows)
    assert (run / "value_model/model.safetensors").exists()
    for role in ("reference", "value"):
        assert f"the {role} ends: " in (run / f"logs/{role}.log").read_text()
        last = json.loads((run / f"metrics/{role}.jsonl").read_text().splitlines()[-1])
        assert last["micro_batches"] >= 3
        assert last["bad_messages"] == 0
