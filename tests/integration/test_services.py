"""The three commands of the README's separate services, in any order: each waits, and says for whom."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hand_started import BIN, HOME, services

from buffer.inspection import inspect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, GROUPS = 3, 4


@pytest.fixture
def experiment(make_experiment, free_address) -> Callable[..., Path]:
    def make(name: str, **changes: dict) -> Path:
        sections = {"buffer": {}, "sync": {}, "learner": {}} | changes
        sections["buffer"] = {"groups_per_batch": GROUPS, "address": free_address(), **sections["buffer"]}
        sections["sync"] = {"address": free_address()}
        sections["learner"] = {"steps": STEPS, "optimizer": {"lr": 3e-3}, **sections["learner"]}
        return make_experiment(name, **sections)

    return make


def assert_whole(folder: Path, rows: list[dict], steps: int) -> None:
    """What a finished run is: as `slipstream run` leaves it."""
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "every version once, in order"
    store = inspect(folder / "run")
    assert (store["frontier"], store["finished"]) == (steps, steps)
    states = sum(map(Counter, store["prompts"].values()), Counter())  # the last may be the next epoch's
    assert states["batched"] + states["trained"] == steps * GROUPS, "every group trained once"
    assert set(store["evaluations"]) == {0, steps}
    assert (folder / "run/model/model.safetensors").exists()


def works(process: str) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return bool(Path("/proc", process, "cmdline").read_bytes())
    except OSError:
        return False


def keys_for_hosts(folder: Path) -> dict[str, str]:
    """Keys as docs/operations.md has them made and brought to hosts; service → the override for it."""
    (command,) = re.findall(r"```\n(slipstream keys .*)\n```", (HOME / "docs/operations.md").read_text())
    subprocess.run([BIN / "slipstream", *shlex.split(command)[1:]], cwd=folder, check=True, timeout=60)
    made = folder / shlex.split(command)[2]
    for role in ("buffer", "rollout", "learner"):
        host = folder / f"host-{role}"
        host.mkdir()
        for name in ("public.json", f"{role}.secret"):
            shutil.copy2(made / name, host)
    return {role: f"security.keys=host-{role}" for role in ("buffer", "rollout", "learner")}


def test_learner_then_a_server_of_two_ranks_then_buffer(experiment):
    """On-policy, so that a rank which kept older weights would show: ρ is 1 only if both took them.

    Behind keys: each service has those of its own role only, as on a host of its own.
    """
    engine = {"tensor_parallel": 2, "kv_cache_gib": 0.25, "max_num_seqs": 64}
    folder = experiment("learner-first", buffer={"max_staleness": 0})
    keys = keys_for_hosts(folder)
    with services(folder) as s:
        s.start("learner", None, keys["learner"])
        s.start("rollout", None, keys["rollout"], *(f"rollout.engine.{k}={v}" for k, v in engine.items()))
        s.says("learner", "waiting for buffer at")
        s.says("rollout", "joined the learner at")
        s.says("rollout", "waiting for buffer at")
        s.start("buffer", None, keys["buffer"])
        s.says("buffer", "waiting for the learner and for rollout servers")
        s.finish()
        assert "the learner is here" in s.log("buffer")
        assert "rollout server server-0 is here" in s.log("buffer")
        assert "server-0 joined with 2 ranks" in s.log("learner")
        assert "Transformer Engine" not in s.log("learner"), "it would fill the lines told of a failure"
        rows = s.rows()
    assert_whole(folder, rows, STEPS)
    secrets = [path.read_bytes().strip() for path in folder.glob("keys/*.secret")]
    told = [
        path.read_bytes() for path in (*folder.glob("*.log"), *folder.rglob("run/**/*")) if path.is_file()
    ]
    assert len(secrets) == 6
    assert not any(secret in text for secret in secrets for text in told)
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["rho/mean"] == pytest.approx(1, abs=1e-3)
        assert row["rho/min"] == pytest.approx(1, abs=5e-3)
        assert row["rho/max"] == pytest.approx(1, abs=5e-3)


def test_server_then_buffer_then_learner_and_a_second_server_joins_during_the_run(experiment):
    steps = 8
    folder = experiment("server-first", learner={"steps": steps})
    with services(folder) as s:
        s.start("rollout")
        s.start("rollout", "late")
        for name in ("rollout", "late"):
            s.says(name, "waiting for learner at")
            s.says(name, "waiting for buffer at")
        s.running["late"].send_signal(signal.SIGSTOP)
        s.start("buffer")
        s.says("buffer", "rollout server server-0 is here")
        s.start("learner")
        s.until(lambda: len(s.rows()) >= 2)
        assert "late joined" not in s.log("learner")
        s.running["late"].send_signal(signal.SIGCONT)
        s.finish()
        assert "late joined with 1 rank" in s.log("learner")
        taken = [int(v) for v in re.findall(r"sync: version (\d+): staged", s.log("late"))]
        assert taken[0] >= 2, "the current version, not the first"
        assert taken[-1] == steps
        rows = s.rows()
    assert_whole(folder, rows, steps)
    assert max(row["staleness/max"] for row in rows) <= 2
    lines = (folder / "run/metrics/rollout-late.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["groups"] > 0, "it works beside the first"


def test_a_server_that_meets_another_runs_buffer_says_so_before_vllm_starts(experiment):
    folder = experiment("other-run")
    with services(folder) as s:
        s.start("buffer")
        s.says("buffer", "waiting for the learner and for rollout servers")
        s.start("rollout", "stranger", "name=another")
        assert s.running.pop("stranger").wait(60) == 1
        assert "this buffer serves run 'other-run', the client belongs to 'another'" in s.log("stranger")
        assert "starts vLLM" not in s.log("stranger")


def test_ranks_whose_torchrun_is_killed_stop_too(experiment):
    folder = experiment("torchrun-killed")
    with services(folder) as s:
        s.start("learner")
        s.says("learner", "waiting for buffer at")
        torchrun = s.running.pop("learner")
        ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        assert ranks
        torchrun.kill()
        torchrun.wait()
        s.until(lambda: not any(map(works, ranks)), 60)
        assert "SIGTERM" in s.log("learner")


def test_a_learner_that_is_asked_for_stacks_has_its_ranks_write_them_and_goes_on(experiment):
    folder = experiment("asked-for-stacks")
    with services(folder) as s:
        s.start("learner")
        s.says("learner", "waiting for buffer at")
        s.running["learner"].send_signal(signal.SIGUSR2)
        s.says("learner", "Current thread 0x")
        assert "learner/feed.py" in s.log("learner"), "of the rank, which asks for the frontier"
        assert s.running["learner"].poll() is None


@pytest.mark.long
def test_a_scorer_that_is_killed_and_started_again_costs_time_only(
    experiment, free_address, made_reward_model
):
    engine = {"kv_cache_gib": 0.25, "max_num_seqs": 64}
    helpful = {
        "model": str(made_reward_model), "weight": 0.5, "address": free_address(), "dtype": "float32",
        "engine": engine,
    }  # fmt: skip
    rewards = {"even": {"function": "my_reward:share_of_even_words"}, "helpful": helpful}
    rollout = {"group_size": 4, "sampling": {"max_tokens": 8}, "engine": engine, "rewards": rewards}
    steps = 8
    # On-policy: each step needs scores that were asked for after the one before.
    sections = {"rollout": rollout, "learner": {"steps": steps}, "buffer": {"max_staleness": 0}}
    folder = experiment("killed-scorer", **sections)
    with services(folder) as s:
        for service in ("learner", "buffer", "rollout", "scorer"):
            s.start(service)
        s.until(lambda: len(s.rows()) >= 2)
        killed = s.running.pop("scorer")
        killed.kill()
        killed.wait()
        s.says("rollout", "waiting for scorer helpful at")
        assert len(s.rows()) < steps
        s.start("scorer")
        s.finish()
        assert "connected to scorer helpful at" in s.log("rollout")
        assert "gave up prompt" not in s.log("rollout")
        assert "scorer helpful ends" in s.log("scorer")
        rows = s.rows()
    assert_whole(folder, rows, steps)
    for row in rows:
        parts = row["reward_parts/even"] + 0.5 * row["reward_parts/helpful"]
        assert row["reward/mean"] == pytest.approx(parts, abs=1e-5)


@pytest.mark.long
def test_a_scorer_that_is_away_for_many_timeouts_costs_no_prompt(experiment, free_address, made_reward_model):
    engine, steps, timeout_s = {"kv_cache_gib": 0.25, "max_num_seqs": 64}, 8, 2.0
    helpful = {
        "model": str(made_reward_model), "weight": 1.0, "address": free_address(), "dtype": "float32",
        "engine": engine, "timeout_s": timeout_s,
    }  # fmt: skip
    rollout = {
        "group_size": 4, "sampling": {"max_tokens": 8}, "engine": engine, "rewards": {"helpful": helpful}
    }  # fmt: skip
    sections = {"rollout": rollout, "learner": {"steps": steps}, "buffer": {"max_staleness": 0}}
    folder = experiment("away-scorer", **sections)
    with services(folder) as s:
        for service in ("learner", "buffer", "rollout", "scorer"):
            s.start(service)
        s.until(lambda: len(s.rows()) >= 2)
        s.kill("scorer")
        s.says("rollout", "waiting for the scorer of helpful: no lease is taken until it answers")
        time.sleep(6 * timeout_s)
        assert len(s.rows()) < steps
        s.start("scorer")
        s.finish()
        assert "scorer_silent: " in s.log("rollout")
        assert "the scorer of helpful answered" in s.log("rollout")
        rows = s.rows()
    assert_whole(folder, rows, steps)
    assert inspect(folder / "run")["dropped"] == {}
