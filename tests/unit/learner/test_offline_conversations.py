"""Which tokens of a conversation SFT learns, token by token against what the chat template itself says."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from buffer.adapters import find
from buffer.examples import Example
from buffer.experiment import FilesSource
from buffer.rendering import PromptRefused
from buffer.stream import open_sources
from learner.offline import service
from learner.offline.config import OfflineExperiment, SftConfig
from learner.offline.encoding import Encoder
from learner.offline.packing import pack
from learner.offline.stages import make_stage

SMOLLM = Path(".cache/models/SmolLM2-135M-Instruct")
SAID = [
    ("system", "Be short."),
    ("user", "What is 2+2?"),
    ("assistant", "It is 4."),
    ("user", "And 3+3?"),
    ("assistant", "That is 6."),
    ("tool", "a sum: 12"),
    ("user", "Of both?"),
    ("assistant", "12"),
]
MESSAGES = [{"role": role, "content": content} for role, content in SAID]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
CALLS = CHATML.replace("m['content'] + '<|im_end|>' }}{% endgen", "called(m) + '<|im_end|>' }}{% endgen")
CALLS = (
    "{% macro called(m) %}{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}<call>{{ c['name'] }}"
    "</call>{% endfor %}{% endmacro %}" + CALLS
)
THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes thoughts into the answers behind the last question alone, as Qwen3's does."""


def letters(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|bos|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


def real() -> PreTrainedTokenizerFast:
    if not SMOLLM.exists():
        pytest.skip("python -m launch.demo_model has not run")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM)
    tokenizer.chat_template = CHATML
    return tokenizer


TOKENIZERS = {"chatml": lambda: letters(CHATML), "llama": lambda: letters(LLAMA), "smollm2": real}


def read(messages, key="messages") -> Example:
    row = {key: messages}
    return find("auto", [row], "data")(row).fitted("sft")


def encoded(tokenizer, example, **how):
    made = {"max_length": 4096, "system_prompt": None, "too_long": "drop", "every_turn": True, **how}
    return Encoder(tokenizer, **made).encode(example)


def tokens_and_mask(found):
    """All token ids, and of each whether it is learned."""
    (response,), (targets,) = found.responses, found.targets
    mask = np.zeros(len(response), bool)
    mask[targets] = True
    return [*found.prompt, *response], [*[False] * len(found.prompt), *mask.tolist()]


def rendered_by_steps(tokenizer, messages):
    """What the template adds with each message; of an answer what it adds behind its opening."""

    def text(count, opens=False):
        if not count:
            return ""
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=opens)

    ids, mask = [], []

    def add(piece, learns):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False))
        mask.extend([learns] * (len(ids) - len(mask)))

    for n, message in enumerate(messages):
        before, after = text(n), text(n + 1)
        if message["role"] == "assistant":
            opened = text(n, opens=True)
            answer, end, rest = after.removeprefix(opened).partition(tokenizer.eos_token)
            assert after == opened + answer + end + rest
            add(opened.removeprefix(before), False)
            add(answer + end, True)
            add(rest, False)
        else:
            add(after.removeprefix(before), False)
    return ids, mask


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_answer_and_its_end_mark_are_learned_and_nothing_else(name):
    tokenizer = TOKENIZERS[name]()
    ids, mask = tokens_and_mask(encoded(tokenizer, read(MESSAGES)))
    whole = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    behind = len(whole["input_ids"]) - len(ids)
    assert tokenizer.decode(whole["input_ids"][len(ids) :]).strip() == ""
    assert ids == whole["input_ids"][: len(ids)]
    assert [int(m) for m in mask] + [0] * behind == whole["assistant_masks"]
    stepwise, stepwise_mask = rendered_by_steps(tokenizer, MESSAGES)
    assert (ids, mask) == (stepwise[: len(ids)], stepwise_mask[: len(ids)])
    assert sum(stepwise_mask) == sum(mask) == encoded(tokenizer, read(MESSAGES)).trained


def learned(tokenizer, found):
    """The learned tokens as text, a piece for each answer."""
    ids, mask = tokens_and_mask(found)
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).split("<|im_end|>")[:-1]


def test_the_last_answer_alone_is_learned_where_the_stage_says_so():
    tokenizer = letters(CHATML)
    last = encoded(tokenizer, read(MESSAGES), every_turn=False)
    assert learned(tokenizer, last) == ["12"]
    every = encoded(tokenizer, read(MESSAGES))
    assert tokens_and_mask(every)[0] == tokens_and_mask(last)[0]


@pytest.mark.parametrize(
    ("stage", "answers"),
    [
        ({"kind": "sft"}, ["It is 4.", "That is 6.", "12"]),
        ({"kind": "sft", "turns": "last"}, ["12"]),
        ({"kind": "dpo"}, ["12"]),
    ],
)
def test_a_stage_learns_the_answers_that_its_section_says(stage, answers, tmp_path):
    tokenizer = letters(CHATML)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    settings = {
        "name": "talks",
        "run_dir": str(tmp_path),
        "model": {"path": str(tmp_path)},
        "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}, "epochs": 1},
        "stage": stage,
    }
    made = service.encoder_of(OfflineExperiment.model_validate(settings))
    assert learned(tokenizer, made.encode(read(MESSAGES))) == answers


