"""`slipstream run` with scripted services in the place of the real ones."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from buffer.errors import FolderInUse
from buffer.experiment import ConfigError
from buffer.run_lock import RunLock
from launch import local, services
from launch.experiment import read
from launch.history import History
from launch.summary import summarize
from launch.supervisor import Failure, Service
from learner import ending

OVERRIDES = ["buffer.address=tcp://127.0.0.1:0", "sync.address=tcp://127.0.0.1:0"]

FINISHES = """
    import json, pathlib, sys
    run_dir = pathlib.Path(sys.argv[1])
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "time": step, "time/step": 1.0, "reward/mean": 0.5}) + "\\n")
    scores = [{"kind": "score", "version": v, "score": s} for v, s in ((0, 0.2), (2, 0.9))]
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(s) + "\\n" for s in scores))
    (run_dir / "model").mkdir(exist_ok=True)
    (run_dir / "model" / "config.json").write_text("{}")
    end = {"step": step, "evaluated": True, "exported": True, "epochs": None, "over": True}
    (run_dir / "finished.json").write_text(json.dumps(end))
"""
EVALUATES_LATER = (
    FINISHES.replace("(2, 0.9)", "(1, 0.9)")
    + """
    import time
    time.sleep(600)
"""
)
FAILS = "raise SystemExit('the engine could not start: out of memory')"
STOPS_EARLY = FINISHES.replace("(1, 2)", "(1,)")
DATA_ENDS = (
    STOPS_EARLY.replace("(2, 0.9)", "(1, 0.9)").replace('"epochs": None', '"epochs": 2')
    + """
    (run_dir / "data_end.json").write_text('{"step": 1}')
"""
)
FOLLOWS = """
    import pathlib, sys, time
    while not (pathlib.Path(sys.argv[1]) / "model" / "config.json").exists():
        time.sleep(0.02)
