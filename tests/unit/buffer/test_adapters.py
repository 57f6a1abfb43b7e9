import math
import re

import pytest

from buffer.adapters import ADAPTERS, find
from buffer.examples import BadRow, Example

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "3+3?"}
SYSTEM = {"role": "system", "content": "be short"}
SIX = {"role": "assistant", "content": "6"}

SHAPES = [
    ("prompt", {"prompt": "p", "answer": 4}, "p", (), ()),
    ("prompt", {"prompt": [USER], "metadata": {"a": 1}}, (USER,), (), ()),
    ("text", {"text": "\n\nHuman: a\n\nAssistant: b"}, "\n\nHuman: a\n\nAssistant: ", ("b",), ()),
    ("text", {"text": "\n\nHuman: a\n\nAssistant: "}, "\n\nHuman: a\n\nAssistant: ", (), ()),
    (
        "text",
        {"text": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"},
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ",
        ("d",),
        (),
    ),
    ("query", {"query": "a"}, "\n\nHuman: a\n\nAssistant: ", (), ()),
    ("query", {"query": "\n\nHuman: a\n\nAssistant:"}, "\n\nHuman: a\n\nAssistant:", (), ()),
    ("query", {"query": "Human: a Assistant:"}, "Human: a Assistant:", (), ()),
    ("query", {"query": [USER]}, (USER,), (), ()),
    ("question-answer", {"question": "2+2?", "answer": "2+2=4\n#### 4"}, "2+2?", ("2+2=4\n#### 4",), ()),
    ("question-answer", {"question": "2+2?", "answer": 4}, "2+2?", (), ()),
    ("prompt", {"prompt": "p", "question": "2+2?", "answer": "4"}, "p", (), ()),
    ("query-response", {"query": "q", "response": "r"}, "\n\nHuman: q\n\nAssistant: ", ("r",), ()),
    ("prompt-response", {"prompt": "q", "response": "r"}, "q", ("r",), ()),
    ("query-scores", {"query": "q", "response": ["a", "b"], "score": [0.7, 0.3]},
     "\n\nHuman: q\n\nAssistant: ", ("a", "b"), (0.7, 0.3)),
    ("query-scores", {"query": "\n\nHuman: q\n\nAssistant:", "response": [" a", " b"], "score": [1, 0]},
     "\n\nHuman: q\n\nAssistant:", (" a", " b"), (1.0, 0.0)),
    ("prompt-scores", {"prompt": "q", "response": ["a", "b"], "score": [1, 0]}, "q", ("a", "b"), (1.0, 0.0)),
    ("rejected", {"prompt": "q", "response": "a", "rejected": "b"}, "q", ("a", "b"), (1.0, 0.0)),
    ("query-rejected", {"query": "q", "response": "a", "rejected": "b"},
     "\n\nHuman: q\n\nAssistant: ", ("a", "b"), (1.0, 0.0)),
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
    ("prompt-completion", {"prompt": "q", "completion": "r"}, "q", ("r",), ()),
    ("prompt-completion", {"prompt": [USER], "completion": "r", "label": True}, (USER,), ("r",), ()),
    ("prompt-completion", {"prompt": [USER], "completion": [REPLY]}, (USER,), ("4",), ()),
    ("prompt-completion", {"prompt": "2+2?", "completion": [REPLY, MORE, SIX]},
     (USER, REPLY, MORE), ("6",), ()),
    ("deepspeed", {"prompt": [USER, REPLY], "chosen": [MORE, SIX], "rejected": [MORE, REPLY]},
     (USER, REPLY, MORE), ("6", "4"), (1.0, 0.0)),
    ("deepspeed",
     {"prompt": [MORE], "chosen": [USER, REPLY, MORE, SIX], "rejected": [USER, REPLY, MORE, REPLY]},
     (USER, REPLY, MORE), ("6", "4"), (1.0, 0.0)),
    ("deepspeed", {"prompt": "2+2?", "chosen": [REPLY, MORE, SIX], "rejected": [REPLY, MORE, REPLY]},
     (USER, REPLY, MORE), ("6", "4"), (1.0, 0.0)),
    ("deepspeed", {"prompt": [SYSTEM, USER], "chosen": [USER, REPLY, MORE, SIX],
                   "rejected": [USER, REPLY, MORE, REPLY]},
     (SYSTEM, USER, REPLY, MORE), ("6", "4"), (1.0, 0.0)),
    ("alpaca", {"instruction": "add", "input": "", "output": "4", "text": "all of it"}, "add", ("4",), ()),
    ("alpaca", {"instruction": "add", "input": "2, 2", "output": "4"}, "add\n2, 2", ("4",), ()),
    ("alpaca", {"instruction": "3+3?", "output": "6", "system": "be short", "history": [["2+2?", "4"]]},
     (SYSTEM, USER, REPLY, MORE), ("6",), ()),
    ("sharegpt",
     {"id": "x", "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
     (USER,), ("4",), ()),
    ("sharegpt", {"conversations": [USER, REPLY, MORE, SIX], "system": "be short"},
     (SYSTEM, USER, REPLY, MORE), ("6",), ()),
    ("sharegpt", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"},
                                    {"from": "human", "value": "3+3?"}]}, (USER, REPLY, MORE), (), ()),
]  # fmt: skip