def test_what_the_row_marks_as_given_is_read_and_not_learned():
    tokenizer = letters(CHATML)
    unweighted = [*MESSAGES[:4], {**MESSAGES[4], "weight": 0}, *MESSAGES[5:]]
    found = encoded(tokenizer, read(unweighted))
    assert learned(tokenizer, found) == ["It is 4.", "12"]
    assert tokens_and_mask(found)[0] == tokens_and_mask(encoded(tokenizer, read(MESSAGES)))[0]
    row = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    found = encoded(tokenizer, find("auto", [row], "data")(row).fitted("sft"))
    assert learned(tokenizer, found) == ["That is 6.", "12"]


def test_a_system_prompt_of_the_stage_goes_before_the_first_message():
    tokenizer = letters(CHATML)
    with_own = encoded(tokenizer, read(MESSAGES))
    without = encoded(tokenizer, read(MESSAGES[1:]), system_prompt="Be short.")
    assert tokens_and_mask(with_own) == tokens_and_mask(without)


def test_a_call_of_a_tool_is_learned_as_the_template_writes_it():
    tokenizer = letters(CALLS)
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [MESSAGES[1], calling, {"role": "tool", "content": "4"}, *MESSAGES[2:5]]
    found = encoded(tokenizer, read(messages))
    assert learned(tokenizer, found) == ["<call>add</call>", "It is 4.", "That is 6."]
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = tokens_and_mask(found)
    assert ids == whole["input_ids"][: len(ids)]
    assert [int(m) for m in mask] == whole["assistant_masks"][: len(ids)]


def test_a_conversation_out_of_parquet_is_no_call_because_another_one_is(tmp_path):
    # As Llama 3's template, which takes what has the key for a call.
    tokenizer = letters(
        CALLS.replace("m['tool_calls'] or []", "(m['tool_calls'] if 'tool_calls' in m else [])")
    )
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    calls = [MESSAGES[1], calling, {"role": "tool", "content": "4"}, MESSAGES[2]]
    rows = [{"messages": MESSAGES[:5]}, {"messages": calls}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = FilesSource(kind="files", path=str(tmp_path / "a.parquet"))
    (opened,), _ = open_sources(source, 1, "sft", None)
    assert "tool_calls" in opened.table[0]["messages"][0], "parquet gives it to every message"
    for place, row in enumerate(rows):
        found = encoded(tokenizer, opened.example(place))
        assert tokens_and_mask(found) == tokens_and_mask(encoded(tokenizer, read(row["messages"])))


def test_a_template_that_rewrites_earlier_answers_has_none_of_its_additions_learned():
    tokenizer = letters(THINKS)
    found = encoded(tokenizer, read(MESSAGES))
    assert learned(tokenizer, found) == ["It is 4.", "That is 6.", "12"]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False).replace("<think>\n\n</think>\n\n", "")
    assert tokenizer.decode(tokens_and_mask(found)[0]) == text.removesuffix("\n")


def test_a_template_that_ends_no_answer_with_the_end_mark_refuses_the_row():
    tokenizer = letters(CHATML.replace("'<|im_end|>' }}{% endgeneration", "'' }}{% endgeneration"))
    with pytest.raises(PromptRefused, match="cannot go on behind an answer with its end mark"):
        encoded(tokenizer, read(MESSAGES))


def test_a_conversation_that_is_too_long_loses_its_end_or_is_left_out():
    tokenizer = letters(CHATML)
    whole = encoded(tokenizer, read(MESSAGES[1:5]))
    ids, mask = tokens_and_mask(whole)
    assert tokens_and_mask(encoded(tokenizer, read(MESSAGES[1:5]), max_length=len(ids))) == (ids, mask)
    with pytest.raises(PromptRefused, match=f"too_long: {len(ids)} tokens"):
        encoded(tokenizer, read(MESSAGES[1:5]), max_length=len(ids) - 1)
    short = len(ids) - 4
    found = encoded(tokenizer, read(MESSAGES[1:5]), max_length=short, too_long="cut")
    assert found.cut
    assert tokens_and_mask(found) == (ids[:short], mask[:short])


def test_the_learned_tokens_are_the_targets_and_what_the_loss_is_averaged_over():
    tokenizer = letters(CHATML)
    found = encoded(tokenizer, read(MESSAGES))
    ids, mask = tokens_and_mask(found)
    (batch,) = pack([found], 4096)
    wanted = np.flatnonzero(mask)
    assert batch.token_ids[0].tolist() == ids
    assert batch.target_ids.tolist() == np.array(ids)[wanted].tolist()
    assert batch.target_positions.tolist() == (wanted - 1).tolist()
    assert make_stage(SftConfig(kind="sft")).size(found) == len(wanted)