"""
STAYS = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def start(config_file, tmp_path) -> Callable[..., tuple[int, str]]:
    """Runs the experiment with these scripts as buffer, server and learner; gives exit code and output."""

    def run(
        learner: str, others: str = FOLLOWS, server: str | None = None, steps: int = 2, scorer: str = ""
    ) -> tuple[int, str]:
        experiment = read(config_file, [*OVERRIDES, f"learner.steps={steps}"])

        def plan(e, _config) -> list[Service]:
            codes = {"buffer": others, "rollout": server or others, "learner": learner}
            codes |= {"scorer-helpful": scorer} if scorer else {}
            return [
                Service(role, role, [sys.executable, "-c", textwrap.dedent(code), e.run_dir])
                for role, code in codes.items()
            ]

        output = io.StringIO()
        code = local.run(experiment, "slipstream run it.yaml", Console(file=output, width=200), plan)
        return code, output.getvalue()

    return run


def test_a_finished_run_says_what_came_of_it_and_is_not_run_again(start, tmp_path):
    code, output = start(FINISHES)
    assert code == 0
    assert "target 0.8 REACHED: eval score 0.200 → 0.900" in output
    assert str(tmp_path / "run" / "model") in output
    assert (tmp_path / "run" / "report" / "summary.json").exists()
    shutil.rmtree(tmp_path / "run" / "report")  # as of a run that was interrupted behind its last step
    for steps in (2, 1):
        code, output = start(FAILS, steps=steps)
        assert code == 0
        assert "is finished. To train on, raise learner.steps" in output
        assert "target 0.8 REACHED" in output
    assert (tmp_path / "run" / "report" / "summary.json").exists()


def test_what_a_finished_run_was_made_without_is_told(start, config_file):
    assert start(FINISHES)[0] == 0
    assert "not trained" not in start(FAILS)[1]
    changed = yaml.safe_load(config_file.read_text())
    changed["learner"]["optimizer"] = {"lr": 0.5}
    changed |= {"sync": {"backend": "gloo"}}
    config_file.write_text(yaml.safe_dump(changed))
    code, output = start(FAILS)
    assert code == 0
    told = (
        "changed since it was made, and not trained: learner.optimizer.lr 1e-06 → 0.5; take another run_dir"
    )
    assert told in output


def test_a_failure_is_told_with_its_reason_and_how_to_go_on(start):
    code, output = start(FAILS, STAYS)
    assert code == 1
    assert "learner │ the engine could not start: out of memory" in output
    assert "learner ended with code 1; whole log: " in output
    assert output.rstrip().endswith("slipstream run it.yaml")


def test_a_learner_that_ends_before_its_last_step_ends_the_run(start):
    code, output = start(STOPS_EARLY, STAYS)
    assert code == 1
    assert "learner ended at step 1 of 2" in output


def test_a_buffer_that_ends_before_the_last_step_ends_the_run(start):
    code, output = start(STAYS, "print('stopping')", STAYS)
    assert code == 1
    assert "buffer ended at step 0 of 2" in output


def test_so_does_a_scorer_that_something_else_ended(start):
    code, output = start(STAYS, STAYS, scorer="import time; time.sleep(1)")
    assert code == 1
    assert "scorer-helpful ended at step 0 of 2" in output


@pytest.mark.parametrize("learner", [STAYS, EVALUATES_LATER])
def test_a_server_that_something_else_ended_in_order_ends_the_run(start, learner):
    code, output = start(learner, STAYS, "import time; time.sleep(1)")
    assert code == 1
    assert re.search(r"rollout ended at step [02] of 2", output)


def test_a_run_whose_data_ends_first_is_finished_until_there_is_more_of_it(start, config_file):
    more = yaml.safe_load(config_file.read_text())
    more["data"]["epochs"] = 2
    config_file.write_text(yaml.safe_dump(more))
    code, output = start(DATA_ENDS)
    assert code == 0
    assert "; the data ended behind them" in output
    assert "target 0.8 REACHED: eval score 0.200 → 0.900" in output
    code, output = start(FAILS)
    assert code == 0
    assert "is finished. To train on, raise data.epochs" in output
    more["data"]["epochs"] = 3
    config_file.write_text(yaml.safe_dump(more))
    for _ in range(2):  # that it was started with them already changes nothing
        assert start(FAILS)[0] == 1, "there is more of it now"


@pytest.mark.parametrize("server", [STAYS, "import time; time.sleep(600)"])
def test_a_server_that_comes_up_after_the_run_is_over_does_not_hold_up_its_end(start, server):
    """Whether it hears the signal or dies of it."""
    code, output = start(FINISHES, server=server)
    assert code == 0
    assert "target 0.8 REACHED" in output


def test_an_interrupt_stops_cleanly_and_says_how_to_resume(start, tmp_path):
    def press() -> None:
        until = time.monotonic() + 20
        log = tmp_path / "run" / "logs" / "learner.log"
        while time.monotonic() < until and not (log.exists() and "up" in log.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    code, output = start(STAYS, STAYS)
    thread.join()
    assert code == 130
    assert "stopping, for 180 s at most; Ctrl-C again ends everything at once" in output, (
        "there is no step yet to keep"
    )
    assert "There is no checkpoint yet. To start again: slipstream run it.yaml" in output
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "meta.json").write_text("{}")
    _, output = start(FAILS, STAYS)
    assert "To go on from the last checkpoint once that is mended: slipstream run it.yaml" in output


@pytest.mark.parametrize(
    ("steps", "lost", "kept"),
    [(1, None, True), (0, None, False), (1, "server-0", True), (1, "learner", False), (1, "value", False)],
)
def test_a_checkpoint_is_announced_where_one_will_be_written(steps, lost, kept, make_run):
    history = History(make_run(steps=steps))
    history.refresh()
    failure = lost and Failure(lost, "was ended by SIGKILL", [], Path("its.log"))
    told = local.stopping_line(history, failure or None)
    assert ("the learner writes a checkpoint" in told) == kept
    assert told.startswith(
        "stopping" if lost is None else f"{lost} was ended by SIGKILL; stopping the others"
    )
    assert told.endswith(f"; Ctrl-C {'twice' if lost else 'again'} ends everything at once")


def test_a_resumed_run_tells_what_changed(start, config_file):
    start(FAILS)
    changed = yaml.safe_load(config_file.read_text())
    changed["learner"]["optimizer"] = {"lr": 0.5}
    config_file.write_text(yaml.safe_dump(changed))
    _, output = start(FAILS)
    assert "changed since the last start: learner.optimizer.lr 1e-06 → 0.5\n" in output


def test_what_changed_behind_a_step_is_kept_and_told_in_the_summary(make_run, config_file):
    run_dir = make_run(steps=24)

    def started(*overrides):
        history = History(run_dir)
        history.refresh()
        local.write_config(read(config_file, list(overrides)), history, Console(quiet=True))
        return summarize(run_dir)

    assert started().changes == []
    again = started("learner.optimizer.lr=0.5")
    assert again.changes == [(24, "learner.optimizer.lr 1e-06 → 0.5")]
    assert re.search("changed +behind step 24: learner.optimizer.lr 1e-06 → 0.5", again.text())
    assert "do not compare" not in again.text()
    with (run_dir / "changes.jsonl").open("a") as file:
        file.write('{"step": 12, "changes": ["rollout.rewards.short.weight 0.2 → 0"]}\n')
    told = summarize(run_dir).text()
    assert "(what is scored was changed behind step 12: the two do not compare)" in told


def test_a_folder_of_another_run_is_refused(start, config_file):
    start(FAILS)
    config_file.write_text(config_file.read_text().replace("name: made", "name: other"))
    with pytest.raises(local.RunError, match="holds the run 'made', not 'other'"):
        start(FAILS)


def test_a_folder_of_a_finished_run_of_another_name_is_refused_too(start, config_file):
    assert start(FINISHES)[0] == 0
    config_file.write_text(config_file.read_text().replace("name: made", "name: other"))
    with pytest.raises(local.RunError, match="holds the run 'made', not 'other'"):
        start(FAILS)


def test_a_folder_of_another_command_is_refused(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"name": "made", "stage": {"kind": "sft"}}))
    with pytest.raises(local.RunError, match="holds a run of `slipstream sft`"):
        start(FAILS)


def test_two_runs_in_one_folder_are_refused(start, tmp_path):
    run_dir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"""
