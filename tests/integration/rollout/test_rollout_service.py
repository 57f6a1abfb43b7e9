"""`python -m rollout` as a process, with the real buffer beside it and a real publish of version 0."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from buffer.client import BufferClient
from sync.config import SyncConfig
from sync.manifest import TensorSpec
from sync.publisher import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "rollout-service-test"


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def experiment(tmp_path, tiny_model):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "t{i} t{i + 1} t3", "answer": "t7"}}\n' for i in range(5, 45)))
    settings = {
        "name": NAME,
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tiny_model), "max_length": 256, "dtype": "float32"},
        "data": {"train": {"kind": "jsonl", "path": str(prompts)}},
        "buffer": {"address": free_address(), "groups_per_batch": 4, "max_staleness": 1},
        "rollout": {
            "group_size": 4,
            "sampling": {"max_tokens": 200},
            "engine": {"kv_cache_gib": 0.25},
            "rewards": {"contains": {"function": "rollout.rewards:contains"}},
        },
        "sync": {"address": free_address()},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path, settings


@contextmanager
def process(*command, log):
    with Path(log).open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)], stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def learner(settings):
    """A publisher, for whoever joins."""
    publisher = Publisher(SyncConfig(**settings["sync"]), NAME, torch.device("cpu"))
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def publish(publisher, model):
    """Its weights as version 0."""
    tensors = sorted(load_file(Path(model) / "model.safetensors").items())
    assert publisher.wait_for_members(1, timeout_s=400), "no server joined"
    specs = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]
    publisher.publish(0, specs, iter(tensors))
    report = publisher.wait_loaded()
    assert report.members, report


async def take(settings, start_version, index):
    async with BufferClient(settings["buffer"]["address"], "learner", NAME, "learner") as client:
        if start_version is not None:
            await client.published(start_version)
        return await client.batch(index, 0, 1, timeout_s=200)


def family(pid):
    """The process and all that descends from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        found += new
        new = [child for parent in new for child in parents.get(parent, [])]
    return found


def named(pids, pattern):
    return [pid for pid in pids if re.search(pattern, command_line(pid))]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(command_line, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if command_line(pid)]


@contextmanager
def serving(experiment, tmp_path):
    """Buffer and server up, version 0 loaded, the first batch in: (server, its log, the batch, publisher)."""
    path, settings = experiment
    log = tmp_path / "rollout.log"
    with (
        process("buffer", path, log=tmp_path / "buffer.log"),
        learner(settings) as publisher,
        process("rollout", path, "--name", "server-0", log=log) as server,
    ):
        publish(publisher, settings["model"]["path"])
        batch = asyncio.run(take(settings, 0, 0))
        assert batch is not None, log.read_text()
        yield server, log, batch, publisher


def test_a_server_joins_serves_and_hands_its_leases_back_at_ctrl_c(experiment, tmp_path):
    """Which a terminal sends to the engine's processes too."""
    with serving(experiment, tmp_path) as (server, log, batch, publisher):
        for group in batch.groups:
            assert len(group.trajectories) == 4
            for t in group.trajectories:
                sampled = t.loss_mask == 1
                assert t.token_ids[sampled].size
                assert set(t.versions[sampled].tolist()) == {0}
                assert np.isfinite(t.behavior_logprobs).all()
                assert t.reward == float("t7" in t.metadata["text"])
        children = family(server.pid)[1:]
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
        assert not gone_within(children, 5)
        client_settings = experiment[1]

        async def status():
            async with BufferClient(client_settings["buffer"]["address"], "observer", NAME, "o") as client:
                return await client.status()

        assert asyncio.run(status())["leased"] == 0
        while publisher.members():
            time.sleep(0.05)  # until its goodbye is heard
        counted = publisher.counted()
    metrics = (tmp_path / "run/metrics/rollout-server-0.jsonl").read_text().splitlines()
    last = json.loads(metrics[-1])
    assert last["groups"] > 0
    assert 0 < counted["tokens"] <= last["tokens"], "the learner was told what the server's own file says"
    assert 0 < counted["waiting_s/weights"] <= last["waiting_s/weights"]


def test_a_server_killed_with_9_leaves_no_process(experiment, tmp_path, monkeypatch):
    """Nor one that a reward has started, such as an answer that is being run."""
    path, settings = experiment
    (tmp_path / "runs_answers.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '271'])\ndef reward(text, row): return 0.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    settings["rollout"]["rewards"] = {"runs": {"function": "runs_answers:reward"}}
    path.write_text(yaml.safe_dump(settings))
    with serving(experiment, tmp_path) as (server, *_):
        children = family(server.pid)[1:]
        assert named(children, "sleep")
        assert named(children, "VLLM::EngineCore")
        assert named(children, "VLLM::Worker")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        left = gone_within(children, 10)
        assert not left, [command_line(pid) for pid in left]


def test_a_server_whose_engine_dies_says_so_and_exits_with_1(experiment, tmp_path):
    with serving(experiment, tmp_path) as (server, log, *_):
        children = family(server.pid)[1:]
        (core,) = named(children, "VLLM::EngineCore")
        os.kill(core, signal.SIGKILL)
        assert server.wait(60) == 1
        assert not gone_within(children, 10)
        last = log.read_text().splitlines()[-1]
        assert "rollout server server-0 stops: vLLM's engine died" in last
