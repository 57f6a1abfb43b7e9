"""kill -9 of the real buffer under load from several processes: nothing acked is lost, nothing is doubled."""

import asyncio
import hashlib
import json
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from buffer.client import BatchForgotten, BufferClient, DataExhausted
from buffer.records import Batch

ROWS, EPOCHS, GROUPS_PER_BATCH = 203, 2, 6
ROLLOUT = Path(__file__).parent / "buffer_rollout.py"
KILLED = Path(__file__).parent / "killed_buffer.py"
ENDINGS = (("insert", "40"), ("commit", "40"), ("batch", "4"))
"""One after the other, each of a start of the buffer of its own."""


@pytest.fixture
def processes():
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, *arguments]))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)


@pytest.fixture
def run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
    config = tmp_path / "run.yaml"
    experiment = {
        "name": "run",
        "run_dir": str(tmp_path / "run"),
        "data": {"train": {"kind": "jsonl", "path": str(rows)}, "epochs": EPOCHS},
        "buffer": {
            "address": address,
            "groups_per_batch": GROUPS_PER_BATCH,
            "max_staleness": 3,
            "lease_timeout_s": 3,
        },
        "logging": {"level": "WARNING"},
    }
    config.write_text(json.dumps(experiment))
    return address, config, tmp_path


def digest(batch: Batch) -> str:
    """Of everything the learner would train on, in order."""
    whole = hashlib.blake2b(repr((batch.index, batch.shares)).encode())
    for group in batch.groups:
        row = int(group.prompt_id.rpartition("/")[2])
        whole.update(group.group_id.encode())
        for t in group.trajectories:
            assert t.token_ids[0] == 1000 * row + t.index, "the tokens belong to another prompt"
            for array in (t.token_ids, t.loss_mask, t.behavior_logprobs, t.versions):
                whole.update(array.tobytes())
    return whole.hexdigest()


@pytest.mark.slow
def test_kill_9_loses_and_doubles_nothing(run, processes):
    address, config, folder = run
    buffer = [processes("-m", "buffer", str(config))]
    servers = [processes(str(ROLLOUT), address, f"server-{i}", str(folder / f"acked-{i}")) for i in range(3)]
    batches, prompts = asyncio.run(asyncio.wait_for(learn(address, config, buffer, servers, processes), 150))

    assert buffer[-1].wait(20) == 0, "the buffer ends by itself once everybody knows that the run is over"
    assert [s.wait(10) for s in servers] == [-signal.SIGKILL, 0, 0]
    assert len(prompts) == len(set(prompts)), "a prompt was trained twice in an epoch"
    assert len(batches) == ROWS * EPOCHS // GROUPS_PER_BATCH
    store = sqlite3.connect(folder / "run" / "buffer.sqlite")
    states = dict(store.execute("SELECT prompt_id, state FROM prompts"))
    assert set(states) == {f"{e}/{r}" for e in range(EPOCHS) for r in range(ROWS)}
    assert {p for p, s in states.items() if s in ("batched", "trained")} == set(prompts)
    remainder = ROWS * EPOCHS % GROUPS_PER_BATCH
    assert sorted(states.values()).count("dropped") == remainder
    assert store.execute("SELECT value FROM counters WHERE name = 'dropped/remainder'").fetchone() == (
        remainder,
    )
    kept = {g for (g,) in store.execute("SELECT group_id FROM groups")}
    acked = [line.split()[0] for i in range(3) for line in (folder / f"acked-{i}").read_text().splitlines()]
    store.close()
    assert len(acked) == len(set(acked)), "a group was acknowledged as new twice"
    assert set(acked) <= kept, "an acknowledged group is gone"


async def learn(address, config, buffer, servers, processes):
    """Train through kills: after each, every batch that is not committed comes again, and is the same."""
    seen: dict[int, str] = {}
    prompts: list[str] = []
    committed = 0
    ended = asyncio.Event()

    async def end_at_every_moment() -> None:
        for moment, survived in ENDINGS:
            buffer.append(processes(str(KILLED), moment, survived, str(config)))
            assert await asyncio.to_thread(buffer[-1].wait, 60) == -signal.SIGKILL, moment
        buffer.append(processes("-m", "buffer", str(config)))
        ended.set()

    learner = BufferClient(address, "learner", "run", "rank-0")
    async with learner as client, asyncio.TaskGroup() as tasks:
        await client.published(0)
        while True:
            index = len(seen)
            try:
                batch = await client.batch(index, 0, 1, 30.0)
            except DataExhausted:
                break
            assert batch is not None, f"batch {index} never came"
            seen[index] = digest(batch)
            prompts += [g.prompt_id for g in batch.groups]
            for group in batch.groups:
                assert index - group.oldest_version <= 3
            if index == 52:
                await ended.wait()
            if index in (5, 52):
                buffer[-1].kill()
                assert buffer[-1].wait(10) == -signal.SIGKILL
            if index == 5:
                tasks.create_task(end_at_every_moment())
            if index == 52:
                buffer.append(processes("-m", "buffer", str(config)))
            if index in (5, 21, 40, 52):
                for old in range(committed, index + 1):
                    again = await client.batch(old, 0, 1, 30.0)
                    assert again is not None
                    assert digest(again) == seen[old]
            if index == 30:
                servers[0].kill()
            await client.published(index + 1)
            if index % 10 == 9:
                committed = index - 3
                await client.committed(committed)
                with pytest.raises(BatchForgotten):
                    await client.batch(committed - 1, 0, 1, 5.0)
        assert max(seen) + 1 == len(seen)
        await client.finished(len(seen))
    return seen, prompts
