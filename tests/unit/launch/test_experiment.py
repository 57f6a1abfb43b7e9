import json
import os
from pathlib import Path

import pytest
import yaml

from buffer.experiment import ConfigError, DataConfig, JsonlSource, ReasoningGymSource, Section, load
from buffer.keys import ROLES, make_keys
from launch import prediction
from launch.experiment import WholeExperiment, check_scorer, differences, dump, read

HOME = Path(__file__).parents[3]
PLACED = ("learner.algorithm.kl.coefficient=0.1",)
GAE = ("learner.algorithm.advantage=gae",)
APART = (*GAE, "learner.value.path=REWARD")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.sampling.max_tokens=128"], "rollout.sampling.max_tokens=128 leaves no room"),
        (["eval.max_tokens=200"], "eval.max_tokens=200 leaves no room"),
        (["rollout.group_size=1"], "learner.algorithm.advantage=grpo compares"),
        (
            ["buffer.groups_per_batch=2", "learner.processes=4"],
            "fewer than the learner's 4 data-parallel ranks",
        ),
        (["learner.updates_per_batch=9"], "learner.updates_per_batch=9 would split"),
        (["sync.address=tcp://127.0.0.1:5701"], "buffer.address and sync.address are both"),
        (
            ["rollout.rewards.x.function=nothing"],
            "rewards.x.function=nothing: expected package.module:function",
        ),
        (
            ["rollout.rewards.x={function: a:b, wait: 1}"],
            "rollout.rewards.x.wait: unknown key; did you mean weight?",
        ),
        (["rollout.rewards.x.weight=1"], "rollout.rewards.x: expected one of `function` and `model`"),
        (
            ["rollout.rewards.x={function: a:b, model: /m}"],
            "rollout.rewards.x: expected one of `function` and `model`",
        ),
        (["rollout.rewards.x={function: a:b, weight: 0}"], "at least one reward whose weight is not 0"),
        (["rollout.rewards.x={model: /m, clip: 0}"], "rollout.rewards.x.clip: expected more than 0, got 0"),
        (
            ["rollout.rewards.x={model: /m, workers: 2}"],
            "rollout.rewards.x.workers: unknown key; known here",
        ),
        (["rollout.rewards.x={model: /m}"], "rollout.rewards.x.model=/m: no config.json in it"),
        (["rollout.rewards.a/b={function: a:b}"], "rollout.rewards.a/b: expected a name of letters"),
        (["sync.address=127.0.0.1:5702"], "sync.address=127.0.0.1:5702: expected tcp://HOST:PORT"),
        (["buffer.address=tcp://127.0.0.1:70000"], "expected tcp://HOST:PORT"),
        (["sync.join_timeout_s=true"], "sync.join_timeout_s: expected a number, got true"),
        (["sync.join_timeout_s=.inf"], "sync.join_timeout_s: expected a finite number"),
        (["learner.steps=true"], "learner.steps: expected a whole number, got true"),
        (["rollout.rewards.x={function: a:b, only: {k: []}}"], "x.only: k: expected a text, a number"),
        (["rollout.rewards.x={model: /m, only: gsm8k}"], "rollout.rewards.x.only: expected keys of rows"),
        (["rollout.rewards={}"], "at least one reward whose weight is not 0"),
        (["data.train.sizes=3"], "data.train.sizes: unknown key; known here: adapter, args, kind, path"),
        (["eval.source.path=nothing"], "eval.source.path=nothing: expected package.module:function"),
        (["model.max_length=9999"], "model.max_length=9999: the model in"),
        (["model.path=/nowhere"], "model.path=/nowhere: no config.json"),
        (["learner.init_from=/nowhere"], "learner.init_from=/nowhere: no meta.json in it"),
        ([*GAE, "learner.value.path=/nowhere"], "learner.value.path=/nowhere: no config.json"),
        (["learner.ptx.data={kind: jsonl, path: /no}"], "learner.ptx.data.path=/no: no such file"),
        (["learner.ptx.coefficient=0.1"], "learner.ptx.data"),
        (
            ["data.train={kind: jsonl, path: configs/demo.yaml, adapter: nope:f}"],
            "data.train.adapter=nope:f: no module nope; expected",
        ),
        (
            ["rollout.rewards.answer.function=nope:f"],
            "answer.function=nope:f: no module nope; expected",
        ),
        (
            ["rollout.rewards.answer.function=rollout.rewards:exact_nomber"],
            "rewards.py; did you mean exact_number?",
        ),
        (
            ["rollout.episode=configs.custom.guess:reward"],
            "reward is not async; expected `async def reward`",
        ),
        (["learner.algorithm.loss=learner.nope:f"], "loss=learner.nope:f: no module learner.nope"),
        (["data.train={kind: jsonl, path: .}"], "data.train.path=.: a folder; expected a file"),
        (["rollout.engine.cores=zero"], "rollout.engine.cores: expected cores such as 0-1 or 0,2"),
        (["learner.loop=a.b:c"], "learner.loop=a.b:c: no module a.b: No module named 'a'"),
        (["eval.source.path=rollout.tasks.addition:holdout"], "did you mean heldout?"),
        (["learner.optimizer.lr=.inf"], "learner.optimizer.lr: expected a finite number"),
        (["learner.stepz=1"], "learner.stepz: unknown key; did you mean steps?"),
        (["learner.reference.processes=1"], "learner: algorithm has no reference"),
        (
            [*PLACED, "learner.reference.parallel.pipeline=3", "learner.reference.processes=3"],
            "learner.reference.parallel.pipeline=3 is more than the model's 2 layers; use 2 or less",
        ),
        (
            [*PLACED, "learner.reference.address=tcp://127.0.0.1:5702"],
            "sync.address and learner.reference.address are both",
        ),
        ([*PLACED, "learner.reference.address=here"], "reference.address=here: expected tcp://HOST:PORT"),
        (
            [*PLACED, "learner.reference.address=tcp://10.0.0.1:5704"],
            "learner.reference.address: tcp://10.0.0.1:5704 reaches beyond this machine, which needs keys",
        ),
        (["learner.value.path=model", "learner.value.ranks.processes=1"], "grpo has no value model"),
        (
            [*APART, "learner.value.ranks.parallel.pipeline=3", "learner.value.ranks.processes=3"],
            "learner.value.ranks.parallel.pipeline=3 is more than the model's 2 layers; use 2 or less",
        ),
        (
            [*APART, "learner.value.ranks.address=tcp://127.0.0.1:5702"],
            "sync.address and learner.value.ranks.address are both",
        ),
        (
            [*APART, "learner.value.ranks.address=tcp://10.0.0.1:5705"],
            "learner.value.ranks.address: tcp://10.0.0.1:5705 reaches beyond this machine, which needs keys",
        ),
        (["learner.processes=3", "learner.parallel.tensor=2"], "learner: processes 3 is not a multiple"),
        (["learner.parallel.expert=2"], "learner: a pipeline stage's 1 ranks are not a multiple"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(config_file, reward_folder, overrides, told):
    overrides = [override.replace("REWARD", str(reward_folder)) for override in overrides]
    with pytest.raises(ConfigError) as error:
        read(config_file, overrides)
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith((str(config_file), "override "))


def test_a_value_model_of_other_words_is_refused(config_file, model_folder, reward_folder):
    overrides = [override.replace("REWARD", str(reward_folder)) for override in APART]
    (model_folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    (reward_folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    read(config_file, overrides)
    (reward_folder / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0, "a": 1}}}')
    with pytest.raises(ConfigError, match=r"^override learner\.value\.path=.* \"a\" as token 1, and that of"):
        read(config_file, overrides)


@pytest.mark.parametrize("name", ["model", "ema_model"])
def test_a_run_that_would_replace_what_it_starts_from_is_refused(config_file, model_folder, tmp_path, name):
    run_dir = tmp_path / "other"
    (run_dir / name).parent.mkdir()
    model_folder.rename(run_dir / name)
    overrides = [f"model.path={run_dir / name}", f"run_dir={tmp_path / 'elsewhere'}"]
    assert read(config_file, overrides).model.path == str(run_dir / name)
    (tmp_path / "link").symlink_to(run_dir)
    with pytest.raises(ConfigError, match=r"model\.path=.*: where run_dir=.*/link has its own trained model"):
        read(config_file, [overrides[0], f"run_dir={tmp_path / 'link'}"])


@pytest.mark.parametrize(
    ("key", "service"), [("rollout.engine", "rollout"), ("rollout.rewards.x.engine", "scorer")]
)
def test_pipeline_stages_of_an_engine_need_a_gpu_where_it_starts(
    config_file, reward_folder, monkeypatch, key, service
):
    overrides = [f"rollout.rewards.x.model={reward_folder}", f"{key}.pipeline_parallel=2"]
    monkeypatch.setattr("rollout.config.has_gpu", lambda: False)
    with pytest.raises(ConfigError) as error:
        read(config_file, overrides)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"override {key}.pipeline_parallel=2: this machine has no GPU")
    assert line.endswith(f"set {key}.tensor_parallel in its place, or {key}.enforce_eager=false")
    read(config_file, [*overrides, f"{key}.enforce_eager=false"])
    read(config_file, overrides, {"rollout", "scorer", "buffer", "learner"} - {service})
    monkeypatch.setattr("rollout.config.has_gpu", lambda: True)
    read(config_file, overrides)