GIVEN = [
    ({"messages": [USER, REPLY, MORE, SIX]}, (1,)),
    ({"messages": [SYSTEM, USER, {**REPLY, "weight": 0}, MORE, SIX]}, ()),
    ({"messages": [REPLY, USER, REPLY, MORE, SIX]}, (2,)),
    ({"conversations": [USER, REPLY, MORE, SIX], "system": "be short"}, (2,)),
    ({"prompt": [USER, REPLY, MORE], "completion": [SIX, USER, REPLY]}, (3,)),
    ({"prompt": [USER, REPLY, MORE], "completion": "6"}, ()),
    ({"instruction": "3+3?", "output": "6", "history": [["2+2?", "4"]]}, (1,)),
    ({"prompt": [USER, REPLY, MORE], "response": "6"}, ()),
]
"""Rows, and the places in their prompt that SFT learns beside the response."""


@pytest.mark.parametrize(("name", "row", "prompt", "responses", "scores"), SHAPES)
def test_a_shape_is_known_by_its_keys(name, row, prompt, responses, scores):
    adapter = find("auto", [row], "data")
    assert adapter.name == name
    found = adapter(row)
    assert found == Example(prompt, responses, scores, row, found.given)


@pytest.mark.parametrize(("row", "places"), GIVEN)
def test_earlier_answers_are_learned_but_for_those_of_the_prompt(row, places):
    assert find("auto", [row], "data")(row).learned == places


def test_a_conversation_that_goes_on_behind_its_last_answer_is_learned_up_to_it():
    row = {"messages": [USER, REPLY, MORE, SIX, USER]}
    found = find("auto", [row], "data")(row)
    assert found.fitted("rl").prompt == (USER, REPLY, MORE, SIX, USER)
    assert found.fitted("sft") == Example((USER, REPLY, MORE), ("6",), (), row, 0)
    unweighted = {"messages": [USER, REPLY, MORE, {**SIX, "weight": 0}]}
    found = find("auto", [unweighted], "data")(unweighted)
    assert found.fitted("rl").prompt == (USER, REPLY, MORE)
    assert found.fitted("sft") == Example((USER,), ("4",), (), unweighted, 0)
    only_read = {"prompt": [USER, REPLY, MORE]}
    with pytest.raises(BadRow, match="sft needs a response"):
        find("auto", [only_read], "data")(only_read).fitted("sft")


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


@pytest.mark.parametrize(
    "beside",
    [
        {"response": "a"},
        {"response": ["a", "b"], "score": [1, 0]},
        {"query": "q", "response": "a"},
        {"completion": "a"},
        {"instruction": "i", "output": "a"},
        {"eval_func": "math_rule", "answer": "4"},
        {"data_source": "hh", "reward_model": {"ground_truth": "4"}},
        {"messages": [USER, REPLY], "conversations": [USER, REPLY]},
    ],
    ids=lambda beside: " ".join(beside),
)
def test_a_pair_of_texts_is_deepspeeds_whatever_stands_beside_it(beside):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", **beside}
    adapter = find("auto", [row] * 3, "data")
    assert adapter.name == "deepspeed"
    assert adapter(row) == Example("p", ("a", "b"), (1.0, 0.0), row)
    without = {**row, "rejected": None}
    assert find("auto", [without, row, row], "data").name == "deepspeed", "some of its rows have no rejected"


