import datetime
import json
import os
import subprocess
import sys
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from buffer import cache, text_tables
from buffer.examples import BadRow
from buffer.experiment import FilesSource, JsonlSource
from buffer.sources import open_table
from buffer.text_tables import TextTable, items, lines

ROWS = [{"prompt": f"é{i}", "answer": i, "metadata": {"a": [i, None]}} for i in range(7)]


def opened(*paths):
    return open_table(FilesSource(kind="files", path=tuple(str(p) for p in paths)), seed=1)


def rows_of(table):
    return [table[i] for i in range(len(table))]


def write_arrow(path, rows, new=ipc.new_stream, batch=3, options=None):
    table = pa.Table.from_pylist(rows)
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "\n\r\n \n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    table = opened(path)
    assert rows_of(table) == ROWS
    assert table.where(2) == f"{path}:7"


@pytest.mark.parametrize("name", ["a.json", "a"])
def test_a_json_array(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps(ROWS, ensure_ascii=False, indent=2), encoding="utf-8-sig")
    table = opened(path)
    assert rows_of(table) == ROWS
    assert table.where(2) == f"{path} item 3"


@example([0.0, 1e30, 1.5e-30, 12], None, False, 1)
@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=6,
    ),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_any_json_array_is_cut_at_its_items(tmp_path_factory, values, indent, escaped, chunk):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=escaped), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_tables, "CHUNK", chunk)
        table = TextTable(path, items)
        assert rows_of(table) == values


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"a": 1}, {"a": }, {"a": 2}]', "item 2: not JSON: Expecting value"),
        ('[{"a": 1} {"a": 2}]', "after item 1: expected a comma"),
        ('[{"a": 1}, ', "item 2: not JSON"),
        ('[{"a": 1}', "after item 1: expected a comma or the array's end"),
        ('[{"a": "1}]', "item 1: not JSON: Unterminated string"),
        ("[" + "[" * 100_000, "item 1: not JSON: nested too deeply"),
    ],
)
def test_a_broken_array_is_told_by_item(tmp_path, text, complaint):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        opened(path)


def test_what_stands_behind_an_array_is_told_and_not_left_out(tmp_path):
    path = tmp_path / "two.json"
    path.write_text('[{"prompt": "a"}] \n [{"prompt": "b"}]')
    with pytest.raises(ValueError, match=r"two\.json behind item 1: expected nothing after the array's end"):
        opened(path)


@pytest.mark.parametrize("kind", ["jsonl", "files"])
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path, kind):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    source = {"jsonl": JsonlSource, "files": FilesSource}[kind](kind=kind, path=str(pipe))
    with pytest.raises(ValueError, match=r"rows\.jsonl: a pipe or a device; expected a file"):
        open_table(source, 1)


def test_a_broken_line_costs_that_line(tmp_path):
    path = tmp_path / "a.jsonl"
    half = b'\n{"a": "b\\ud83d"}\n{"a": "\\ud83d\\ude00"}'
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 2}' + half)
    table = opened(path)
    assert [table[0], table[3]] == [{"a": 1}, {"a": 2}]
    with pytest.raises(BadRow, match="not UTF-8"):
        table[1]
    with pytest.raises(BadRow, match="nested too deeply"):
        table[2]
    with pytest.raises(BadRow, match=r"\\ud83d is half of a character"):
        table[4]
    assert table[5] == {"a": "\U0001f600"}


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_lines_are_found_whatever_is_read_at_once(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_tables, "CHUNK", chunk)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n   \n\n{"a": 2}\r\n{"a": 3}')
    assert list(lines(path)) == [(0, 9, 1), (14, 24, 4), (24, 32, 5)]


def test_a_line_that_is_too_long_is_a_bad_row_and_read_into_no_memory(tmp_path):
    path = tmp_path / "hole.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 600 << 20)
    tracemalloc.start()
    try:
        table = TextTable(path, lines)
        assert table[0] == {"a": 1}
        with pytest.raises(BadRow, match="of 599 MiB; expected at most 256"):
            table[1]
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert table.where(1) == f"{path}:2"


