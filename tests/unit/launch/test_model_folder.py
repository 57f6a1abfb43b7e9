"""What a model's files tell before anything starts."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buffer.experiment import ConfigError
from launch import experiment, model_folder, prediction
from launch.experiment import read
from learner.config import ParallelConfig


def trained(folder, **options):
    return model_folder.trained("model.path", str(folder), 128, **options)


def test_a_folder_that_fits_has_no_fault(make_model):
    plain = make_model("plain")
    assert trained(plain, layout=ParallelConfig(pipeline=2)) == []
    assert model_folder.served("model.path", str(plain), 128) == []
    assert trained(make_model("stored-head", {"lm_head.weight": (32, 8)})) == [], (
        "vLLM and the learner pass it by"
    )
    assert trained(make_model("rope", {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)})) == []


@pytest.mark.parametrize(
    ("words", "added", "told"),
    [
        ({"a": 0, "b": 1}, {}, None),
        ({"a": 0, "b": 1, "c": 2}, {"d": 3}, None),
        ({"b": 1}, {"a": 0}, None),
        ([["a", -1.0], ["b", -2.0]], {}, None),
        ({"b": 0, "a": 1}, {}, 'its tokenizer has "a" as token 1, and that of model.path='),
        ({"a": 0}, {"b": 7}, 'its tokenizer has "b" as token 7, and that of model.path='),
        (None, {}, None),
        (3, {}, None),
    ],
)
def test_a_model_that_reads_anothers_tokens_has_its_words(make_model, words, added, told):
    """As many tokens are not the same ones."""
    policy, value = make_model("policy"), make_model("value")
    (policy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    tokens = [{"content": word, "id": number} for word, number in added.items()]
    made = {"model": {"vocab": words}, "added_tokens": tokens} if words is not None else {}
    (value / "tokenizer.json").write_text(json.dumps(made))
    found = model_folder.same_words("learner.value.path", str(value), str(policy))
    assert len(found) == (told is not None)
    assert told is None or found[0].startswith(f"learner.value.path={value}: {told}")


def test_a_reward_model_is_none_that_generates(make_model):
    folder = make_model("scores")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    told = "a reward model, which generates nothing; expected a language model"
    assert model_folder.served("model.path", str(folder)) == [f"model.path={folder}: {told}"]
    assert told not in str(model_folder.served("model.path", str(folder), scores=True))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"num_hidden_layers": 3},
            "asks for model.layers.2.self_attn.q_proj.weight 64 × 8, which the weights do not have",
        ),
        ({"num_hidden_layers": 1}, "which config.json does not ask for"),
        (
            {"hidden_size": 16},
            "model.embed_tokens.weight is 32 × 8 in the weights, and config.json asks for 32 × 16",
        ),
        ({"vocab_size": 33}, "model.embed_tokens.weight is 32 × 8 in the weights"),
        ({"intermediate_size": 8}, "model.layers.0.mlp.gate_proj.weight is 16 × 8 in the weights"),
        ({"num_key_value_heads": 2}, "model.layers.0.self_attn.k_proj.weight is 32 × 8 in the weights"),
        ({"tie_word_embeddings": False}, "config.json asks for lm_head.weight 32 × 8"),
    ],
)
def test_a_config_that_is_not_the_weights_is_told_by_the_first_tensor(make_model, changes, told):
    folder = make_model("wrong", **changes)
    for faults in (trained(folder), model_folder.served("model.path", str(folder), 128)):
        (line,) = faults
        assert told in line
        assert line.startswith(f"model.path={folder}: ")


def test_an_output_layer_beside_tied_embeddings_is_told_unless_it_is_the_same(make_model):
    folder = make_model("both", {"lm_head.weight": (32, 8)})
    assert trained(folder) == []
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][31, 7] = 1
    save_file(tensors, folder / "model.safetensors")
    told = f"model.path={folder}: config.json has tie_word_embeddings true, and the weights a lm_head.weight"
    for faults in (trained(folder), model_folder.served("model.path", str(folder), 128)):
        (line,) = faults
        assert line.startswith(told)
    half = {"lm_head.weight": tensors.pop("lm_head.weight").astype(np.float16)}
    save_file(tensors, folder / "a.safetensors")
    save_file(half, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    (line,) = trained(folder)
    assert line.startswith(told)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert trained(folder) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; one of Llama",
        ),
        ({"num_hidden_layers": "two"}, 'num_hidden_layers "two"; expected a whole number above 0'),
        ({"hidden_size": 0}, "hidden_size 0; expected a whole number above 0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights"),
    ],
)
def test_what_the_learner_cannot_train_is_told_and_vllm_alone_may_serve_it(make_model, changes, told):
    folder = make_model("other", **changes)
    (line,) = trained(folder)
    assert line.startswith(f"model.path={folder}: config.json: {told}")
    assert model_folder.served("model.path", str(folder), 128) == []


def test_a_window_that_sequences_would_leave_is_told_and_vllm_alone_may_serve_it(make_model):
    windowed = {"architectures": ["MistralForCausalLM"]}
    assert trained(make_model("wide", **windowed, sliding_window=128)) == []
    folder = make_model("narrow", **windowed, sliding_window=127)
    (line,) = trained(folder)
    assert line.startswith(
        f"model.path={folder}: model.max_length=128 is more than its sliding window of 127"
    )
    assert model_folder.served("model.path", str(folder), 128) == []


def test_a_layout_that_does_not_fit_the_model_is_told(make_model):
    (line,) = trained(make_model("plain"), layout=ParallelConfig(tensor=4))
    assert "learner.parallel.tensor=4 does not divide the model's 2 attention heads; use one of 1, 2" in line


def test_a_score_head_goes_on_either_kind_of_folder(make_model, reward_folder):
    for folder in (make_model("plain"), make_model("untied", {"lm_head.weight": (32, 8)}), reward_folder):
        assert trained(folder, head="score") == []
    (line,) = trained(reward_folder)
    assert "architecture LlamaForSequenceClassification is not supported" in line
    (line,) = trained(
        make_model("torn", architectures=["LlamaForSequenceClassification"], num_labels=1), head="score"
    )
    assert "asks for score.weight 1 × 8" in line


def test_weights_that_are_no_plain_floats_are_told(make_model):
    folder = make_model("quantised")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    (line,) = trained(folder)
    assert line.endswith("model.norm.weight is I8 in the weights; expected F32, BF16, F16, F64")


def test_an_index_says_which_files_count(make_model):
    folder = make_model("sharded")
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    save_file({"layers.0.wq": np.zeros(3, np.float32)}, folder / "consolidated.safetensors")
    (line,) = trained(folder)
    assert "layers.0.wq" in line
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1-of-1.safetensors"}}))
    assert trained(folder) == []
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2-of-2.safetensors"}}))
    (line,) = trained(folder)
    assert "model-2-of-2.safetensors is missing, which model.safetensors.index.json names" in line
    index.write_text("{}")
    (line,) = trained(folder)
    assert "expected a map of tensors to files" in line


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        (".cache/models/SmolLM2-135M-Instruct", "python -m launch.demo_model"),
        ("runs/sft/model", "slipstream sft configs/sft.yaml"),
        ("runs/reward/model", "slipstream reward configs/reward.yaml"),
    ],
)
def test_a_folder_of_the_examples_that_is_not_there_names_the_command_that_makes_it(
    folder, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (line,) = model_folder.served("rollout.rewards.helpful.model", folder)
    assert line.endswith(
        f"={folder}: no config.json in it, expected a Hugging Face folder; `{command}` makes it"
    )


def test_every_command_that_loads_a_model_looks_at_it_first(config_file, make_model):
    wrong = f"model.path={make_model('wrong', num_hidden_layers=3)}"
    for services in (["rollout"], ["learner"], ["buffer", "rollout", "scorer", "learner"]):
        with pytest.raises(ConfigError, match=r"asks for model\.layers\.2"):
            read(config_file, [wrong], services)
    read(config_file, [wrong], ["buffer"])
    with pytest.raises(ValueError, match=r"asks for model\.layers\.2"):
        prediction.read(config_file, [wrong], None)


def test_a_scorers_model_is_looked_at_too(config_file, make_model):
    labels = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    torn = make_model("torn", **labels)
    with pytest.raises(ConfigError, match=r"rollout.rewards.x.model=.*asks for score.weight"):
        read(config_file, [f"rollout.rewards.x.model={torn}"])


def test_heads_that_vllm_on_cpu_does_not_compute_are_told_before_anything_starts(
    config_file, make_model, reward_folder, monkeypatch
):
    hidden = {"hidden_size": 8, "head_dim": None}  # two heads of 4
    shapes = {f"model.layers.{i}.self_attn.{n}_proj.weight": (4, 8) for i in (0, 1) for n in "kv"}
    shapes |= {f"model.layers.{i}.self_attn.{n}_proj.weight": (8, 8) for i in (0, 1) for n in "qo"}
    narrow = f"model.path={make_model('narrow', shapes, **hidden)}"
    told = "this machine has no GPU, and vLLM on CPU computes no attention heads of 4, only those of 32, 64"
    monkeypatch.setattr(experiment, "has_gpu", lambda: False)
    for services in (["rollout"], ["buffer", "rollout", "scorer", "learner"]):
        with pytest.raises(ConfigError, match=told):
            read(config_file, [narrow], services)
    read(config_file, [narrow], ["learner"])
    read(config_file, [])
    with pytest.raises(ValueError, match=told):
        prediction.read(config_file, [narrow], None)
    labels = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    scored = make_model("scored", shapes | {"score.weight": (1, 8)}, **labels, **hidden)
    with pytest.raises(ConfigError, match=rf"rollout\.rewards\.x\.model=.*scored: {told}"):
        read(config_file, [f"rollout.rewards.x.model={scored}"])
    monkeypatch.setattr(experiment, "has_gpu", lambda: True)
    read(config_file, [narrow])


def test_the_heads_that_are_told_are_those_that_vllm_knows():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(model_folder.CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()
