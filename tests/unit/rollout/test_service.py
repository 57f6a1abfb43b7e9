import asyncio
import logging
import socket

import pytest

from buffer.experiment import ConfigError
from buffer.rendering import Renderer
from rollout import service
from rollout.config import RolloutExperiment
from rollout.engine import EngineFailed
from rollout.groups import SamplingPlan
from rollout.scripted import ScriptedEngine, plain_completion
from rollout.total_reward import TotalReward


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def experiment(tmp_path, **sections):
    source = {"kind": "function", "path": "rollout.tasks.addition:train"}
    return RolloutExperiment.model_validate(
        {
            "name": "unit",
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path), "max_length": 64},
            "data": {"train": source},
            "buffer": {"address": free_address()},
            "sync": {"address": free_address()},
            "rollout": {"sampling": {"max_tokens": 16}},
            "eval": {"source": source},
        }
        | sections
    )


def test_an_evaluation_samples_its_own_way_and_takes_only_the_rollouts_length(tmp_path):
    source = {"kind": "function", "path": "rollout.tasks.addition:heldout"}
    plans = service.sampling_plans(experiment(tmp_path))
    assert plans == {"train": SamplingPlan(8, 1.0, 16), "eval": SamplingPlan(4, 1.0, 16)}
    own = {
        "source": source, "samples": 1, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 32,
    }  # fmt: skip
    plans = service.sampling_plans(experiment(tmp_path, eval=own))
    assert plans == {"train": SamplingPlan(8, 1.0, 16), "eval": SamplingPlan(1, 0.6, 32, 0.95, 20)}


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"rollout": {"sampling": {"max_tokens": 64}}}, "rollout.sampling.max_tokens"),
        (
            {"eval": {"source": {"kind": "jsonl", "path": "x"}, "max_tokens": 64}},
            "eval.max_tokens",
        ),
    ],
)
def test_a_length_that_leaves_no_room_for_a_prompt_is_refused_by_its_key(tmp_path, section, key):
    with pytest.raises(ConfigError, match=key):
        service.sampling_plans(experiment(tmp_path, **section))


def test_a_server_with_pipeline_stages_does_not_start_without_a_gpu(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rollout.config.has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        service.run(experiment(tmp_path, rollout={"engine": {"pipeline_parallel": 2}}), "server-0")
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert "rollout.engine.pipeline_parallel=2: this machine has no GPU" in line


def test_a_missing_model_is_told_in_one_line_and_ends_with_1(tmp_path, caplog):
    with pytest.raises(SystemExit) as ended:
        service.run(experiment(tmp_path), "server-0")
    assert ended.value.code == 1
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert line.startswith("rollout server server-0 stops: model.path:")
    assert "\n" not in line


class OtherBuffer:
    """One that was started with a temperature of its own."""

    def __init__(self, *_):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def status(self):
        return {"temperature": 0.7}


@pytest.mark.parametrize("here", [0.7, 1.0])
def test_a_server_of_another_temperature_than_the_buffers_ends(tmp_path, monkeypatch, here):
    """Before its engine starts, and where the buffer came later, before it has a lease."""
    monkeypatch.setattr(service, "BufferClient", OtherBuffer)
    worked = []

    async def work(loop):
        worked.append(loop)

    monkeypatch.setattr(service.RolloutLoop, "run", work)
    settings = experiment(tmp_path, rollout={"sampling": {"max_tokens": 16, "temperature": here}})
    engine, renderer = ScriptedEngine(plain_completion), Renderer(None, 64)

    async def join():
        await engine.start()
        plans = service.sampling_plans(settings)
        await service.serve_with(settings, "s", engine, TotalReward({}), renderer, plans)

    for came in (service._greet(settings, "s"), join()):
        if here == 0.7:
            asyncio.run(came)
            continue
        with pytest.raises(ValueError, match=r"temperature=1\.0 here, and the buffer was started with 0\.7;"):
            asyncio.run(came)
    assert len(worked) == (here == 0.7)


def test_an_engine_that_dies_ends_the_server_even_when_nobody_else_is_there(tmp_path):
    async def go():
        settings = experiment(tmp_path)
        engine = ScriptedEngine(plain_completion)
        await engine.start()
        rewards = TotalReward({})
        serving = asyncio.create_task(
            service.serve_with(
                settings, "s", engine, rewards, Renderer(None, 64), service.sampling_plans(settings)
            )
        )
        await asyncio.sleep(0.2)
        assert not serving.done()
        engine.fail("out of memory")
        await asyncio.wait_for(serving, 10)

    with pytest.raises(EngineFailed, match="out of memory"):
        asyncio.run(go())
    assert (tmp_path / "run/metrics/rollout-s.jsonl").read_text().count("\n") == 1
