import json
import logging
import math

import pytest

from buffer import cache
from buffer.examples import BadRow, Example
from buffer.experiment import DataConfig
from buffer.stream import open_stream
from buffer.text_tables import TextTable


def config(path, **keys):
    return DataConfig.model_validate({"train": {"kind": "files", "path": str(path)}, **keys})


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_stream_goes_on_where_it_was(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(23)])
    stream = open_stream(config(path, epochs=3), 7, "rl")
    before = [e.prompt for e in stream.take(30)]
    position = json.loads(json.dumps(stream.position))
    rest = [e.prompt for e in stream.take(100)]
    again = open_stream(config(path, epochs=3), 7, "rl")
    again.seek(position)
    assert [e.prompt for e in again.take(100)] == rest
    passes = [(before + rest)[i : i + 23] for i in (0, 23, 46)]
    assert [sorted(p) for p in passes] == [sorted(f"p{i}" for i in range(23))] * 3
    assert passes[0] != passes[1]
    assert again.take(1) == []


def test_bad_rows_are_told_or_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n{"prompt": 4}\n')
    stream = open_stream(config(path, epochs=1, shuffle=False, on_bad_row="skip"), 1, "rl")
    assert [e.prompt for e in stream.take(9)] == ["a", "b"]
    assert stream.counts == {"bad_row": 2}
    with pytest.raises(BadRow, match=r"a\.jsonl:3: not JSON"):
        open_stream(config(path), 1, "rl")


def exits():
    raise SystemExit(0)


def test_a_function_of_ones_own_that_exits_has_failed():
    """Its caller would end in order otherwise, with nothing done."""
    source = {"kind": "function", "path": f"{__name__}:exits"}
    with pytest.raises(ValueError, match=r":exits raised SystemExit: 0 \(.*test_stream\.py:\d+\)"):
        open_stream(DataConfig.model_validate({"train": source}), 1, "rl")


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "1 / 0"])
def test_a_module_of_ones_own_that_does_not_come_up_is_told_by_its_line(tmp_path, monkeypatch, line):
    (tmp_path / "does_not_come_up.py").write_text(f"\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be imported .*: \w+: .*does_not_come_up\.py:2\)"):
        open_stream(
            DataConfig.model_validate({"train": {"kind": "function", "path": "does_not_come_up:rows"}}),
            1,
            "rl",
        )


class OwnError(Exception):
    pass


def refuses_b(row):
    if row["prompt"] == "b":
        raise {"assert": AssertionError, "divide": ZeroDivisionError, "own": OwnError, "exit": SystemExit}[
            row["how"]
        ]("no b")
    return {"prompt": row["prompt"]}


@pytest.mark.parametrize("how", ["assert", "divide", "own", "exit"])
def test_whatever_an_adapter_of_ones_own_raises_costs_its_row_alone(how, tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": p, "how": how} for p in "abc"])
    data = {
        "train": {"kind": "files", "path": str(path), "adapter": f"{__name__}:refuses_b"},
        "shuffle": False,
    }
    stream = open_stream(DataConfig.model_validate({**data, "on_bad_row": "skip", "epochs": 1}), 1, "rl")
    assert [e.prompt for e in stream.take(9)] == ["a", "c"]
    assert stream.counts == {"bad_row": 1}
    with pytest.raises(BadRow, match=r"a\.jsonl:2: .*:refuses_b raised (\w*Error|SystemExit): no b"):
        open_stream(DataConfig.model_validate(data), 1, "rl")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ("9" * 30, "row: only plain values can be sent"),
        ("9" * 5000, "cannot be read: Exceeds the limit"),
        ("[" * 120 + "]" * 120, "row: more than 90 lists and mappings in each other"),
    ],
    ids=["integer", "digits", "depth"],
)
def test_a_row_that_could_not_be_sent_to_a_server_is_a_bad_one(odd, told, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "x": {odd}}}\n{{"prompt": "c"}}\n')
    stream = open_stream(config(path, epochs=1, shuffle=False, on_bad_row="skip"), 1, "rl")
    assert [e.prompt for e in stream.take(9)] == ["a", "c"]
    assert stream.counts == {"bad_row": 1}
    with pytest.raises(BadRow, match=rf"a\.jsonl:2: {told}"):
        open_stream(config(path), 1, "rl")


def test_a_stage_gets_the_responses_it_trains_on(tmp_path):
    rows = [{"prompt": "q", "response": ["x", "y"], "score": [0.3, 0.7], "answer": 4}]
    path = written(tmp_path / "a.jsonl", rows)

    def first(stage):
        return open_stream(config(path), 1, stage).take(1)[0]

    assert first("reward") == first("dpo") == Example("q", ("x", "y"), (0.3, 0.7), rows[0])
    assert first("sft") == Example("q", ("y",), (), rows[0])
    assert first("rl") == Example("q", (), (), rows[0])


def test_rows_that_are_not_what_the_stage_needs_are_told_with_their_keys(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": "p", "solution": "s", "answer": None}])
    expected = r"a\.jsonl:1: sft needs a response, .*; read as prompt, keys found: `prompt`, `solution`; docs"
    with pytest.raises(BadRow, match=expected):
        open_stream(config(path), 1, "sft")


def test_pretraining_reads_documents_by_itself(tmp_path):
    rows = [{"text": "one text"}, {"text": "\n\nHuman: a\n\nAssistant: b"}]
    path = written(tmp_path / "a.jsonl", rows)
    stream = open_stream(config(path, shuffle=False), 1, "pretraining")
    assert [e.prompt for e in stream.take(3)] == [rows[0]["text"], rows[1]["text"], rows[0]["text"]]
    with pytest.raises(BadRow, match=r"a\.jsonl:1: text: missing; read as document, keys found: `prompt`"):
        open_stream(config(written(path, [{"prompt": "p"}])), 1, "pretraining")


def blend(tmp_path, weights, **keys):
    parts = []
    for name, (rows, weight) in weights.items():
        path = written(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(rows)])
        parts.append({"source": {"kind": "files", "path": str(path)}, "weight": weight})
    return DataConfig.model_validate({"train": {"kind": "blend", "parts": parts}, **keys})


