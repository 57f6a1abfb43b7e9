import json

import pytest

from buffer.experiment import FunctionSource, JsonlSource, ReasoningGymSource
from buffer.prompts import EVAL_SEED, PromptQueue, load_rows


def walk(queue):
    place, rows = (0, 0), []
    while (row := queue.at(*place)) is not None:
        rows.append((place[0], row))
        place = queue.after(*place)
    return rows


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_every_row_once(shuffle):
    rows = walk(PromptQueue([{}] * 50, seed=3, epochs=2, shuffle=shuffle))
    epochs = [[r for e, r in rows if e == epoch] for epoch in (0, 1)]
    assert [sorted(e) for e in epochs] == [list(range(50))] * 2
    assert (epochs[0] == epochs[1]) is not shuffle


def test_the_order_is_the_seeds_and_the_same_after_a_restart():
    def order(seed):
        queue = PromptQueue([{}] * 20, seed, 1, True)
        return [queue.at(0, p) for p in range(20)]

    assert order(5) == order(5) != order(6)
    # Frozen: a run that is resumed under another numpy must go on in the same order.
    assert order(5) == [8, 1, 6, 13, 15, 5, 11, 17, 7, 4, 0, 3, 9, 14, 12, 10, 18, 19, 2, 16]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: expected an object"),
        ('{"answer": 1}', "rows.jsonl:2: prompt: expected text"),
        ('{"prompt": ""}', "rows.jsonl:2: prompt"),
        ('{"prompt": [{"role": "user"}]}', "rows.jsonl:2: prompt: expected chat messages"),
        ('{"prompt": "p", "metadata": 3}', "rows.jsonl:2: metadata"),
    ],
)
def test_a_bad_row_is_told_by_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=complaint):
        load_rows(JsonlSource(kind="jsonl", path=str(path)), 1)


def test_a_missing_or_empty_file_is_told(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_rows(JsonlSource(kind="jsonl", path=str(tmp_path / "none")), 1)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        load_rows(JsonlSource(kind="jsonl", path=str(tmp_path / "empty")), 1)


def test_rows_from_a_function():
    source = FunctionSource(kind="function", path="json:loads", args={"s": '[{"prompt": "p", "answer": 3}]'})
    assert load_rows(source, 1) == [{"prompt": "p", "answer": 3}]
    with pytest.raises(ValueError, match="json:nothing"):
        load_rows(FunctionSource(kind="function", path="json:nothing"), 1)


def test_reasoning_gym_rows_carry_what_the_verifier_needs():
    import reasoning_gym

    source = ReasoningGymSource(kind="reasoning_gym", dataset="basic_arithmetic", size=5)
    rows = load_rows(source, 7)
    assert rows == load_rows(source, 7) != load_rows(source, 7 + EVAL_SEED)
    row = json.loads(json.dumps(rows[0]))
    score = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
    assert score(row["answer"], entry) == 1.0
    assert score("wrong", entry) < 1.0


def test_an_unknown_reasoning_gym_dataset_is_told():
    with pytest.raises(ValueError, match="nonesuch"):
        load_rows(ReasoningGymSource(kind="reasoning_gym", dataset="nonesuch"), 1)
