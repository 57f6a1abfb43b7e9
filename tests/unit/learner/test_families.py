import json

import pytest

from learner import families
from learner.config import LearnerExperiment, ParallelConfig
from learner.service import check_start

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
        ({"num_attention_heads": True}, "num_attention_heads true; expected a whole number above 0"),
        ({"vocab_size": "many"}, 'vocab_size "many"; expected a whole number above 0'),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights cannot be trained"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope type yarn is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        family(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 with mlp_only_layers None is not supported"),
        ({"mlp_only_layers": [0]}, r"decoder_sparse_step 1 with mlp_only_layers \[0\] is not supported"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64 is not supported"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not supported"),
        ({"num_experts_per_tok": 1}, "leaves its router no gradient; not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ({"num_experts": None}, "num_experts_per_tok 2 of None experts"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "architecture Qwen2MoeForCausalLM is not supported"),
    ],
)
def test_mixtures_that_are_not_supported_are_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        family(**QWEN3_MOE | changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_each_mixture_weighs_its_experts_as_its_family_does():
    qwen3, mixtral = family(**QWEN3_MOE), family(**MIXTRAL)
    assert (qwen3.ffn, mixtral.ffn) == (96, 1536)
    assert qwen3.mixture.renormalised
    assert mixtral.mixture.renormalised
    assert not family(**QWEN3_MOE | {"norm_topk_prob": False}).mixture.renormalised
    written_by_transformers_5 = {"num_experts": None, "num_local_experts": 8}
    assert family(**QWEN3_MOE | written_by_transformers_5).mixture == qwen3.mixture


def test_an_expert_size_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(ValueError, match="expert=3 does not divide the model's 8 experts; use one of 1, 2"):
        family(**MIXTRAL).check_layout(ParallelConfig(expert=3))
    with pytest.raises(ValueError, match="expert=2: LlamaForCausalLM has no experts; use 1"):
        family().check_layout(ParallelConfig(expert=2))
    # Experts are not cut, so their width need not be a multiple.
    family(**MIXTRAL | {"intermediate_size": 97}).check_layout(ParallelConfig(tensor=3, expert=4))


def test_sequences_stay_within_a_sliding_window():
    windowed = family(architectures=["MistralForCausalLM"], sliding_window=4096)
    windowed.check_length(4096)
    with pytest.raises(ValueError, match=r"^model.max_length=4097 is more than .* set it to 4096 or less$"):
        windowed.check_length(4097)


def test_the_learners_own_ranks_refuse_sequences_beyond_a_window(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOL | {"sliding_window": 64}))

    def experiment(length):
        of = {"name": "x", "run_dir": "r", "model": {"path": str(tmp_path), "max_length": length}}
        return LearnerExperiment.model_validate(of)

    check_start(experiment(64))
    with pytest.raises(ValueError, match="set it to 64 or less"):
        check_start(experiment(65))


def test_a_window_that_no_sequence_can_leave_is_no_window():
    family(sliding_window=8192).check_length(8192)
    family(sliding_window=64, use_sliding_window=False).check_length(8192)


def test_a_tensor_size_that_does_not_divide_the_heads_is_refused_with_those_that_do():
    says = r"tensor=2 does not divide the model's 9 attention heads; use one of 1, 3$"
    with pytest.raises(ValueError, match=says):
        family().check_layout(ParallelConfig(tensor=2))
    with pytest.raises(ValueError, match="tensor=5 neither divides the model's 3 key-value heads nor is a"):
        family(num_attention_heads=15).check_layout(ParallelConfig(tensor=5))
    with pytest.raises(ValueError, match="tensor=9 does not divide the model's 960 rows of queries, keys"):
        family(intermediate_size=1152).check_layout(ParallelConfig(tensor=9))
    family().check_layout(ParallelConfig(tensor=3, pipeline=2))


def test_tensor_ranks_may_share_key_value_heads():
    shared = family(num_attention_heads=12, num_key_value_heads=2, head_dim=64)
    assert shared.tensor_sizes(16) == [1, 2, 4]
    assert [shared.splits_kv_heads(tensor) for tensor in (1, 2, 4)] == [False, False, True]
    assert family(num_attention_heads=8, num_key_value_heads=1).tensor_sizes(16) == [1, 2, 4, 8]


def test_what_no_stage_gets_by_division_goes_to_those_before_the_last():
    def stages(layers, pipeline):
        made = family(num_hidden_layers=layers)
        made.check_layout(ParallelConfig(pipeline=pipeline))
        ranges = [made.stage_layers(stage, pipeline) for stage in range(pipeline)]
        assert [layer for layers in ranges for layer in layers] == [*range(layers)]
        return [len(layers) for layers in ranges]

    assert stages(30, 3) == [10, 10, 10]
    assert stages(3, 2) == [2, 1]
    assert stages(5, 3) == [2, 2, 1]
    assert stages(30, 4) == [7, 8, 8, 7]
    assert stages(29, 4) == [7, 7, 8, 7]
    assert stages(4, 4) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"pipeline=5 is more than the model's 4 layers; use 4 or less$"):
        stages(4, 5)


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
