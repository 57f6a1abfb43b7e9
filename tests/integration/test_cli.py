"""The command as a user runs it: a process of its own."""

import os
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

HOME = Path(__file__).parents[2]
SLIPSTREAM = Path(sys.executable).with_name("slipstream")


PLANNED = "configs/plan/policy-7b.yaml"


def slipstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [str(SLIPSTREAM), *arguments], cwd=HOME, capture_output=True, text=True, timeout=60, env=environment
    )


def seconds_of(*arguments: str) -> float:
    """Processor time of the command, the least of three: what it costs, whatever else the machine does."""
    spent: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        slipstream(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(spent)


def test_help_names_every_command():
    result = slipstream("--help")
    assert result.returncode == 0
    commands = (
        "run buffer rollout scorer learner reference sft reward dpo report convert plan measure tune doctor"
    )
    for command in commands.split():
        assert f" {command} " in result.stdout


def test_the_version_is_the_distributions():
    result = slipstream("--version")
    assert (result.returncode, result.stdout) == (0, f"slipstream {version('slipstream-rl')}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",)])
def test_help_takes_less_than_a_second(arguments):
    assert seconds_of(*arguments) < 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "configs/demo.yaml", "learner.stepz=3"),
        ("tune", "configs/demo.yaml", "learner.stepz=3"),
        ("doctor", "configs/demo.yaml", "learner.stepz=3"),
        ("convert", "megatron-to-hf", "/nowhere", "/nowhere/hf"),
        ("convert", "reshard", "/nowhere", "/nowhere/hf"),
        ("convert", "hf-to-megatron", "configs", "/nowhere"),
    ],
)
def test_a_mistake_takes_less_than_two_seconds(arguments):
    assert seconds_of(*arguments) < 2.0


