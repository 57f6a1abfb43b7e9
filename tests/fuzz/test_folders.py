"""Folders of models and of runs, with whatever in them: read, or refused with a reason, and left alone."""

import io
import json
import shutil
from pathlib import Path

import msgpack
import pytest
import torch
import yaml
from counting import fuzzed, within
from hypothesis import strategies as st
from mutations import as_json, damaged, json_leaves, json_trees, mutated, trees
from rich.console import Console
from safetensors.torch import save_file
from seeds import ARRAYS, META

from buffer.arrow_tables import saved_by_datasets
from buffer.examples import Example
from buffer.experiment import DataConfig, FilesSource
from buffer.keys import DOMAIN, ServerKeys
from buffer.recording import read_groups
from buffer.stream import open_stream
from launch.experiment import WholeExperiment
from launch.history import History
from launch.local import check_folder, write_config
from launch.model_folder import trained
from launch.summary import read_config
from learner import families
from learner.config import ParallelConfig
from learner.metrics import Journal
from learner.safetensors_folder import INDEX, SafetensorsFolder
from rollout.scorer.folder import faults
from sync.expected import read_specs


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("fuzzed")


def told(error):
    assert str(error), "an error without a word"


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 4, "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "sliding_window": None,
}  # fmt: skip
REWARD = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
configs = st.one_of(
    *(mutated(config, json_trees).map(json.dumps).map(str.encode) for config in (LLAMA, MIXTRAL, REWARD)),
    *(damaged(json.dumps(config).encode()) for config in (LLAMA, MIXTRAL)),
    json_trees.map(json.dumps).map(str.encode),
    st.just(b"[" * 100_000),
)


def model_folder():
    folder = FOLDER / "model"
    if not folder.exists():
        folder.mkdir()
        save_file({"a": torch.ones(2, 2)}, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text("{}")
    return folder


@fuzzed(60, configs)
def test_model_configs(raw):
    folder = model_folder()
    (folder / "config.json").write_bytes(raw)
    for head in ("vocabulary", "score"):
        try:
            family = families.read(folder, head)
            family.check_layout(ParallelConfig(tensor=2))
        except ValueError as error:
            told(error)
        else:
            assert min(family.layers, family.hidden, family.heads, family.kv_heads, family.head_dim) >= 1
    try:
        families.own_head(folder)
    except ValueError as error:
        told(error)
    for found in (
        faults("rollout.rewards.a.model", str(folder), 32),
        trained("model.path", str(folder), 32, ParallelConfig()),
    ):
        assert all(isinstance(line, str) and line for line in found)
    assert (folder / "config.json").read_bytes() == raw


WEIGHT_MAP = {
    "metadata": {"total_size": 16},
    "weight_map": {"a": "model.safetensors", "b": "other.safetensors"},
}


@fuzzed(
    30,
    st.one_of(
        mutated(WEIGHT_MAP, json_trees).map(json.dumps).map(str.encode),
        damaged(json.dumps(WEIGHT_MAP).encode()),
        st.just(b"[" * 100_000),
        st.sampled_from(["../../etc/passwd", "/etc/passwd", "..", "", "\0", 3]).map(
            lambda name: json.dumps({"weight_map": {"a": name}}).encode()
        ),
    ),
)
def test_weight_indexes(raw):
    folder = FOLDER / "indexed"
    if not folder.exists():
        shutil.copytree(model_folder(), folder)
    (folder / INDEX).write_bytes(raw)
    with within(8192):
        try:
            read_specs(folder)
        except ValueError as error:
            told(error)
        try:
            SafetensorsFolder(folder).read("a", slice(0, 1))
        except ValueError as error:
            told(error)


DATASET = {"_data_files": [{"filename": "data-00000.arrow"}], "_indices_data_files": None, "_split": "train"}
SPLITS = {"splits": ["train", "test"]}


@fuzzed(
    30,
    st.sampled_from([("state.json", DATASET), ("dataset_dict.json", SPLITS)]).flatmap(
        lambda file: st.tuples(
            st.just(file[0]),
            st.one_of(
                mutated(file[1], json_trees).map(json.dumps).map(str.encode),
                damaged(json.dumps(file[1]).encode()),
                st.just(b"[" * 100_000),
            ),
        )
    ),
)
def test_folders_of_datasets(file):
    folder = FOLDER / "saved"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    name, raw = file
    (folder / "state.json").write_text(json.dumps(DATASET))
    (folder / name).write_bytes(raw)
    try:
        found = saved_by_datasets(folder)
    except ValueError as error:
        told(error)
    else:
        assert all(path.parent == folder for path in found), "a file of another folder"


GROUP: bytes = msgpack.packb([META, bytes(ARRAYS)])


@fuzzed(
    30,
    st.one_of(
        damaged(GROUP * 2),
        st.binary(max_size=100),
        trees().map(lambda tree: GROUP + json.dumps(tree, default=str).encode()),
        st.sampled_from([b"\x92\xc6\xff\xff\xff\xff", b"\x91" * 5000, b"\x92\xc4\x00\xc4\x00", b""]),
    ),
)
def test_recorded_groups(raw):
    folder = FOLDER / "recorded"
    folder.mkdir(exist_ok=True)
    (folder / "server-0.groups").write_bytes(raw)
    with within(8192):
        try:
            found = read_groups(folder)
        except ValueError as error:
            told(error)
        else:
            assert found
            assert all(group.trajectories for group in found)


STEP = {
    "step": 3, "time": 1.7e9, "time/step": 2.0, "time/wait_batch": 0.5, "groups": 4, "reward/mean": 0.5,
    "sync/load_seconds": 0.1, "sync/pause_seconds": 0.1, "time/publish": 0.1,
}  # fmt: skip
SCORE = {"kind": "score", "version": 2, "score": 0.5}
COMPLETION = {"kind": "completion", "version": 2, "prompt_id": "eval/2/0", "index": 0, "reward": 1.0}
SERVER = {"time": 1.7e9, "server": "server-0", "running_groups": 2, "group_seconds": [0.5], "tokens": 3}
LINES = {
    "metrics.jsonl": STEP, "eval.jsonl": SCORE, "metrics/rollout-server-0.jsonl": SERVER,
    "metrics/buffer.jsonl": {"time": 1.7e9, "stored": 3}, "data_end.json": {"step": 3},
}  # fmt: skip


def lines(good):
    one = st.one_of(
        mutated(good, json_trees).map(as_json).map(json.dumps).map(str.encode),
        damaged(json.dumps(good).encode()),
        json_trees.map(json.dumps).map(str.encode),
    )
    whole = json.dumps(good).encode()
    return st.lists(st.one_of(one, st.just(whole)), min_size=1, max_size=4).map(b"\n".join)


@fuzzed(
    60,
    st.sampled_from(sorted(LINES)).flatmap(lambda name: st.tuples(st.just(name), lines(LINES[name]))),
)
def test_metrics_of_a_run(file):
    """Lines that are none are left out: a run is looked at, and goes on, whatever was written beside it."""
    name, raw = file
    folder = FOLDER / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "metrics").mkdir(parents=True)
    for other, good in LINES.items():
        (folder / other).write_text(json.dumps(good) + "\n")
    (folder / name).write_bytes(raw + b"\n")
    history = History(folder)
    for record in history.refresh():
        assert record["step"] in history.steps
    assert all(isinstance(step, int) and step >= 0 for step in (*history.steps, *history.scores))
    assert isinstance(history.data_end, int | None)
    for key in STEP:
        steps, values = history.series(key)
        assert len(steps) == len(values)
        assert all(isinstance(value, float) for value in values)
    history.since_opened(history.buffer)
    if name == "metrics.jsonl":
        Journal(folder, False, 2).close()
        kept = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert all(row.get("step", 0) <= 2 for row in kept), "steps that will be made again"


