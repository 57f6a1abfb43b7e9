import math
import re

import pytest

from buffer.adapters import ADAPTERS, find
from buffer.examples import BadRow, Example

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}

SHAPES = [
    ("prompt", {"prompt": "p", "answer": 4}, "p", (), ()),
    ("prompt", {"prompt": [USER], "metadata": {"a": 1}}, (USER,), (), ()),
    ("text", {"text": "\n\nHuman: a\n\nAssistant: b"}, "\n\nHuman: a\n\nAssistant: ", (), ()),
    (
        "text",
        {"text": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"},
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ",
        (),
        (),
    ),
    ("query", {"query": "a"}, "\n\nHuman: a\n\nAssistant: ", (), ()),
    ("query-response", {"query": "q", "response": "r"}, "q", ("r",), ()),
    ("prompt-response", {"prompt": "q", "response": "r"}, "q", ("r",), ()),
    ("query-scores", {"query": "q", "response": ["a", "b"], "score": [0.7, 0.3]},
     "q", ("a", "b"), (0.7, 0.3)),
    ("prompt-scores", {"prompt": "q", "response": ["a", "b"], "score": [1, 0]}, "q", ("a", "b"), (1.0, 0.0)),
    ("rejected", {"prompt": "q", "response": "a", "rejected": "b"}, "q", ("a", "b"), (1.0, 0.0)),
    ("math", {"eval_func": "math_rule", "prompt": "q", "answer": "#### 4"}, "q", (), ()),
    ("deepspeed", {"prompt": "Human: q Assistant:", "chosen": "a", "rejected": "b"},
     "Human: q Assistant:", ("a", "b"), (1.0, 0.0)),
    ("deepspeed", {"prompt": "q", "chosen": "a", "rejected": None}, "q", ("a",), (1.0,)),
    ("deepspeed", {"prompt": "q", "chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "5"}]},
     (USER,), ("4", "5"), (1.0, 0.0)),
    ("deepspeed", {"prompt": [USER], "chosen": [REPLY], "rejected": [{**REPLY, "content": "5"}]},
     (USER,), ("4", "5"), (1.0, 0.0)),
    ("transcripts", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
     "\n\nHuman: a\n\nAssistant:", (" b", " c"), (1.0, 0.0)),
    ("messages", {"type": "chatml", "messages": [USER, REPLY], "source": "unknown"}, (USER,), ("4",), ()),
    ("messages", {"messages": [USER]}, (USER,), (), ()),
    ("messages", {"prompt": "2+2?", "messages": [USER, REPLY]}, (USER,), ("4",), ()),
    ("deepspeed", {"prompt": "p", "chosen": "a", "rejected": "b", "messages": [USER]},
     "p", ("a", "b"), (1.0, 0.0)),
    ("prompt", {"prompt": "p", "text": "t"}, "p", (), ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "prompt", "responses", "scores"), SHAPES)
def test_a_shape_is_known_by_its_keys(name, row, prompt, responses, scores):
    adapter = find("auto", [row], "data")
    assert adapter.name == name
    assert adapter(row) == Example(prompt, responses, scores, row)


def test_every_adapter_is_tried():
    assert {name for name, *_ in SHAPES} | {"verl", "document"} == set(ADAPTERS)


def test_verl_rows_bring_their_answer():
    row = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    adapter = find("auto", [row], "data")
    assert adapter.name == "verl"
    assert adapter(row) == Example((USER,), (), (), {**row, "answer": "4"})


def test_a_shape_no_adapter_knows_is_told_with_its_keys():
    with pytest.raises(
        ValueError, match=r"^a\.json: rows of no known shape; keys found: `inp`, `out`; .*deepspeed"
    ):
        find("auto", [{"inp": 1, "out": 2}], "a.json")


def test_a_shape_two_adapters_know_is_told():
    row = {"prompt": "a", "query": "b", "response": "c"}
    with pytest.raises(
        ValueError, match=r"could be query-response .* or prompt-response .*keys found"
    ) as told:
        find("auto", [row], "data")
    assert "\n" not in str(told.value)
    assert find("query-response", [row], "data")(row).prompt == "b"


def test_a_few_strange_rows_do_not_hide_the_shape_of_the_rest():
    rows = [{"wrong": 1}, *[{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3]
    assert find("auto", rows, "data").name == "deepspeed"
    mixed = [{"query": "q", "response": "r"}, {"prompt": "p", "chosen": "a"}, {"x": 1}, {"y": 1}]
    with pytest.raises(ValueError, match="no known shape"):
        find("auto", mixed, "data")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "response": ["a", "b"], "score": [1.0]}, "2 responses but 1 scores"),
        ({"query": "q", "response": ["a", "b"], "score": [1.0, "high"]}, "score: expected numbers"),
        ({"query": "q", "response": ["a", "b"], "score": [1.0, math.nan]}, "score: expected a finite number"),
        ({"query": "q", "response": ["a", 3], "score": [1.0, 0.0]}, "response: expected text, got 3"),
        ({"prompt": "q", "chosen": "a", "rejected": 7}, "response: expected text, got 7"),
        ({"prompt": "", "response": "r"}, "prompt: expected text"),
        ({"prompt": [{"role": "user"}]}, "prompt: expected chat messages"),
        ({"text": "no mark"}, "text: expected text with"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [REPLY]}, "prompt: expected text or a list"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages: expected messages that end",
        ),
        ({"chosen": "a\n\nAssistant: b", "rejected": "x\n\nAssistant: c"}, "expected the same text up to"),
        ({"prompt": "p", "metadata": 3}, "metadata: expected an object"),
    ],
)
def test_a_bad_row_says_which_field_is_wrong(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)):
        find("auto", [row], "data")(row)


