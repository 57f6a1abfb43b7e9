import re

import pytest

from buffer.experiment import ConfigError
from buffer.tokenizers import load_tokenizer, tokenizer_digest


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"model": 3, "added_tokens": []}'])
def test_a_tokenizer_that_is_none_is_told_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(
        ConfigError, match=rf"^model.path: {re.escape(str(tmp_path))}: no tokenizer: \w+: .*$"
    ):
        load_tokenizer("model.path", str(tmp_path))


def test_a_folder_without_a_model_has_no_tokenizer_either(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json; expected a Hugging Face model folder"):
        load_tokenizer("model.path", str(tmp_path))


def test_the_digest_changes_with_what_makes_tokens_of_a_row_and_with_nothing_else(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    digests = [tokenizer_digest(str(tmp_path))]
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert tokenizer_digest(str(tmp_path)) == digests[0]
    for name, text in (
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.jinja", "{{ messages }}!"),
        ("tokenizer.json", '{"model": 1}'),
        ("vocab.txt", "a"),
    ):
        (tmp_path / name).write_text(text)
        digests.append(tokenizer_digest(str(tmp_path)))
    assert len(set(digests)) == 5
    with pytest.raises(ValueError, match="cannot be read"):
        tokenizer_digest(str(tmp_path / "nowhere"))