def test_chosen_and_rejected_that_are_no_texts_do_not_outrank_what_stands_beside_them():
    ranked = {"prompt": "p", "response": ["a", "b"], "score": [1, 0], "chosen": 0, "rejected": 1}
    with pytest.raises(ValueError, match=r"could be prompt-scores .* or deepspeed"):
        find("auto", [ranked], "data")


HUMAN = "\n\nHuman: a\n\nAssistant:"
LONGER = f"{HUMAN} b\n\nHuman: c\n\nAssistant:"


@pytest.mark.parametrize(
    ("asked", "before", "prompt"),
    [
        (HUMAN, HUMAN, HUMAN),
        (f"{HUMAN} ", HUMAN, f"{HUMAN} "),
        (HUMAN.strip(), HUMAN, HUMAN.strip()),
        ("a", HUMAN, HUMAN),
        (HUMAN, LONGER, LONGER),
        ("\n\nHuman: c\n\nAssistant:", LONGER, LONGER),
        (LONGER, LONGER, LONGER),
        ("Human: a Assistant:", "Human: a Assistant:", "Human: a Assistant:"),
    ],
)
def test_a_conversation_that_answers_repeat_is_the_prompt_alone(asked, before, prompt):
    gap = "" if prompt.endswith(" ") else " "
    pair = {"prompt": asked, "chosen": f"{before} yes", "rejected": f"{before} no"}
    found = ADAPTERS["deepspeed"](pair)
    assert (found.prompt, found.responses) == (prompt, (f"{gap}yes", f"{gap}no"))
    alone = ADAPTERS["deepspeed"]({**pair, "rejected": None})
    assert (alone.prompt, alone.responses) == (prompt, (f"{gap}yes",))
    other = ADAPTERS["rejected"]({"prompt": asked, "response": pair["chosen"], "rejected": pair["rejected"]})
    assert (other.prompt, other.responses) == (prompt, (f"{gap}yes", f"{gap}no"))


def test_answers_that_part_before_their_last_turn_lose_the_prompt_they_repeat():
    row = {"prompt": HUMAN, "chosen": f"{LONGER} yes", "rejected": f"{HUMAN} no"}
    found = find("auto", [row], "data")(row)
    assert (found.prompt, found.responses) == (HUMAN, (LONGER.removeprefix(HUMAN) + " yes", " no"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hi there!", "rejected": "Hi."},
        {"prompt": HUMAN, "chosen": f"{HUMAN} yes", "rejected": " no"},
        {"prompt": "Write a talk", "chosen": f"{HUMAN} yes", "rejected": f"{HUMAN} no"},
    ],
)
def test_answers_that_only_begin_like_the_prompt_stand_as_they_are(row):
    found = find("auto", [row], "data")(row)
    assert (found.prompt, found.responses) == (row["prompt"], (row["chosen"], row["rejected"]))


def nulls(*messages):
    """As parquet gives them where another message calls a tool."""
    return [{"name": None, "tool_calls": None, **message} for message in messages]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": nulls(USER, REPLY)}, (USER,)),
        ({"prompt": nulls(USER), "response": "4"}, (USER,)),
        ({"prompt": nulls(USER), "completion": nulls(REPLY)}, (USER,)),
        ({"prompt": [USER], "chosen": nulls(USER, REPLY), "rejected": [USER, SIX]}, (USER,)),
        ({"chosen": nulls(USER, REPLY), "rejected": [USER, SIX]}, (USER,)),
        ({"conversations": [{**turn, "from": None, "value": None} for turn in (USER, REPLY)]}, (USER,)),
        ({"data_source": "d", "prompt": nulls(USER), "reward_model": {}}, (USER,)),
    ],
    ids=lambda row: " ".join(row) if isinstance(row, dict) else "",
)
def test_keys_that_are_null_are_no_part_of_a_message(row, prompt):
    assert find("auto", [row], "data")(row).prompt == prompt
    with_prompt = {"prompt": nulls(MORE), "chosen": [MORE, REPLY], "rejected": [MORE, SIX]}
    assert ADAPTERS["transcripts"](with_prompt).prompt == (MORE,)


def test_keys_that_are_null_stay_where_no_message_is():
    row = {"prompt": "p", "answer": [{"value": 4, "unit": None}]}
    assert find("auto", [row], "data")(row).row == row