def test_offline_prediction_refuses_pipeline_stages_too(config_file, monkeypatch):
    overrides = ["rollout.engine.pipeline_parallel=2"]
    monkeypatch.setattr("rollout.config.has_gpu", lambda: False)
    with pytest.raises(ValueError, match=r"rollout.engine.pipeline_parallel=2: this machine has no GPU"):
        prediction.read(config_file, overrides, None)
    monkeypatch.setattr("rollout.config.has_gpu", lambda: True)
    assert prediction.read(config_file, overrides, None).rollout.engine.pipeline_parallel == 2
    with pytest.raises(ValueError, match=r"rollout.engine.tensor_parallel=5: cannot share the 2 attention"):
        prediction.read(config_file, ["rollout.engine.tensor_parallel=5"], None)


@pytest.mark.parametrize(
    ("key", "service"), [("rollout.engine", "rollout"), ("rollout.rewards.x.engine", "scorer")]
)
def test_ranks_of_an_engine_must_be_able_to_share_the_models_heads(config_file, reward_folder, key, service):
    overrides = [f"rollout.rewards.x.model={reward_folder}", f"{key}.tensor_parallel=3"]
    with pytest.raises(ConfigError) as error:
        read(config_file, overrides)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"override {key}.tensor_parallel=3: cannot share the 2 attention heads and 1 key-")
    assert line.endswith("; use one of 1, 2")
    read(config_file, [*overrides, f"{key}.tensor_parallel=2"])
    read(config_file, overrides, {"rollout", "scorer", "buffer", "learner"} - {service})