def as_fields(row):
    return {"prompt": row["a"], "responses": [row["b"]]}


def as_example(row):
    return Example(row["a"], (), (), {"kept": True})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "human", "content": "hi"},
            "prompt: role 'human': expected one of system, user, assistant, tool",
        ),
        ({"role": None, "content": "hi"}, "prompt: role None: expected one of system"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"prompt: content of the user: expected text \(parts such as images cannot be trained on\), got",
        ),
        ({"role": "user", "content": None}, "prompt: content of the user: expected text, got None"),
        ({"role": "assistant", "content": None}, "prompt: content of the assistant: expected text, got None"),
        ({"role": "user", "content": 7}, "prompt: content of the user: expected text, got 7"),
    ],
)
@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_chat_message_has_a_known_role_and_a_text(message, reason, key):
    row = {key: [USER, message, USER]}
    with pytest.raises(BadRow, match=f"^{reason}"):
        find("auto", [row], "data")(row)


def test_a_call_of_a_tool_needs_no_text():
    called = [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}]}]
    row = {"prompt": [*called, {"role": "tool", "content": "4"}]}
    assert find("auto", [row], "data")(row).prompt == tuple(row["prompt"])


def test_a_function_of_ones_own_is_an_adapter():
    row = {"a": "p", "b": "r"}
    assert find(f"{__name__}:as_fields", [row], "data")(row) == Example("p", ("r",), (), row)
    assert find(f"{__name__}:as_example", [row], "data")(row) == Example("p", (), (), {"kept": True})
    with pytest.raises(BadRow, match="as_fields raised KeyError: 'b'"):
        find(f"{__name__}:as_fields", [row], "data")({"a": "p"})
    with pytest.raises(BadRow, match="returned int"):
        find("builtins:len", [row], "data")(row)
    with pytest.raises(ValueError, match="cannot be imported"):
        find("buffer.nothing:here", [row], "data")
    with pytest.raises(ValueError, match="expected auto, module:function or one of prompt, text"):
        find("nothing", [row], "data")


def test_a_document_is_taken_whole_and_only_by_name():
    row = {"text": "\n\nHuman: a\n\nAssistant: b", "url": "x"}
    assert find("document", [row], "data")(row) == Example(row["text"], (), (), row)
    assert find("auto", [row], "data").name == "text"
    with pytest.raises(BadRow, match="prompt: expected text"):
        find("document", [row], "data")({"text": ""})


def test_pretraining_takes_a_text_and_nothing_else():
    example = Example("a text", (), (), {})
    assert example.fitted("pretraining") is example
    for other in (Example("p", ("r",), (), {}), Example((USER,), (), (), {})):
        with pytest.raises(BadRow, match="pretraining needs a text and nothing else"):
            other.fitted("pretraining")


def test_sft_takes_the_best_response():
    example = Example("p", ("a", "b", "c"), (0.1, 0.7, 0.3), {})
    assert example.fitted("sft") == Example("p", ("b",), (), {})
    assert example.fitted("rl") == Example("p", (), (), {})
    assert example.fitted("reward") is example
    for stage, few in (("sft", ()), ("reward", ("a",)), ("dpo", ("a", "b"))):
        with pytest.raises(BadRow, match=f"{stage} needs"):
            Example("p", few, (), {}).fitted(stage)