def test_a_blend_resumes_at_the_exact_row(tmp_path):
    config = blend(tmp_path, {"a": (40, 0.5), "b": (9, 0.3), "c": (3, 0.2)}, epochs=5)
    whole = [e.prompt for e in open_stream(config, 3, "rl").take(1000)]
    assert len(whole) == 5 * 52
    assert [sum(p[0] == name for p in whole) for name in "abc"] == [130, 78, 52]
    for done in (0, 1, 17, 52, 259):
        first = open_stream(config, 3, "rl")
        assert [e.prompt for e in first.take(done)] == whole[:done]
        again = open_stream(config, 3, "rl")
        again.seek(json.loads(json.dumps(first.position)))
        assert [e.prompt for e in again.take(1000)] == whole[done:]
    assert [e.prompt for e in open_stream(config, 4, "rl").take(1000)] != whole


def test_stages_share_no_row_whatever_their_seeds(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(200)]
    data = config(written(tmp_path / "a.jsonl", rows), split="2,4,4", epochs=1)
    seen = {
        stage: [e.prompt for e in open_stream(data, seed, stage).take(999)]
        for seed, stage in enumerate(("sft", "reward", "rl"))
    }
    assert {stage: len(prompts) for stage, prompts in seen.items()} == {"sft": 40, "reward": 80, "rl": 80}
    assert sorted(p for prompts in seen.values() for p in prompts) == sorted(row["prompt"] for row in rows)
    with pytest.raises(ValueError, match="'1,0,1' leaves no rows for reward"):
        open_stream(config(tmp_path / "a.jsonl", split="1,0,1"), 1, "reward")


def test_a_place_in_other_data_is_refused(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(5)])
    position = open_stream(config(path), 1, "rl").position
    open_stream(config(path, train={"kind": "jsonl", "path": str(path)}), 1, "rl").seek(
        position
    )  # the same rows
    with pytest.raises(ValueError, match=r"a\.jsonl: not the rows that this run began with"):
        open_stream(config(path, split="0,0,1"), 1, "rl").seek(position)
    written(path, [{"prompt": f"p{i}"} for i in (0, 1, 2, 3, 9)])
    with pytest.raises(ValueError, match="not the rows"):
        open_stream(config(path), 1, "rl").seek(position)
    for nonsense in ({}, {"draw": "x"}, {**position, "draw": math.inf}, {**position, "counts": 3}):
        with pytest.raises(ValueError, match="not a position"):
            open_stream(config(path), 1, "rl").seek(nonsense)


@pytest.mark.parametrize(("changed", "seed"), [({}, 2), ({"shuffle": False}, 1)])
def test_a_place_in_another_order_is_refused(tmp_path, changed, seed):
    """The same number of draws there has rows behind it that were trained, and others before it that never
    would be."""
    path = written(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(5)])
    position = open_stream(config(path), 1, "rl").position
    other = open_stream(config(path, **changed), seed, "rl")
    with pytest.raises(ValueError, match=r"came shuffled with seed 1, and would come .*set seed and data"):
        other.seek(position)
    del position["order"]
    other.seek(position)


def test_what_was_left_out_is_counted_over_a_restart(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": 3}, {"prompt": "c"}])
    stream = open_stream(config(path, on_bad_row="skip", epochs=2), 1, "rl")
    assert len(stream.take(3)) == 3
    stream.drop("too_long")
    again = open_stream(config(path, on_bad_row="skip", epochs=2), 1, "rl")
    again.seek(stream.position)
    assert again.counts == stream.counts
    assert again.counts["too_long"] == 1
    assert len(again.take(9)) == 1
    assert again.counts["bad_row"] == 2


def test_rows_that_no_stage_can_use_end_the_start(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": "a"}] * 3)
    with pytest.raises(BadRow, match=r"a\.jsonl:1: sft needs a response"):
        open_stream(config(path), 1, "sft")
    with pytest.raises(ValueError, match=r"no row can be used, the first because of .*sft needs a response"):
        open_stream(config(path, on_bad_row="skip"), 1, "sft")


def test_a_chat_that_cannot_be_rendered_is_told_with_file_and_line(tmp_path):
    rows = [{"prompt": [{"role": role, "content": "hi"}]} for role in ("user", "bot")]
    with pytest.raises(BadRow, match=r"a\.jsonl:2: prompt: role 'bot': expected one of"):
        open_stream(config(written(tmp_path / "a.jsonl", rows)), 1, "rl")


def test_how_a_file_is_read_is_said_in_one_line(tmp_path, caplog):
    path = written(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with caplog.at_level(logging.INFO):
        open_stream(config(path), 1, "dpo")
    assert caplog.messages == [f"{path}: read as deepspeed (prompt, chosen, rejected), 1 rows"]


def test_a_large_file_is_checked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CACHED_FROM", 10)
    path = written(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(50)])
    open_stream(config(path), 1, "rl")
    read = []
    original = TextTable.__getitem__
    monkeypatch.setattr(TextTable, "__getitem__", lambda self, row: read.append(row) or original(self, row))
    open_stream(config(path), 1, "rl")
    assert len(read) == 16, "only the first rows, which tell the shape"
    path.write_text(path.read_text() + '{"prompt": 7}\n')
    with pytest.raises(BadRow, match=r"a\.jsonl:51: prompt"):
        open_stream(config(path), 1, "rl")
