"""Whatever is wrong with a user's file, it is read, or refused with the error documented and left alone."""

import hashlib
import io
import json
import shutil
import sqlite3
import struct
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml
from counting import fuzzed, within
from hypothesis import strategies as st
from mutations import as_json, damaged, json_trees, mutated, trees
from pyarrow import ipc, parquet
from safetensors.torch import save_file
from seeds import made_group

from buffer.adapters import ADAPTERS, find
from buffer.assembly import payloads
from buffer.config import BufferConfig
from buffer.errors import Refusal
from buffer.examples import STAGES, BadRow
from buffer.experiment import SECTIONS, ConfigError, FilesSource, load
from buffer.groups import decode_delivery, encode_group
from buffer.inspection import inspect
from buffer.keys import PUBLIC, ROLES, KeysError, client_keys, make_keys, server_keys
from buffer.prompts import PromptQueue
from buffer.sources import open_table
from buffer.store import Sources, Store
from launch.experiment import WholeExperiment
from launch.pipeline import PipelineConfig
from learner.checkpoint_files import META, check, complete
from learner.offline.config import OfflineExperiment
from learner.safetensors_folder import SafetensorsFolder
from sync.expected import damage, read_specs

HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    """One folder for all examples of this file; a fixture's own would be made for each."""
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("fuzz")


def state(folder):
    """Names, sizes and contents of everything in a folder."""
    return {
        str(p.relative_to(folder)): hashlib.blake2b(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def told(error, secrets=()):
    assert str(error), "an error without a word"
    assert not any(secret in str(error) for secret in secrets)


PRESETS = [(yaml.safe_load(path.read_text()), path) for path in sorted((HOME / "configs").glob("**/*.yaml"))]


def schema_of(tree):
    if "stages" in tree:
        return PipelineConfig, tuple(PipelineConfig.model_fields)
    return (OfflineExperiment if "stage" in tree else WholeExperiment), SECTIONS


@fuzzed(
    60,
    st.sampled_from(PRESETS).flatmap(
        lambda preset: st.tuples(
            mutated({k: v for k, v in preset[0].items() if k != "base"}).map(as_json), st.just(preset[0])
        )
    ),
)
def test_experiment_files(pair):
    tree, good = pair
    path = FOLDER / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=False))
    schema, sections = schema_of(good)
    try:
        load(path, [], schema, sections)
    except ConfigError as error:
        told(error)


@fuzzed(
    30,
    st.one_of(st.binary(max_size=200), *(damaged(path.read_bytes()) for _, path in PRESETS[:6])),
    st.lists(st.text(max_size=30), max_size=2),
)
def test_bytes_as_experiment_files(raw, overrides):
    path = FOLDER / "bytes.yaml"
    path.write_bytes(raw)
    try:
        load(path, overrides, WholeExperiment)
    except ConfigError as error:
        told(error)


