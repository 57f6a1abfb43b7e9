import json

import pytest

from learner import families
from learner.config import ParallelConfig

SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


def family(**changes):
    return families.from_config(SMOL | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope type yarn is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        family(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_a_window_that_no_sequence_can_leave_is_no_window():
    assert family(sliding_window=8192).max_positions == 8192
    assert family(sliding_window=64, use_sliding_window=False).max_positions == 8192


def test_a_tensor_size_that_does_not_divide_the_heads_is_refused_with_those_that_do():
    says = r"tensor=2 does not divide the model's 9 attention heads; use one of 1, 3$"
    with pytest.raises(ValueError, match=says):
        family().check_layout(ParallelConfig(tensor=2))
    with pytest.raises(ValueError, match="tensor=9 does not divide the model's 3 key-value heads"):
        family().check_layout(ParallelConfig(tensor=9))
    with pytest.raises(ValueError, match="pipeline=4 does not divide the 30 layers"):
        family().check_layout(ParallelConfig(pipeline=4))
    family().check_layout(ParallelConfig(tensor=3, pipeline=2))


def test_the_vocabulary_is_padded_to_the_tensor_size():
    assert [family(vocab_size=131).padded_vocab(n) for n in (1, 2, 4)] == [131, 132, 132]


def test_rope_is_read_from_both_generations_of_config():
    old = {"rope_parameters": None, "rope_theta": 5e5}
    stretch = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stretch |= {"original_max_position_embeddings": 8192}
    assert family(**old).rope == families.Rope(5e5)
    assert family(**old, rope_scaling={"rope_type": "llama3"} | stretch).rope.llama3 == (8.0, 1.0, 4.0, 8192)
    new = {"rope_theta": 5e5, "rope_type": "llama3"} | stretch
    assert family(rope_parameters=new).rope.llama3 == (8.0, 1.0, 4.0, 8192)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a Hugging Face folder"):
        families.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    assert families.read(tmp_path).heads == 9
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        families.read(tmp_path)


def test_a_config_without_sizes_is_refused_by_the_missing_keys():
    with pytest.raises(ValueError, match=r"^config\.json: hidden_size, vocab_size not found"):
        families.from_config(
            {k: SMOL[k] for k in SMOL if k not in ("hidden_size", "vocab_size")}, "config.json"
        )