EXPERIMENT = {
    "name": "made", "run_dir": "", "model": {"path": "model", "dtype": "float32"},
    "data": {"train": {"kind": "function", "path": "rollout.tasks.addition:train"}},
}  # fmt: skip


@fuzzed(
    15,
    st.one_of(
        mutated(EXPERIMENT, json_trees).map(as_json).map(yaml.safe_dump).map(str.encode),
        damaged(yaml.safe_dump(EXPERIMENT).encode()),
        st.binary(max_size=60),
        st.sampled_from([b"[" * 3000, b"a: &a [*a]", b"!!python/object/apply:os.system [touch ran]", b"3"]),
    ),
)
def test_what_a_run_folder_says_its_run_was(raw):
    folder = FOLDER / "resumed"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_bytes(raw)
    e = WholeExperiment.model_validate(EXPERIMENT | {"run_dir": str(folder)})
    for look in (
        lambda: check_folder(e),
        lambda: read_config(folder),
        lambda: write_config(e, History(Path(e.run_dir)), Console(file=io.StringIO())),
    ):
        try:
            look()
        except ValueError as error:
            told(error)
    assert not (HERE / "ran").exists()


HERE = Path.cwd()
ADMITTED = bytes(range(32))
QUESTION = [b"1.0", b"1", DOMAIN, b"127.0.0.1", b"", b"CURVE", ADMITTED]


@fuzzed(
    60,
    mutated(QUESTION, st.one_of(st.binary(max_size=40), st.just(ADMITTED), st.just(b"NULL"))).filter(
        lambda frames: isinstance(frames, list) and all(isinstance(frame, bytes) for frame in frames)
    ),
)
def test_questions_whether_a_connection_may_be(frames):
    """Nobody gets in but who has the one key; whatever else comes at the gate is answered with a no."""
    answer = ServerKeys(bytes(32), {ADMITTED: "rollout"}).verdict(frames)
    assert len(answer) == 6
    good = frames[2:3] == [DOMAIN] and frames[5:] == [b"CURVE", ADMITTED] and frames[:1] == [b"1.0"]
    assert (answer[2] == b"200") == good
    assert answer[4] == (b"rollout" if good else b"")


POSITION = {"draw": 2, "data": "", "counts": {"bad_row": 1}}


positions = st.one_of(mutated(POSITION, json_trees), json_leaves.map(lambda draw: POSITION | {"draw": draw}))


@fuzzed(15, positions.map(as_json))
def test_places_in_the_data(position):
    path = FOLDER / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(3)))
    config = DataConfig(train=FilesSource(kind="files", path=str(path)), shuffle=False)
    stream = open_stream(config, 1, "sft")
    good = stream.position
    if isinstance(position, dict) and position.get("data") == "":
        position = position | {"data": good["data"]}
    try:
        stream.seek(position)
    except ValueError as error:
        told(error)
        assert stream.position == good, "refused, and half taken"
    assert stream.position["draw"] >= 0
    assert all(isinstance(example, Example) for example in stream.take(2))


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_what_is_good_is_read():
    folder = model_folder()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert families.read(folder).rope.llama3 is not None
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    assert families.read(folder).mixture is not None
    (folder / "config.json").write_text(json.dumps(REWARD))
    assert families.read(folder, "score").has_score
    recorded = FOLDER / "good-groups"
    recorded.mkdir()
    (recorded / "a.groups").write_bytes(GROUP * 2)
    assert len(read_groups(recorded)) == 2
    assert ServerKeys(bytes(32), {ADMITTED: "rollout"}).verdict(QUESTION)[2] == b"200"