@pytest.mark.parametrize("name", ["stream.arrow", "file.arrow", "packed.arrow", "a.parquet", "b"])
def test_arrow_and_parquet(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        packed = ipc.IpcWriteOptions(compression="zstd") if name == "packed.arrow" else None
        write_arrow(path, ROWS, ipc.new_stream if name == "stream.arrow" else ipc.new_file, options=packed)
    table = opened(path)
    assert rows_of(table) == ROWS
    assert table.where(2) == f"{path} row 2"


def test_values_json_has_no_word_for(tmp_path):
    day = datetime.date(2026, 1, 2)
    path = write_arrow(tmp_path / "a.arrow", [{"prompt": "a", "day": day, "raw": None}, {"raw": b"\0"}])
    table = opened(path)
    assert table[0] == {"prompt": "a", "day": "2026-01-02", "raw": None}
    with pytest.raises(BadRow, match="plain JSON"):
        table[1]


def test_a_folder_saved_by_datasets(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_arrow(folder / names[0], ROWS[:4])
    write_arrow(folder / names[1], ROWS[4:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    assert rows_of(opened(folder)) == ROWS
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits; name one: .*/train or .*/test"):
        opened(tmp_path)
    (folder / "state.json").unlink()
    with pytest.raises(ValueError, match=r"not a folder saved by Hugging Face datasets.*\*\.parquet"):
        opened(folder)


def test_several_files_are_one_table(tmp_path):
    first, second = tmp_path / "part-1.jsonl", tmp_path / "part-2.json"
    first.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    second.write_text(json.dumps(ROWS[3:]))
    for table in (opened(first, second), opened(tmp_path / "part-*")):
        assert rows_of(table) == ROWS
        assert (table.where(2), table.where(3)) == (f"{first}:3", f"{second} item 1")
    with pytest.raises(ValueError, match="no file matches"):
        opened(tmp_path / "other-*")


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    path = tmp_path / "part-1.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    (tmp_path / "other.jsonl").symlink_to(path)
    for paths in ((path, path), (path, tmp_path / "part-*"), (path, tmp_path / "other.jsonl")):
        with pytest.raises(ValueError, match=r"named twice.*each of its rows would come twice"):
            opened(*paths)


READS_A_CUT_FILE = """
import sys
from buffer.examples import FileChanged
from buffer.experiment import FilesSource
from buffer.sources import open_table

table = open_table(FilesSource(kind="files", path=sys.argv[1]), 1)
assert len(table[len(table) - 1]["text"]) == 5000
open(sys.argv[1], "r+b").truncate(100)
try:
    table[len(table) - 1]
except FileChanged as error:
    print(error)
"""


def test_a_mapped_file_that_loses_its_end_costs_its_rows_and_not_the_process(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", [{"text": f"{i}" * 5000} for i in range(8)])
    size = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", READS_A_CUT_FILE, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
    assert done.stdout == f"the file was changed since it was opened: 100 bytes of {size}\n"


def test_a_mapped_file_that_is_replaced_or_removed_is_still_read(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", ROWS)
    table = opened(path)
    other = write_arrow(tmp_path / "b.arrow", ROWS[:1])
    other.replace(path)
    assert rows_of(table) == ROWS
    path.unlink()
    assert rows_of(table) == ROWS


def test_what_is_no_data_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.txt: expected JSON lines, a JSON array, parquet, arrow"):
        opened(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read"):
        opened(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="none: cannot be read"):
        opened(tmp_path / "none")


def test_the_index_of_a_large_file_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CACHED_FROM", 10)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert rows_of(opened(path)) == [{"a": 1}, {"a": 2}]

    def refuse(path):
        raise AssertionError("indexed again")

    with monkeypatch.context() as patch:
        patch.setattr(text_tables, "lines", refuse)
        kept = list(cache.folder().iterdir())
        assert [p.suffix for p in kept] == [".lines"]
        patch.setattr(refuse, "__name__", "lines")
        assert rows_of(TextTable(path, refuse)) == [{"a": 1}, {"a": 2}]
        os.utime(path, ns=(1, 1))
        with pytest.raises(AssertionError, match="indexed again"):
            TextTable(path, refuse)
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    assert rows_of(TextTable(path, lines)) == [{"a": 1}, {"a": 3}, {"a": 4}]


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CACHED_FROM", 10)
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"cannot be written: .*XDG_CACHE_HOME"):
        opened(tmp_path / "a.jsonl")


def test_a_content_hash_follows_the_content_not_the_date(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(bytes(1000))
    before = cache.content(path)
    os.utime(path, ns=(1, 1))
    assert cache.content(path) == before
    path.write_bytes(bytes(999) + b"x")
    assert cache.content(path) != before
    monkeypatch.setattr(cache, "SAMPLES", 10)
    monkeypatch.setattr(cache, "SAMPLE_BYTES", 10)
    sampled = cache.content(path)
    path.write_bytes(bytes(1000))
    assert cache.content(path) != sampled, "the last block counts"
    path.write_bytes(bytes(1001))
    assert cache.content(path) != sampled


PROGRAM = """
import json, sys, resource
from buffer.experiment import DataConfig
from buffer.stream import open_stream

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith(sys.argv[2])).split()[1]) / 1024

data = {"train": {"kind": "files", "path": sys.argv[1]}, "on_bad_row": "skip"}
small = open_stream(DataConfig.model_validate({"train": {"kind": "files", "path": sys.argv[3]}}), 1, "rl")
small.take(10)
before = peak()
stream = open_stream(DataConfig.model_validate(data), 1, "rl")
examples = [len(stream.take(1)[0].prompt) for _ in range(2000)]
print(json.dumps([len(stream), sum(examples), peak() - before]))
"""


@pytest.mark.parametrize("kind", ["jsonl", "json", "arrow", "parquet"])
def test_a_large_file_is_not_held_in_memory(tmp_path, kind):
    """120 MB of rows; reading through them may cost 40 MB. What is mapped from a file is not counted for
    arrow: the system takes it back when it needs it."""
    path, small = tmp_path / f"a.{kind}", tmp_path / f"small.{kind}"
    rows = [{"prompt": f"{i:06d}" + 3000 * "x"} for i in range(40)]
    many = 1000
    for target, times in ((path, many), (small, 1)):
        match kind:
            case "jsonl":
                target.write_text("".join(json.dumps(row) + "\n" for row in rows) * times)
            case "json":
                target.write_text("[" + ",".join([",".join(map(json.dumps, rows))] * times) + "]")
            case "arrow":
                table = pa.Table.from_pylist(rows)
                with ipc.new_stream(str(target), table.schema) as writer:
                    for _ in range(times):
                        writer.write_table(table)
            case "parquet":
                table = pa.Table.from_pylist(rows)
                with parquet.ParquetWriter(
                    target, table.schema, compression="none", use_dictionary=False
                ) as w:
                    group = pa.concat_tables([table] * min(times, 50))
                    for _ in range(max(1, times // 50)):
                        w.write_table(group)
    counted = "VmHWM" if kind.startswith("json") else "RssAnon"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), counted, str(small)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    length, read, grown = json.loads(done.stdout)
    assert (length, read) == (40 * many, 2000 * 3006)
    assert grown < 40