ROWS = [
    {"prompt": "p", "answer": "a", "metadata": {"x": 1}},
    {"text": "\n\nHuman: q\n\nAssistant: a"},
    {"query": "q", "response": ["a", "b"], "score": [0.5, 1]},
    {"prompt": [{"role": "user", "content": "q"}], "response": "a", "score": 1},
    {"prompt": "p", "response": "a", "rejected": "b"},
    {"prompt": "p", "chosen": "a", "rejected": "b"},
    {"prompt": "p", "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
     "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]},
    {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"data_source": "s", "prompt": "p", "reward_model": {"ground_truth": "a"}},
    {"prompt": "p", "eval_func": "f", "answer": 1},
]  # fmt: skip
rows = st.one_of(*(mutated(row, json_trees) for row in ROWS), json_trees)


@fuzzed(150, rows, st.sampled_from(sorted(ADAPTERS)))
def test_rows_of_every_adapter(row, name):
    for stage in STAGES:
        try:
            example = ADAPTERS[name](row).fitted(stage)
        except BadRow as error:
            told(error)
        else:
            assert example.prompt
            assert all(isinstance(response, str) for response in example.responses)
            assert len(example.scores) in (0, len(example.responses))


@fuzzed(
    30,
    st.lists(
        st.dictionaries(
            st.sampled_from(
                ["prompt", "text", "query", "response", "score", "chosen", "rejected", "messages", "answer"]
            ),
            json_trees,
            max_size=5,
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_telling_the_adapter(first):
    try:
        find("auto", first, "made")
    except ValueError as error:
        told(error)


def _arrow():
    table = pa.table({"prompt": ["a", "b", "c"] * 40, "answer": [1.5, None, 3.0] * 40})
    stream, packed, file = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, packed)
    return stream.getvalue(), file.getvalue(), packed.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
DATA = [
    ("jsonl", LINES), ("json", json.dumps(ROWS).encode()), ("json", LINES),
    *zip(("arrow", "arrow", "parquet"), _arrow(), strict=True),
]  # fmt: skip
BOMBS = [("jsonl", b"[" * 100_000 + b"\n"), ("json", b"[" * 100_000), ("json", b'[{"a":' + b"[" * 100_000)]


@fuzzed(
    60,
    st.one_of(
        *(st.tuples(st.just(kind), st.one_of(damaged(raw), st.binary(max_size=200))) for kind, raw in DATA),
        st.sampled_from(BOMBS),
    ),
)
def test_data_files(pair):
    kind, raw = pair
    path = FOLDER / f"data.{kind}"
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    try:
        table = open_table(FilesSource(kind="files", path=str(path)), 1)
    except ValueError as error:
        told(error)
        return
    for row in range(min(len(table), 200)):
        try:
            json.dumps(table[row])
        except BadRow as error:
            told(error)
    assert path.read_bytes() == raw


def checkpoint(folder):
    """As the learner leaves one, with a pickle that no reader of a damaged checkpoint may open."""
    temporary = folder / ".step.tmp"
    temporary.mkdir(parents=True)
    (temporary / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (temporary / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(folder).encode() + b"/ran'\ntR.")
    complete(temporary, folder / "step-000001", {"step": 1, "dtype": "float32", "position": None})
    return folder / "step-000001"


DIGESTS = {
    "__0_0.distcp": {"bytes": 2048, "blake2b": "00"},
    ".metadata": {"bytes": 9, "blake2b": "00"},
}
MADE_META = {"step": 1, "dtype": "float32", "files": DIGESTS}


@fuzzed(
    30,
    st.sampled_from(["__0_0.distcp", ".metadata", META]),
    st.one_of(st.integers(0, 2**20), st.binary(max_size=100), mutated(MADE_META).map(as_json)),
)
def test_checkpoint_folders(name, damage_):
    folder = FOLDER / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    path = checkpoint(folder)
    good, written = (path / name).read_bytes(), check(path)
    if isinstance(damage_, int):  # cut off there, or with that bit flipped
        place = damage_ % (8 * len(good))
        cut = bytearray(good[: place // 8] if damage_ % 2 else good)
        if not damage_ % 2:
            cut[place // 8] ^= 1 << place % 8
        (path / name).write_bytes(cut)
    elif isinstance(damage_, bytes):
        (path / name).write_bytes(damage_)
    else:
        (path / META).write_text(json.dumps(damage_))
    before = state(path)
    try:
        meta = check(path)
    except ValueError as error:
        told(error)
    else:
        assert name == META, "another file changed, and nobody saw it"
        assert meta == written, "damage with another meaning"
    assert state(path) == before
    assert not (folder / "ran").exists(), "it was unpickled"


def _tensors():
    path = FOLDER / "seed.safetensors"
    if not path.exists():
        save_file({"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


SPECS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [48, 58]},
}


def _file(header, length=None):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(58)


@fuzzed(
    60,
    st.one_of(
        mutated(SPECS).map(as_json).map(_file),
        st.sampled_from([2**63, 2**64 - 1, 100 << 20, (100 << 20) + 1, 0, 1]).map(lambda n: _file(SPECS, n)),
        st.binary(max_size=200),
        damaged(_file(SPECS)),
        st.just(struct.pack("<Q", 100_000) + b"[" * 100_000),
        st.just(_file(SPECS | {"b": SPECS["b"] | {"data_offsets": [0, 10]}})),
        st.just(_file(SPECS | {"b": SPECS["b"] | {"data_offsets": [48, 2**62]}})),
    ),
)
def test_safetensors(raw):
    folder = FOLDER / "model"
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    with within(8192):
        found = damage(path)
        assert found is None or "safetensors" in found
        try:
            read_specs(folder)
        except ValueError as error:
            told(error)
    try:
        tensors = SafetensorsFolder(folder)
        for name in ("a", "b"):
            tensors.dtype(name)
            tensors.read(name, slice(0, 2))
    except ValueError as error:
        told(error)
    assert path.read_bytes() == raw


def _store(folder):
    config = BufferConfig(groups_per_batch=2)
    sources = Sources(PromptQueue([{"prompt": f"p{i}"} for i in range(8)], 0, 1, False), [], None)
    return Store(folder, "run", config, sources, time.monotonic)


def _use(store):
    """A lease, the group of one that was there before, and a batch: as requests of a run ask for them."""
    with store.transaction():
        store.lease("server-1", "another request", 3)
    leases = store.database.run("SELECT lease_id, prompt_id FROM leases").fetchall()
    for lease_id, prompt_id in leases:
        group = replace(made_group(), group_id=f"of {lease_id}", lease_id=lease_id, prompt_id=prompt_id)
        with store.transaction():
            store.deliver(decode_delivery(*encode_group(group)))
    with store.transaction():
        found = store.batch(0)
    if found is not None:
        payloads(store.database.connection, found.shard(0, 1))
    store.status()


def _database():
    folder = FOLDER / "good"
    if not folder.exists():
        folder.mkdir()
        store = _store(folder)
        with store.transaction():
            store.published(0)
            store.lease("server-0", "request", 3)
        store.database.run("PRAGMA journal_mode = DELETE")
        store.close()
    return (folder / "buffer.sqlite").read_bytes()


changes_ = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=6)


@fuzzed(15, changes_, st.booleans())
def test_sqlite_files(changes, cut):
    raw = bytearray(_database())
    for place, value in changes:
        # The pages' headers and first cells say most; flips there are what breaks.
        raw[place % (len(raw) if place % 2 else 200)] = value
    folder = FOLDER / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / "buffer.sqlite"
    path.write_bytes(raw[: changes[0][0] % len(raw)] if cut else raw)
    before = path.read_bytes()
    try:
        assert isinstance(inspect(folder), dict)
    except ValueError as error:
        told(error)
    assert path.read_bytes() == before, "looked at, and written"
    try:
        store = _store(folder)
    except (ValueError, sqlite3.OperationalError) as error:  # the second is a disk's, which the service tells
        told(error)
        return
    try:
        _use(store)
    except (Refusal, sqlite3.DatabaseError) as error:  # the service tells of the second, too
        told(error)
    finally:
        store.close()


@fuzzed(
    60,
    st.sampled_from([PUBLIC, "buffer.secret", "rollout.secret"]),
    st.one_of(
        st.binary(max_size=120),
        st.integers(0, 2**20),
        mutated(dict.fromkeys(ROLES, "0" * 40), trees()).map(as_json).map(json.dumps).map(str.encode),
    ),
)
def test_keys_files(name, damage_):
    seed, folder = FOLDER / "keys", FOLDER / "damaged-keys"
    if not seed.exists():
        make_keys(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seed, folder)
    raw = bytearray((folder / name).read_bytes())
    if isinstance(damage_, int):
        raw[damage_ // 8 % len(raw)] ^= 1 << damage_ % 8
    else:
        raw = bytearray(damage_)
    (folder / name).write_bytes(raw)
    for read in (
        lambda: server_keys(str(folder), "buffer"),
        lambda: client_keys(str(folder), "rollout", "buffer"),
    ):
        try:
            read()
        except KeysError as error:
            told(error, [(seed / f"{role}.secret").read_text().strip() for role in ROLES])