import time
from pathlib import Path
from launch.local import locked
with locked(Path({str(run_dir)!r})):
    print("held", flush=True)
    time.sleep(600)
"""],
        cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(local.RunError, match=rf"in use by another run \(process {holder.pid}\)"):
            start(FINISHES)
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout:
            holder.stdout.close()
    assert start(FINISHES)[0] == 0, "the lock of a killed run must not stay"


def test_the_services_get_the_written_file_with_addresses_that_are_free(config_file, tmp_path):
    experiment = local.settle(read(config_file, OVERRIDES))
    config = tmp_path / "config.yaml"
    planned = local.plan_services(experiment, config)
    assert [s.name for s in planned] == ["buffer", "server-0", "learner"]
    assert all(str(config) in s.command for s in planned)
    assert not experiment.buffer.address.endswith(":0")
    assert experiment.buffer.address != experiment.sync.address
    learner = planned[-1]
    assert learner.stop_signal_to == "children"
    assert learner.command[1:3] == ["-m", "learner.torchrun"]


@pytest.fixture
def judged(config_file, reward_folder) -> list[str]:
    """Overrides for two reward models that are computed and one that is not."""
    model = {"model": str(reward_folder), "address": "tcp://127.0.0.1:0"}
    rewards = {
        "right": {"function": "rollout.rewards:exact_number"},
        "kind": model | {"engine": {"tensor_parallel": 2}},
        "brief": model,
        "unused": {"model": "/nowhere", "weight": 0},
    }
    changed = yaml.safe_load(config_file.read_text())
    changed["rollout"]["rewards"] = rewards
    config_file.write_text(yaml.safe_dump(changed, sort_keys=False))
    return OVERRIDES


def test_each_reward_model_that_is_computed_has_a_scorer_with_an_address_of_its_own(
    config_file, judged, tmp_path, monkeypatch
):
    monkeypatch.setattr(services, "usable_cores", lambda: list(range(16)))
    experiment = local.settle(read(config_file, judged))
    config = tmp_path / "config.yaml"
    planned = {s.name: s for s in local.plan_services(experiment, config)}
    assert list(planned) == ["buffer", "server-0", "scorer-kind", "scorer-brief", "learner"]
    kind = planned["scorer-kind"]
    assert kind.command[1:6] == ["-m", "rollout.scorer", str(config), "--name", "kind"]
    assert kind.command[6:] == ["rollout.rewards.kind.engine.cores=2-3|4-5"]
    assert planned["server-0"].command[-1] == "rollout.engine.cores=0-1"
    rewards = experiment.rollout.rewards
    addresses = {experiment.buffer.address, experiment.sync.address}
    addresses |= {rewards[name].address for name in ("kind", "brief")}
    assert len(addresses) == 4
    assert not any(address.endswith(":0") for address in addresses)
    roles = [s.role for s in planned.values()]
    assert len(set(roles)) == len(roles), "a scorer cannot stand in for another reward's"
    stopping = list(local.deadlines(list(planned.values())))
    assert stopping == ["learner", "rollout", "scorer-kind", "scorer-brief", "buffer"]


PLACED = (
    "learner.algorithm.kl.coefficient=0.1",
    "learner.reference.processes=4",
    "learner.reference.address=tcp://127.0.0.1:0",
)


def test_a_reference_on_ranks_of_its_own_is_a_job_beside_the_learner(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(services, "usable_cores", lambda: list(range(16)))
    experiment = local.settle(read(config_file, [*OVERRIDES, *PLACED]))
    planned = {s.name: s for s in local.plan_services(experiment, tmp_path / "config.yaml")}
    assert list(planned) == ["buffer", "server-0", "reference", "learner"]
    job = planned["reference"]
    assert (job.role, job.stop_signal_to) == ("reference", "children")
    assert job.command[job.command.index("--nproc-per-node") + 1] == "4"
    config = str(tmp_path / "config.yaml")
    assert job.command[-4:] == ["-m", "learner.reference", config, "learner.reference.threads=1"]
    assert planned["learner"].command[-1] == "learner.threads=1", "its five ranks share half of the cores"
    assert not experiment.learner.reference.address.endswith(":0")
    assert list(local.deadlines(list(planned.values()))) == ["learner", "reference", "rollout", "buffer"]
    monkeypatch.setattr(services, "visible_gpus", lambda: list("01234567"))
    planned = {s.name: s for s in local.plan_services(experiment, tmp_path / "config.yaml")}
    shares = {name: s.environment["CUDA_VISIBLE_DEVICES"] for name, s in planned.items()}
    assert shares == {"buffer": "", "server-0": "0", "reference": "1,2,3,4", "learner": "5"}


def test_a_value_model_on_ranks_of_its_own_is_a_job_that_stops_behind_the_learner(
    config_file, reward_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(services, "usable_cores", lambda: list(range(16)))
    apart = ("learner.algorithm.advantage=gae", f"learner.value.path={reward_folder}")
    apart += ("learner.value.ranks.processes=2", "learner.value.ranks.address=tcp://127.0.0.1:0")
    experiment = local.settle(read(config_file, [*OVERRIDES, *PLACED, *apart]))
    planned = {s.name: s for s in local.plan_services(experiment, tmp_path / "config.yaml")}
    assert list(planned) == ["buffer", "server-0", "reference", "value", "learner"]
    job = planned["value"]
    assert (job.role, job.stop_signal_to) == ("value", "children")
    assert job.command[job.command.index("--nproc-per-node") + 1] == "2"
    config = str(tmp_path / "config.yaml")
    assert job.command[-4:] == ["-m", "learner.value", config, "learner.value.ranks.threads=1"]
    ports = {experiment.learner.reference.address, experiment.learner.value.ranks.address}
    assert len(ports) == 2
    assert not any(port.endswith(":0") for port in ports)
    stopping = list(local.deadlines(list(planned.values())))
    assert stopping == ["learner", "reference", "value", "rollout", "buffer"]
    monkeypatch.setattr(services, "visible_gpus", lambda: list("01234567"))
    planned = {s.name: s for s in local.plan_services(experiment, tmp_path / "config.yaml")}
    shares = {name: s.environment["CUDA_VISIBLE_DEVICES"] for name, s in planned.items()}
    assert shares == {"buffer": "", "server-0": "0", "reference": "1,2,3,4", "value": "5,6", "learner": "7"}


def test_two_scorers_on_one_address_are_refused(config_file, judged):
    same = [f"rollout.rewards.{name}.address=tcp://127.0.0.1:5703" for name in ("kind", "brief")]
    with pytest.raises(ConfigError, match=r"rewards.kind.address and rollout.rewards.brief.address are both"):
        read(config_file, [*judged, *same])


def test_a_reward_model_that_takes_less_than_the_policy_says_is_refused(config_file, judged):
    told = r"rollout.rewards.kind.max_length=64 is below model.max_length=128"
    with pytest.raises(ConfigError, match=told):
        read(config_file, [*judged, "rollout.rewards.kind.max_length=64"])


def test_unfinished_means_steps_evaluation_or_model_are_missing(make_run, config_file):
    run_dir = make_run()
    experiment = read(config_file, [])

    def finished() -> bool:
        history = History(run_dir)
        history.refresh()
        return local.is_finished(experiment, history)

    end = ending.End(step=24, evaluated=True, exported=True, epochs=None)
    assert not finished()
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    for other in (replace(end, exported=False), replace(end, step=12)):
        ending.write(run_dir, other)
        assert not finished(), "the model is of an earlier end"
    ending.write(run_dir, end)
    assert finished()
    scores = (run_dir / "eval.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "eval.jsonl").write_text("".join(s for s in scores if json.loads(s)["version"] < 24))
    assert not finished()


def test_a_file_in_the_place_of_the_run_folder_is_told(start, config_file):
    settings = yaml.safe_load(config_file.read_text()) | {"run_dir": "/dev/full"}
    config_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(local.RunError, match=r"run_dir=/dev/full: is no folder; expected one"):
        start(FINISHES)


def test_a_run_folder_of_a_name_too_long_is_named(start, config_file, tmp_path):
    settings = yaml.safe_load(config_file.read_text()) | {"run_dir": str(tmp_path / ("x" * 300))}
    config_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(local.RunError, match=r"^run_dir=.*x: cannot be written: File name too long$"):
        start(FINISHES)


def test_a_run_folder_that_cannot_be_written_is_named(start, config_file, tmp_path):
    (tmp_path / "file").write_text("")
    settings = yaml.safe_load(config_file.read_text()) | {"run_dir": str(tmp_path / "file" / "run")}
    config_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(local.RunError, match=r"run_dir=.*file/run: cannot be written: Not a directory"):
        start(FINISHES)


def test_a_buffer_started_by_hand_leaves_the_experiment_for_the_report(config_file):
    e = read(config_file, OVERRIDES)
    local.keep_config(e)
    path = Path(e.run_dir) / "config.yaml"
    assert yaml.safe_load(path.read_text())["buffer"]["max_staleness"] == e.buffer.max_staleness
    path.write_text("name: kept\n")
    local.keep_config(e)
    assert path.read_text() == "name: kept\n"


@pytest.mark.parametrize("service", ["buffer", "learner"])
def test_a_folder_whose_buffer_or_learner_lives_is_refused_before_anything_starts(service, start, tmp_path):
    lock = RunLock(tmp_path / "run", service)
    with pytest.raises(FolderInUse, match=f"in use by another {service} .process {os.getpid()}"):
        start(FINISHES)
    assert not (tmp_path / "run" / "logs").exists()
    lock.release()
    assert start(FINISHES)[0] == 0
