import json

import pytest

from buffer.examples import BadRow, Example
from buffer.experiment import DataConfig
from buffer.stream import open_stream


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
        open_stream(config(path, shuffle=False), 1, "rl").take(9)


def test_a_stage_gets_the_responses_it_trains_on(tmp_path):
    rows = [{"query": "q", "response": ["x", "y"], "score": [0.3, 0.7], "answer": 4}]
    path = written(tmp_path / "a.jsonl", rows)

    def first(stage):
        return open_stream(config(path), 1, stage).take(1)[0]

    assert first("reward") == first("dpo") == Example("q", ("x", "y"), (0.3, 0.7), rows[0])
    assert first("sft") == Example("q", ("y",), (), rows[0])
    assert first("rl") == Example("q", (), (), rows[0])