def test_all_mistakes_are_told_at_once(config_file):
    with pytest.raises(ConfigError) as error:
        read(config_file, ["model.max_length=9999", "sync.address=tcp://127.0.0.1:5701"])
    assert len(str(error.value).splitlines()) == 2


def test_one_completion_a_prompt_is_fine_without_group_relative_advantages(config_file):
    overrides = ["rollout.group_size=1", "learner.algorithm.advantage=reinforce_plus_plus"]
    assert read(config_file, overrides).rollout.group_size == 1


def test_a_missing_rows_file_matters_only_where_the_buffer_runs(config_file):
    overrides = ["data.train={kind: jsonl, path: /nowhere/rows.jsonl}"]
    with pytest.raises(ConfigError, match=r"data.train.path=/nowhere/rows.jsonl: no such file"):
        read(config_file, overrides)
    read(config_file, overrides, services=["learner"])


def test_a_missing_part_of_a_blend_is_told_by_its_place(config_file, tmp_path):
    (tmp_path / "part-1.jsonl").write_text("")
    there = f"{{weight: 1, source: {{kind: files, path: '{tmp_path}/part-*.jsonl'}}}}"
    gone = "{weight: 1, source: {kind: files, path: [/nowhere/a.parquet]}}"
    with pytest.raises(ConfigError) as error:
        read(config_file, [f"data.train={{kind: blend, parts: [{there}, {gone}]}}"])
    (line,) = str(error.value).splitlines()
    assert "data.train.parts.1.source.path=/nowhere/a.parquet: no such file" in line


