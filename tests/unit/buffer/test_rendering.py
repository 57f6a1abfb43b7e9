import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from buffer.rendering import PromptRefused, Renderer

WORDS = ["<unk>", "<s>", "user", "system", "assistant", ":", "hello", "world", "be", "kind"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] }} : {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=TEMPLATE)


def words(ids):
    return " ".join(WORDS[i] for i in ids)


def test_a_text_is_one_user_message(tokenizer):
    ids = Renderer(tokenizer, 64).render({"prompt": "hello world"}, 8)
    assert words(ids) == "user : hello world assistant :"


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: hello\n\nAssistant:", [("user", "hello")]),
        ("\n\nHuman: hello\n\nAssistant: ", [("user", "hello")]),
        (
            "\n\nHuman: hello\n\nAssistant: be kind\n\nHuman: world\n\nAssistant:",
            [("user", "hello"), ("assistant", "be kind"), ("user", "world")],
        ),
        ("Human: hello Assistant:", [("user", "hello")]),
        (" Human: hello\nAssistant: ", [("user", "hello")]),
        ("\n\nHuman: hello Assistant:", [("user", "hello")]),
        (
            "Human: hello\n\nAssistant: be kind\n\nHuman: world Assistant:",
            [("user", "hello"), ("assistant", "be kind"), ("user", "world")],
        ),
        (
            "Human: be kind to the Human: and to Assistant: world Assistant:",
            [("user", "be kind to the Human: and to Assistant: world")],
        ),
    ],
)
def test_a_conversation_that_is_written_as_one_text_is_its_turns(tokenizer, text, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    renderer = Renderer(tokenizer, 64, "be kind")
    assert renderer.encode(text) == renderer.encode(messages)


@pytest.mark.parametrize(
    "text",
    [
        "hello\n\nAssistant:",
        "\n\nHuman: hello",
        "be kind\n\nHuman: hello\n\nAssistant:",
        "\n\nHuman: hello\n\nHuman: world\n\nAssistant:",
        "\n\nHuman: hello\n\nAssistant: world",
        "\n\nHuman: \n\nAssistant:",
        "be kind Human: hello Assistant:",
        "Human: hello Assistant: world",
        "Human: helloAssistant:",
        "Human: Assistant:",
    ],
)
def test_any_other_text_stays_one_user_message(tokenizer, text):
    renderer = Renderer(tokenizer, 64)
    assert renderer.encode(text) == renderer.encode([{"role": "user", "content": text}])


def test_the_system_prompt_goes_first_unless_the_row_has_one(tokenizer):
    renderer = Renderer(tokenizer, 64, "be kind")
    own = [{"role": "system", "content": "hello"}, {"role": "user", "content": "world"}]
    assert words(renderer.render({"prompt": "hello"}, 8)) == "system : be kind user : hello assistant :"
    assert words(renderer.render({"prompt": own}, 8)) == "system : hello user : world assistant :"


def test_without_a_template_the_text_is_encoded_as_it_stands(tokenizer):
    tokenizer.chat_template = None
    assert words(Renderer(tokenizer, 64).render({"prompt": "hello world"}, 8)) == "hello world"
    with pytest.raises(PromptRefused, match="bad_row"):
        Renderer(tokenizer, 64).render({"prompt": [{"role": "user", "content": "hello"}]}, 8)


def test_a_prompt_must_leave_room_for_all_new_tokens(tokenizer):
    renderer = Renderer(tokenizer, 10)
    assert len(renderer.render({"prompt": "hello world"}, 4)) == 6
    with pytest.raises(PromptRefused) as refused:
        renderer.render({"prompt": "hello world"}, 5)
    assert refused.value.rule == "too_long"


@pytest.mark.parametrize(
    "row", [{}, {"prompt": 7}, {"prompt": ["hello"]}, {"prompt": [{"role": "tool", "content": "x"}]}]
)
def test_a_row_that_cannot_be_rendered_is_refused_by_name(tokenizer, row):
    with pytest.raises(PromptRefused) as refused:
        Renderer(tokenizer, 64).render(row, 8)
    assert refused.value.rule == "bad_row"