def test_a_plan_takes_less_than_two_seconds_and_says_by_its_exit_code_whether_it_fits():
    assert seconds_of("plan", PLANNED) < 2.0
    fits, does_not = (slipstream("plan", PLANNED, "--devices", devices) for devices in ("8", "7"))
    assert (fits.returncode, does_not.returncode) == (0, 1)
    assert "FITS: 8 of 8 devices" in fits.stdout
    assert "DOES NOT FIT: 8 devices are needed, 7 are there" in does_not.stdout
    assert "set rollout.servers=3" in does_not.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "configs/demo.yaml", "learner.stepz=3"), "learner.stepz: unknown key; did you mean steps?"),
        (("run", "configs/demo.yaml", "lerner.steps=3"), "lerner: unknown section; did you mean learner?"),
        (("run", "configs/demo.yaml", "nonsense"), "override 'nonsense': expected section.key=value"),
        (
            ("run", "configs/demo.yaml", "model.path=/nowhere"),
            "error: override model.path=/nowhere: no config.json",
        ),
        (
            ("evaluate", "configs/demo.yaml", "--model", "/nowhere"),
            "override model.path=/nowhere: no config.json",
        ),
        (("evaluate", "configs/demo.yaml", "--output", "README.md"), "README.md: a file; expected a folder"),
        (
            ("evaluate", "configs/demo.yaml", "--output", "/proc/x"),
            "error: /proc/x: No such file or directory",
        ),
        (("keys", "/proc/x"), "error: /proc/x: cannot be made: No such file or directory"),
        (("generate", "configs/demo.yaml", "README.md", "."), ".: a folder; expected the file that is to be"),
        (
            ("generate", "configs/demo.yaml", "README.md", "x", "--temperature", "inf"),
            "expected a finite number",
        ),
        (("chat", "model", "--temperature", "inf"), "Invalid value for '--temperature': expected a finite"),
        (("generate", "configs/demo.yaml", "README.md", "out.log"), "out.log: what the engine says goes to"),
        (("run", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("run", "configs"), "configs"),
        (("scorer", "configs/judged.yaml"), "Missing option '--name'"),
        (("scorer", "configs/judged.yaml", "--name", "answer"), "no reward model of this name"),
        (
            ("scorer", "configs/judged.yaml", "--name", "helpful", "rollout.rewards.helpful.model=/nowhere"),
            "rollout.rewards.helpful.model=/nowhere: no config.json in it",
        ),
        (("reference", "configs/demo.yaml"), "learner.reference: missing; without it the reference is on"),
        (("run",), "Missing argument 'CONFIG'. See `slipstream run --help`."),
        (("rum",), "No such command 'rum'. Did you mean 'run'? See `slipstream --help`."),
        (("run", "configs/demo.yaml", "--fast"), "No such option: --fast"),
        (("learner", "configs/demo.yaml", "learner.stepz=3"), "learner.stepz: unknown key"),
        (("rollout", "configs/demo.yaml", "rollout.serverz=3"), "rollout.serverz: unknown key"),
        (("rollout", "configs/demo.yaml", "--name", "../x"), "--name ../x: expected one folder name"),
        (("buffer", "configs/demo.yaml", "buffer.capacity=1"), "buffer: capacity 1 is below"),
        (("buffer", "inspect"), "buffer inspect: expected one RUN_DIR"),
        (("buffer", "inspect", "/nowhere"), "/nowhere/buffer.sqlite: no such file"),
        (("sft", "configs/sft.yaml", "stage.kinds=sft"), "stage.kinds: unknown key; did you mean kind?"),
        (("sft", "configs/dpo.yaml"), "configs/dpo.yaml: stage.kind is dpo; run it with `slipstream dpo`"),
        (("sft", "configs/demo.yaml"), "reinforcement learning file, which `slipstream run` runs"),
        (("dpo", "configs/tutorial.yaml"), "a pipeline's file, which `slipstream pipeline` runs"),
        (("pipeline", "configs/demo.yaml"), "reinforcement learning file, which `slipstream run` runs"),
        (
            ("dpo", "configs/dpo.yaml", "stage.loss=ipo", "stage.label_smoothing=0.1"),
            "loss ipo has no labels",
        ),
        (("report", "/nowhere"), "/nowhere: no config.yaml in it"),
        (("convert", "megatron-to-hf", "/nowhere", "/nowhere/hf"), "/nowhere: no meta.json in it"),
        (("convert", "hf-to-megatron", "configs", "/nowhere"), "configs/config.json does not exist"),
        (
            ("plan", PLANNED, "learner.processes=66", "learner.parallel.pipeline=33"),
            "more than the model's 32",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, told):
    result = slipstream(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")


def test_inspect_tells_what_a_buffer_holds(tmp_path, free_address):
    """Of a store that a real buffer service opened and left."""
    config = yaml.safe_dump({
        "name": "inspected", "run_dir": str(tmp_path / "run"),
        "model": {"path": "unused"}, "buffer": {"address": free_address()},
        "data": {"train": {"kind": "function", "path": "rollout.tasks.addition:train"}},
    })  # fmt: skip
    (tmp_path / "inspected.yaml").write_text(config)
    command = [sys.executable, "-m", "buffer", str(tmp_path / "inspected.yaml")]
    buffer = subprocess.Popen(command, cwd=HOME, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "run" / "metrics" / "buffer.jsonl").exists():
            assert time.monotonic() < until
            assert buffer.poll() is None
            time.sleep(0.1)
        told = slipstream("buffer", "inspect", str(tmp_path / "run"))
    finally:
        buffer.terminate()
        buffer.wait()
    assert told.returncode == 0, told.stderr
    assert "run id           inspected" in told.stdout
    assert "published        none" in told.stdout


@pytest.mark.slow
def test_doctor_tells_what_there_is():
    result = slipstream("doctor")
    assert result.returncode == 0, result.stdout
    for part in (
        "python",
        "cores",
        "memory",
        "torch",
        "vllm",
        "megatron.core",
        "CUDA",
        "buffer port",
        "ready",
    ):
        assert part in result.stdout
    assert len(result.stdout.splitlines()) < 24


def test_tune_tries_a_grid_of_its_own_where_none_is_given(tmp_path):
    seconds = ("--generate-seconds", "4", "--train-seconds", "2")
    result = slipstream("tune", "configs/demo.yaml", f"run_dir={tmp_path}/run", *seconds)
    assert (result.returncode, result.stderr) == (0, "")
    assert "recommended: rollout.servers=" in result.stdout
    assert (tmp_path / "run" / "tuning" / "tuning.png").is_file()