def test_a_function_of_ones_own_may_give_messages_as_they_stand():
    row = {"a": nulls(USER), "b": "r"}
    for function in ("as_fields", "as_example_of_messages"):
        assert find(f"{__name__}:{function}", [row], "data")(row).prompt == (USER,)


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
    assert find("prompt-response", [row], "data")(row).prompt == "a"


def test_a_few_strange_rows_do_not_hide_the_shape_of_the_rest():
    rows = [{"wrong": 1}, *[{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3]
    assert find("auto", rows, "data").name == "deepspeed"
    mixed = [{"query": "q", "response": "r"}, {"prompt": "p", "chosen": "a"}, {"x": 1}, {"y": 1}]
    with pytest.raises(ValueError, match="no known shape"):
        find("auto", mixed, "data")


def test_a_row_that_lacks_what_the_stage_needs_does_not_decide_how_the_others_are_read():
    whole, short = {"prompt": "p", "response": "r"}, {"prompt": "p"}
    rows = [whole, whole, short]
    assert find("auto", rows, "data", "sft").name == "prompt-response"
    assert find("auto", rows, "data", "rl").name == "prompt", "every row has one"
    scored = {**whole, "score": 1.0}
    assert find("auto", [scored, whole], "data", "sft").name == "prompt-response", "both can be used so"
    assert find("auto", [short, short, whole], "data", "sft").name == "prompt", "most rows have none"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "response": ["a", "b"], "score": [1.0]}, "2 responses but 1 scores"),
        ({"query": "q", "response": ["a", "b"], "score": [1.0, "high"]}, "score: expected numbers"),
        ({"query": "q", "response": ["a", "b"], "score": [1.0, math.nan]}, "score: expected a finite number"),
        ({"query": "q", "response": ["a", 3], "score": [1.0, 0.0]}, "response: expected text, got 3"),
        ({"prompt": "q", "chosen": "a", "rejected": 7}, "response: expected text, got 7"),
        ({"prompt": "", "response": "r"}, "prompt: expected text"),
        ({"query": ""}, "prompt: expected text"),
        ({"query": 7}, "prompt: expected text"),
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
        ({"prompt": "p", "completion": 3}, "response: expected text, got 3"),
        ({"prompt": "p", "completion": [{**REPLY, "content": ""}]}, "completion: expected messages that end"),
        ({"prompt": "p", "completion": "c", "label": False}, "label: false, so the completion is not one"),
        ({"conversations": {}}, "conversations: expected a list of turns"),
        ({"conversations": [{"from": "bot", "value": "hi"}]}, "from 'bot': expected one of human, user, gpt"),
        ({"conversations": [{"from": ["human"], "value": "hi"}]}, "from ['human']: expected one of human"),
        ({"conversations": [{"from": "human"}]}, "prompt: content of the user: expected text, got None"),
        ({"instruction": 3, "output": "o"}, "instruction: expected text, got 3"),
        ({"instruction": "i", "input": [], "output": 3}, "response: expected text, got 3"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, "history: expected pairs of instruction"),
    ],
)
def test_a_bad_row_says_which_field_is_wrong(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)):
        find("auto", [row], "data")(row)


def as_fields(row):
    return {"prompt": row["a"], "responses": [row["b"]], "scores": row.get("scores", ())}


def as_the_row_says(row):
    return row


def as_example_of_a_text(row):
    return Example("p", "hello", (), row)  # pyright: ignore[reportArgumentType]


def as_example_of_messages(row):
    return Example(tuple(row["a"]), ("r",), (), row)


def as_conversation(row):
    return {"prompt": [USER, REPLY, MORE], "responses": ["6"], "given": 0}


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


def test_a_text_in_parts_is_joined():
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]
    row = {"messages": [{"role": "user", "content": parts}, REPLY]}
    found = find("auto", [row], "data")(row)
    assert (found.prompt, found.responses) == ((USER,), ("4",))
    assert found.row == {"messages": [USER, REPLY]}
    beside = {"prompt": "p", "shown": row["messages"]}
    assert find("auto", [beside], "data")(beside).row == beside, "what it does not read stays as it is"
    pair = {"prompt": row["messages"][:1], "chosen": "a", "rejected": "b"}
    assert find("auto", [pair], "data")(pair).prompt == (USER,)


def test_only_keys_that_are_there_are_told():
    rows = [{"prompt": "p", "answer": None}, {"prompt": "p", "metadata": {}}]
    assert ADAPTERS["prompt"].told(rows) == "prompt (prompt, metadata)"


