"""What an example looks like in token ids, and what happens to one that is too long."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from buffer.adapters import find
from buffer.examples import Example
from buffer.experiment import DataConfig
from buffer.prompts import open_prompts
from buffer.rendering import PromptRefused, Renderer
from buffer.stream import open_stream
from learner.offline.encoding import Encoder

VOCABULARY = {"<end>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, " ": 5, "<turn>": 6, "?": 7}
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)
AB, A, B, C, END, TURN = 3, 1, 2, 4, 0, 6


@pytest.fixture
def tokenizer():
    """Merges `a` and `b` into one token where they meet, as any BPE does; padding is the end mark."""
    pieces = Tokenizer(models.BPE(VOCABULARY, [("a", "b")], unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")  # type: ignore[assignment]
    pieces.add_special_tokens(["<end>", "<turn>"])
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", pad_token="<end>")


def encoder(tokenizer, max_length=16, too_long="drop"):
    return Encoder(tokenizer, max_length, None, too_long)


def example(prompt, *responses, scores=()):
    return Example(prompt, responses, scores, {})


def ids(encoded):
    return encoded.prompt.tolist(), [r.tolist() for r in encoded.responses]


def test_the_boundary_is_where_the_prompt_ends(tokenizer):
    assert tokenizer.encode("ab") == [AB]
    assert ids(encoder(tokenizer).encode(example("a", "b"))) == ([A], [[B, END]])


def test_every_response_ends_with_one_end_mark_also_where_padding_is_the_same_token(tokenizer):
    found = encoder(tokenizer).encode(example("a", "c", "", "c<end>", scores=(2.0, 1.0, 0.0)))
    assert ids(found) == ([A], [[C, END], [END], [C, END]])


def test_a_chat_is_rendered_as_rollout_servers_render_it(tokenizer):
    tokenizer.chat_template = TEMPLATE
    chat = ({"role": "user", "content": "a"},)
    assert ids(encoder(tokenizer).encode(example(chat, "b"))) == ([TURN, A, TURN], [[B, END]])
    assert ids(encoder(tokenizer).encode(example("a", "b"))) == ([TURN, A, TURN], [[B, END]])


TRANSCRIPT = "\n\nHuman: ab c\n\nAssistant: "


@pytest.mark.parametrize(
    ("template", "prompt"), [(TEMPLATE, "<turn>ab c<turn>"), (None, TRANSCRIPT)], ids=["template", "none"]
)
@pytest.mark.parametrize(
    "row", [{"query": "ab c"}, {"query": TRANSCRIPT}, {"prompt": TRANSCRIPT}], ids=["query", "rm", "text"]
)
def test_every_stage_makes_the_same_prompt_of_a_row(tokenizer, tmp_path, row, template, prompt):
    tokenizer.chat_template = template
    path = tmp_path / "rows.jsonl"
    expected = tokenizer.encode(prompt)

    def data(**more):
        path.write_text(json.dumps({**row, **more}) + "\n")
        return DataConfig.model_validate({"train": {"kind": "files", "path": str(path)}})

    def offline(stage, **more):
        found = open_stream(data(**more), 1, stage).take(1)[0]
        return encoder(tokenizer, max_length=64).encode(found).prompt.tolist()

    answered = {"response": ["b", "c"], "score": [1, 0]}
    assert offline("sft", response="b") == offline("sft", **answered) == expected
    assert offline("reward", **answered) == offline("dpo", **answered) == expected
    for more in ({}, {"response": "b"}, answered):
        assert Renderer(tokenizer, 64).render(open_prompts(data(**more), 1).rows[0], 8) == expected


HH = {"chosen": f"{TRANSCRIPT}b ", "rejected": f"{TRANSCRIPT}c"}
DEEPSPEED = {"prompt": "Human: ab c Assistant:", "chosen": " b ", "rejected": " c"}


@pytest.mark.parametrize("row", [HH, DEEPSPEED], ids=["transcripts", "deepspeed"])
def test_a_written_answer_is_stripped_behind_a_template_alone(tokenizer, row):
    found = find("auto", [row], "data")(row)
    space = VOCABULARY[" "]
    raw = [[space, B, space, END], [space, C, END]]
    assert ids(encoder(tokenizer, 64).encode(found)) == (tokenizer.encode(found.prompt), raw)
    tokenizer.chat_template = TEMPLATE
    prompt = tokenizer.encode("<turn>ab c<turn>")
    assert ids(encoder(tokenizer, 64).encode(found)) == (prompt, [[B, END], [C, END]])


@pytest.mark.parametrize("prompt", ["a", ({"role": "user", "content": "a"},)], ids=["text", "messages"])
def test_any_other_answer_stays_as_it_is(tokenizer, prompt):
    tokenizer.chat_template = TEMPLATE
    assert ids(encoder(tokenizer).encode(example(prompt, " b"))) == (
        [TURN, A, TURN],
        [[VOCABULARY[" "], B, END]],
    )


def test_a_response_that_does_not_fit_is_left_out_and_an_example_without_enough_refused(tokenizer):
    small = encoder(tokenizer, max_length=4)
    found = small.encode(example("ac", "c", "ccc", "", scores=(0.7, 1.0, 0.3)))
    assert ids(found) == ([A, C], [[C, END], [END]])
    assert found.scores == (0.7, 0.3)
    assert not found.cut
    with pytest.raises(PromptRefused, match=r"too_long: 5 tokens, model\.max_length=4"):
        small.encode(example("ac", "cc"))
    with pytest.raises(PromptRefused, match="too_long"):
        small.encode(example("ac", "ccc", "c", scores=(1.0, 0.0)))


@pytest.mark.parametrize(
    ("prompt", "response", "kept"),
    [
        ("aac", "cc", ([A, A, C], [[C, C, END]])),
        ("aaaaac", "cc", ([A, A, C], [[C, C, END]])),
        ("aac", "cccccc", ([A, A, C], [[C, C, C]])),
        ("aaaaac", "cccccc", ([A, A, C], [[C, C, C]])),
    ],
)
def test_cutting_takes_the_prompts_beginning_and_the_responses_end_mark(tokenizer, prompt, response, kept):
    found = encoder(tokenizer, max_length=6, too_long="cut").encode(example(prompt, response))
    assert ids(found) == kept
    assert found.cut == (len(prompt) + len(response) + 1 > 6)


def test_a_prompt_that_cannot_be_rendered_is_refused(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(PromptRefused, match="bad_row: the chat template refuses it: no users here"):
        encoder(tokenizer).encode(example(({"role": "user", "content": "a"},), "b"))


def test_a_chat_row_is_refused_where_the_tokenizer_has_no_template_and_told_from_one_of_text(tokenizer):
    chat, of_text = example(({"role": "user", "content": "a"},), "b"), example("a", "b")
    with pytest.raises(PromptRefused, match="bad_row: chat messages, and the tokenizer has no chat template"):
        encoder(tokenizer).encode(chat)
    assert not encoder(tokenizer).renders(chat)
    assert encoder(tokenizer).renders(of_text)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert encoder(tokenizer).renders(chat)


@pytest.mark.parametrize("row", [example("c", "a"), example("a", "a", "c", scores=(1, 0))])
def test_a_token_that_the_model_lacks_is_told_and_not_trained(tokenizer, row):
    known = Encoder(tokenizer, 16, None, "drop", vocabulary=5)
    assert ids(known.encode(row)) == ids(encoder(tokenizer).encode(row))
    lacking = Encoder(tokenizer, 16, None, "drop", vocabulary=4)
    assert ids(lacking.encode(example("a", "b"))) == ([A], [[B, END]])
    with pytest.raises(ValueError, match=r"makes token 4 \('c'\) of a row, and .* the model has 4; expected"):
        lacking.encode(row)


def test_a_tokenizer_without_an_end_mark_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        encoder(tokenizer)