def test_a_source_of_another_kind_takes_nothing_from_the_one_under_it(tmp_path):
    class Data(Section):
        data: DataConfig

    (tmp_path / "base.yaml").write_text(
        "data: {train: {kind: reasoning_gym, dataset: chain_sum, size: 9}, epochs: 3}"
    )
    own = tmp_path / "own.yaml"
    own.write_text("base: base.yaml\ndata: {train: {kind: jsonl, path: rows.jsonl}}")
    data = load(own, [], Data).data
    assert (data.train, data.epochs) == (JsonlSource(kind="jsonl", path="rows.jsonl"), 3)
    data = load(tmp_path / "base.yaml", ["data.train.size=5"], Data).data
    assert data.train == ReasoningGymSource(kind="reasoning_gym", dataset="chain_sum", size=5)


def test_a_missing_base_is_named_as_such(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: configs/demo.yaml")
    with pytest.raises(ConfigError, match=r"own.yaml: base: .*configs/demo.yaml: no such file"):
        load(own, [], DataConfig)
    with pytest.raises(ConfigError, match=r"gone.yaml: no such file"):
        load(tmp_path / "gone.yaml", [], DataConfig)


def test_a_file_that_is_none_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe.yaml: expected a file; a pipe"):
        load(tmp_path / "pipe.yaml", [], DataConfig)
    own = tmp_path / "own.yaml"
    own.write_text("base: pipe.yaml")
    with pytest.raises(ConfigError, match=r"own.yaml: base: .*pipe.yaml: expected a file; a pipe"):
        load(own, [], DataConfig)


def test_functions_matter_only_where_they_are_called(config_file):
    unknown = ["learner.loop=a.b:c"]
    assert read(config_file, unknown, services=["buffer", "rollout"]).learner.loop == "a.b:c"


def test_a_missing_model_matters_only_where_it_is_loaded(config_file):
    assert read(config_file, ["model.path=/nowhere"], services=["buffer"]).model.path == "/nowhere"
    with pytest.raises(ConfigError, match=r"model.path=/nowhere: no config.json"):
        read(config_file, ["model.path=/nowhere"], services=["rollout"])


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut, r"model.safetensors: \d+ bytes, and its header tells of \d+; bring it here again"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors: not a safetensors file"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights in it, expected"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in it, expected tokenizer.json"),
    ],
)
def test_a_model_whose_files_are_damaged_or_missing_is_told_before_anything_starts(
    config_file, model_folder, spoil, told
):
    spoil(model_folder)
    with pytest.raises(ConfigError, match=told) as error:
        read(config_file, [])
    assert len(str(error.value).splitlines()) == 1