def test_an_unknown_adapter_is_told_with_the_known():
    with pytest.raises(
        ValueError, match=r"^adapter 'x': expected auto, prompt, .*, or a function of yours, module:f"
    ):
        find("x", [{"prompt": "p"}], "data")


def test_a_call_of_a_tool_needs_no_text():
    called = [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}]}]
    row = {"prompt": [*called, {"role": "tool", "content": "4"}]}
    assert find("auto", [row], "data")(row).prompt == tuple(row["prompt"])


def test_a_function_of_ones_own_is_an_adapter():
    row = {"a": "p", "b": "r"}
    assert find(f"{__name__}:as_fields", [row], "data")(row) == Example("p", ("r",), (), row)
    assert find(f"{__name__}:as_example", [row], "data")(row) == Example("p", (), (), {"kept": True})
    assert find(f"{__name__}:as_conversation", [row], "data")(row).learned == (1,)
    with pytest.raises(BadRow, match="as_fields raised KeyError: 'b'"):
        find(f"{__name__}:as_fields", [row], "data")({"a": "p"})
    with pytest.raises(BadRow, match="as_fields returned responses or scores that are no list"):
        find(f"{__name__}:as_fields", [row], "data")({"a": "p", "b": "r", "scores": 1.0})
    with pytest.raises(BadRow, match="returned int"):
        find("builtins:len", [row], "data")(row)
    with pytest.raises(ValueError, match="cannot be imported"):
        find("buffer.nothing:here", [row], "data")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"responses": "hello"}, "no list: responses 'hello'"),
        ({"responses": {"good": "a", "bad": "b"}}, "no list: responses {'good': 'a', 'bad': 'b'}"),
        ({"responses": {"hello"}}, "no list: responses {'hello'}"),
        ({"responses": ["a"], "scores": "1"}, "no list: scores '1'"),
        ({"responses": ["a"], "given": "all"}, "given: expected a number of messages, got 'all'"),
        ({"responses": ["a"], "given": -1}, "given: expected a number of messages, got -1"),
    ],
)
def test_what_a_function_of_ones_own_returns_is_not_taken_apart(fields, told):
    """A text would be as many responses as it has letters, and the first of them would be trained."""
    with pytest.raises(BadRow, match=re.escape(told)):
        find(f"{__name__}:as_the_row_says", [{}], "data")({"prompt": "p", **fields})


def test_an_example_of_ones_own_has_a_list_of_responses():
    with pytest.raises(BadRow, match="responses: expected a list of texts, got 'hello'"):
        find(f"{__name__}:as_example_of_a_text", [{}], "data")({})


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


@pytest.mark.parametrize("response", ["", " \n"])
def test_sft_learns_no_empty_answer(response):
    assert Example("p", (response, "b"), (0.0, 1.0), {}).fitted("sft").responses == ("b",)
    assert Example("p", (response, "b"), (1.0, 0.0), {}).fitted("dpo").responses == (response, "b")
    for example in (Example("p", (response,), (), {}), Example("p", (response, "b"), (1.0, 0.0), {})):
        with pytest.raises(BadRow, match="sft needs text in the response, which is empty here"):
            example.fitted("sft")


@pytest.mark.parametrize("weight", ["0", 0.5, "no"])
def test_a_message_is_learned_or_not(weight):
    """A text of 0 would be learned, and half a weight taken for a whole one."""
    find("auto", [{"messages": [USER, REPLY]}], "data")({"messages": [USER, REPLY | {"weight": 0.0}, USER]})
    for messages in ([USER, REPLY | {"weight": weight}, MORE, SIX], [USER, REPLY | {"weight": weight}]):
        row = {"messages": messages}
        with pytest.raises(BadRow, match="weight of a message: expected 0 or 1, got"):
            find("auto", [row], "data")(row)


def test_sft_takes_the_best_response():
    example = Example("p", ("a", "b", "c"), (0.1, 0.7, 0.3), {})
    assert example.fitted("sft") == Example("p", ("b",), (), {})
    assert example.fitted("rl") == Example("p", (), (), {})
    assert example.fitted("reward") is example
    for stage, few in (("sft", ()), ("reward", ("a",)), ("dpo", ("a", "b"))):
        with pytest.raises(BadRow, match=f"{stage} needs"):
            Example("p", few, (), {}).fitted(stage)
