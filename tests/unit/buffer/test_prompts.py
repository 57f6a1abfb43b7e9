import json

import pytest

from buffer.experiment import DataConfig, FunctionSource, JsonlSource, ReasoningGymSource
from buffer.prompts import EVAL_SEED, PromptQueue, fingerprint, load_rows, open_prompts


def walk(queue):
    place, rows = (0, 0), []
    while (row := queue.at(*place)) is not None:
        rows.append(row)
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
        return [queue.at(0, p)[1] for p in range(20)]

    assert order(5) == order(5) != order(6)
    # Frozen: a run that is resumed under another numpy must go on in the same order.
    assert order(5) == [8, 1, 6, 13, 15, 5, 11, 17, 7, 4, 0, 3, 9, 14, 12, 10, 18, 19, 2, 16]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: expected an object"),
        ('{"answer": 1}', "rows.jsonl:2: prompt: missing; read as prompt, keys found: `answer`"),
        ('{"prompt": null}', "rows.jsonl:2: prompt: null; read as prompt, keys found: none"),
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


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("json:loads", r"^json:loads raised TypeError: .*'s'.* \(/.*:\d+\)$"),
        ("os:getpid", r"^os:getpid raised TypeError: 'int' object is not iterable \(/.*:\d+\)$"),
    ],
)
def test_a_function_that_raises_is_named_with_what_it_raised(path, told):
    with pytest.raises(ValueError, match=told):
        load_rows(FunctionSource(kind="function", path=path), 1)


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


def files(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "files", "path": str(path)}


def test_prompts_of_every_shape_go_out_as_rows(tmp_path):
    user = {"role": "user", "content": "2+2?"}
    row = {"data_source": "x", "prompt": [user], "reward_model": {"ground_truth": "4"}}
    queue = open_prompts(DataConfig.model_validate({"train": files(tmp_path / "a", [row])}), 1)
    assert queue.rows[0] == {**row, "answer": "4"}
    row = {"query": "2+2?", "eval_func": "f"}
    queue = open_prompts(DataConfig.model_validate({"train": files(tmp_path / "b", [row])}), 1)
    assert queue.rows[0] == {**row, "prompt": "\n\nHuman: 2+2?\n\nAssistant: "}


def read_question(row):
    return {"prompt": row["question"]}


def asked():
    return [{"question": "2+2?"}]


@pytest.mark.parametrize("kind", ["jsonl", "files", "function"])
def test_an_adapter_reads_the_rows_of_every_kind_of_source(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2+2?"}\n')
    source = {"kind": kind, "path": f"{__name__}:asked" if kind == "function" else str(path)}
    source["adapter"] = f"{__name__}:read_question"
    queue = open_prompts(DataConfig.model_validate({"train": source}), 1)
    assert queue.rows[0] == {"question": "2+2?", "prompt": "2+2?"}


def test_a_blend_never_gives_a_prompt_the_same_id_twice(tmp_path):
    parts = [
        {"source": files(tmp_path / "a", [{"prompt": f"a{i}"} for i in range(12)]), "weight": 1},
        {"source": files(tmp_path / "b", [{"prompt": f"b{i}"} for i in range(3)]), "weight": 3},
    ]
    data = DataConfig.model_validate({"train": {"kind": "blend", "parts": parts}, "epochs": 4})
    queue = open_prompts(data, 1)
    taken = walk(queue)
    assert len(set(taken)) == len(taken) == 4 * 15
    prompts = [queue.rows[row]["prompt"] for _, row in taken]
    assert sum(p[0] == "a" for p in prompts) == 15
    assert prompts == [queue.rows[row]["prompt"] for _, row in walk(open_prompts(data, 1))]


def test_the_fingerprint_follows_rows_reading_split_and_weights(tmp_path):
    def of(**keys):
        return fingerprint(open_prompts(DataConfig.model_validate(keys), 1).rows)

    train = files(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "text": "\n\nAssistant: "} for i in range(20)])
    part = {"source": train, "weight": 1}
    different = [
        of(train=train),
        of(train=train, split="1,1,1"),
        of(train=train, split="1,1,2"),
        of(train={**train, "adapter": "text"}),
        of(train={"kind": "blend", "parts": [part, part]}),
        of(train={"kind": "blend", "parts": [part, {**part, "weight": 2}]}),
    ]
    assert len(set(different)) == len(different)
    assert of(train=train, epochs=3) == different[0]
    files(tmp_path / "a.jsonl", [{"prompt": f"q{i}", "text": "\n\nAssistant: "} for i in range(20)])
    assert of(train=train) != different[0]