def test_a_damaged_model_config_is_one_line(config_file, model_folder):
    (model_folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        read(config_file, [])


def test_the_resolved_file_is_the_same_experiment(config_file, tmp_path):
    experiment = read(config_file, ["learner.steps=7"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(experiment))
    assert load(resolved, [], WholeExperiment) == experiment
    assert yaml.safe_load(resolved.read_text())["buffer"]["max_staleness"] == 2  # defaults too


@pytest.mark.parametrize(
    "overrides", [["learner.algorithm.correction.kind=bypass"], ["learner.algorithm.loss=reinforce"]]
)
def test_every_service_takes_the_resolved_file(config_file, tmp_path, overrides):
    """It names every key, also those that mean nothing under another one's value."""
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(read(config_file, overrides)))
    assert read(resolved, []) == read(config_file, overrides)


def test_differences_name_the_keys(config_file):
    old = read(config_file, []).model_dump(mode="json")
    new = read(config_file, ["learner.steps=60", "buffer.policy=freshest"]).model_dump(mode="json")
    assert differences(old, new) == ["buffer.policy fifo → freshest", "learner.steps 24 → 60"]
    assert differences(old, json.loads(json.dumps(old))) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("buffer.address=tcp://0.0.0.0:5701", "buffer.address: tcp://0.0.0.0:5701 reaches beyond"),
        ("buffer.address='tcp://*:5701'", "buffer.address: tcp://*:5701 reaches beyond"),
        ("sync.address=tcp://learner-host:5702", "sync.address: tcp://learner-host:5702 reaches beyond"),
    ],
)
def test_what_others_can_reach_needs_keys_which_the_host_must_have(config_file, tmp_path, override, told):
    with pytest.raises(ConfigError) as refused:
        read(config_file, [override])
    assert told in str(refused.value)
    assert "`slipstream keys DIR`" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    keys = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"security\.keys=.*public\.json: No such file"):
        read(config_file, [override, f"security.keys={keys}"])
    make_keys(keys)
    assert read(config_file, [override, f"security.keys={keys}"]).security.keys == str(keys)
    (keys / "learner.secret").unlink()
    assert read(config_file, [override, f"security.keys={keys}"], ["rollout"]), "that is another host's"
    with pytest.raises(ConfigError, match=r"learner\.secret: No such file"):
        read(config_file, [override, f"security.keys={keys}"], ["learner"])


def test_keys_in_the_run_folder_and_a_wildcard_for_the_weights_are_refused(config_file, tmp_path):
    make_keys(tmp_path / "run/keys")
    with pytest.raises(ConfigError, match=r"security\.keys=.*: lies in run_dir="):
        read(config_file, [f"security.keys={tmp_path}/run/keys"])
    make_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="a host that servers can reach"):
        read(config_file, [f"security.keys={tmp_path}/keys", "sync.address=tcp://0.0.0.0:5702"])


def test_no_secret_is_in_the_resolved_file(config_file, tmp_path):
    make_keys(tmp_path / "keys")
    text = dump(read(config_file, [f"security.keys={tmp_path}/keys"]))
    assert f"keys: {tmp_path}/keys" in text
    assert not any((tmp_path / f"keys/{role}.secret").read_text().strip() in text for role in ROLES)


def test_a_file_of_another_command_says_which():
    for file, command in (("sft", "sft"), ("dpo", "dpo"), ("tutorial", "pipeline"), ("pipeline", "pipeline")):
        with pytest.raises(ConfigError, match=rf"configs/{file}.yaml: .*which `slipstream {command}` runs$"):
            read(HOME / f"configs/{file}.yaml", [])


def test_port_0_is_for_those_who_start_together(config_file):
    free = ["buffer.address=tcp://127.0.0.1:0", "sync.address=tcp://127.0.0.1:0"]
    read(config_file, free)
    read(config_file, free, [])
    for service, reached in (("buffer", free[:1]), ("rollout", free), ("learner", free)):
        with pytest.raises(ConfigError) as error:
            read(config_file, free, [service])
        assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
            f"override {key}" for key in reached
        ]
        assert "port 0 is whichever is free, and the other services could not know which" in str(error.value)


def test_the_scorer_of_one_reward_is_checked_by_itself(config_file, reward_folder):
    address = "rollout.rewards.x.address=tcp://127.0.0.1"
    others = ["buffer.address=tcp://127.0.0.1:0", "sync.address=tcp://127.0.0.1:0"]
    there = [f"rollout.rewards.x.model={reward_folder}", f"{address}:5703", *others]
    check_scorer(config_file, [*there, "rollout.rewards.y.model=/nowhere", "rollout.rewards.y.weight=0"], "x")
    with pytest.raises(ConfigError, match=r"rollout.rewards.x.address=.*: port 0 is whichever is free"):
        check_scorer(config_file, [*there, f"{address}:0"], "x")
    (reward_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"rollout.rewards.x.model=.*no tokenizer in it"):
        check_scorer(config_file, there, "x")
