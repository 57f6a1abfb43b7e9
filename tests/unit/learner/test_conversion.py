"""Files to files: what a conversion writes and refuses. Real learners read it in tests/integration."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from learner import conversion
from learner.checkpoint_files import complete
from learner.config import ParallelConfig
from learner.megatron_folder import Chunk, StoredTensors

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMOLLM = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama-2": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-3-tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "smollm": LlamaConfig(**SIZES | SMOLLM, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}
TWO_BY_TWO = ParallelConfig(tensor=2, pipeline=2)
LAYOUTS = {kind: ParallelConfig(tensor=2, pipeline=2, expert=4) for kind in ("mixtral", "qwen3-moe")}


@pytest.fixture
def make(tmp_path):
    """Writes a made model whose norms and biases are not all ones and zeros."""

    def make(kind="llama-2", dtype=torch.bfloat16):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(FAMILIES[kind])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        path = tmp_path / "source"
        model.to(dtype).save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")
        return path

    return make


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_comes_back_bit_by_bit_over_two_layouts(make, tmp_path, kind):
    source = make(kind)
    one, four, again = (tmp_path / name for name in ("one", "four", "again"))
    conversion.hf_to_megatron(source, one, ParallelConfig())
    conversion.reshard(one, four, LAYOUTS.get(kind, TWO_BY_TWO))
    conversion.reshard(four, again, ParallelConfig())
    for checkpoint in (one, four, again):
        target = tmp_path / "hf" / checkpoint.name
        conversion.megatron_to_hf(checkpoint, target)
        assert_same(weights(target), weights(source))
        assert (target / "tokenizer.json").read_text() == "{}"
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


def test_a_layout_cuts_the_chunks_as_its_ranks_would(make, tmp_path):
    conversion.hf_to_megatron(make("qwen2"), tmp_path / "four", TWO_BY_TWO)
    stored = StoredTensors(tmp_path / "four")
    assert {file.name for file in (tmp_path / "four").glob("*.distcp")} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }
    assert stored.shapes["embedding.word_embeddings.weight"] == (68, 32), "padded to the tensor size"
    assert stored.shapes["decoder.layers.mlp.linear_fc1.weight"] == (4, 96, 32)
    columns = [(c.start, c.shape) for c in stored.stored("decoder.layers.mlp.linear_fc2.weight")]
    assert columns[:2] == [((0, 0, 0), (1, 32, 24)), ((1, 0, 0), (1, 32, 24))]
    halves = [c.start[1] for c in stored.stored("decoder.layers.mlp.linear_fc1.weight") if c.start[0] == 0]
    assert sorted(halves) == [0, 24, 48, 72], "each rank has its rows of gate and its rows of up"
    norms = stored.stored("decoder.layers.input_layernorm.weight")
    assert sorted(c.start for c in norms) == [(layer, 0) for layer in range(4)], (
        "of equal copies one is stored"
    )


@pytest.mark.parametrize("layout", [ParallelConfig(), TWO_BY_TWO], ids=["one", "four"])
def test_queries_lie_with_their_key_and_value_and_all_of_gate_before_up(make, tmp_path, layout):
    """As Megatron's attention and its gated MLP take them apart; a round trip alone would not tell."""
    source = make("llama-3")
    held = weights(source)
    conversion.hf_to_megatron(source, tmp_path / "checkpoint", layout)
    stored = StoredTensors(tmp_path / "checkpoint")

    def megatrons(name, layer):
        whole = stored.shapes[f"decoder.layers.{name}.weight"]
        chunk = Chunk(f"decoder.layers.{name}.weight", whole, (layer, 0, 0), (1, *whole[1:]))
        return stored.read(chunk)[0]

    for layer in range(4):

        def ours(name, layer=layer):
            return held[f"model.layers.{layer}.{name}_proj.weight"]

        q, k, v = (ours(f"self_attn.{name}").view(-1, 8, 32) for name in "qkv")
        heads = [q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]
        assert torch.equal(megatrons("self_attention.linear_qkv", layer), torch.cat(heads))
        gate_up = torch.cat([ours("mlp.gate"), ours("mlp.up")])
        assert torch.equal(megatrons("mlp.linear_fc1", layer), gate_up)
        assert torch.equal(megatrons("mlp.linear_fc2", layer), ours("mlp.down"))


def test_every_expert_is_a_chunk_of_the_rank_that_holds_it(make, tmp_path):
    source = make("mixtral")
    conversion.hf_to_megatron(source, tmp_path / "eight", LAYOUTS["mixtral"])
    stored = StoredTensors(tmp_path / "eight")
    assert len(list((tmp_path / "eight").glob("*.distcp"))) == 8, "four expert ranks of each stage"
    assert stored.shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (4, 4, 96, 32)
    down = {(c.start, c.shape) for c in stored.stored("decoder.layers.mlp.experts.experts.linear_fc2.weight")}
    assert down == {((n, e, 0, 0), (1, 1, 32, 48)) for n in range(4) for e in range(4)}
    assert stored.shapes["decoder.layers.mlp.router.weight"] == (4, 4, 32)
    columns = Chunk(
        "decoder.layers.mlp.experts.experts.linear_fc1.weight", (4, 4, 96, 32), (3, 2, 0, 0), (1, 1, 96, 32)
    )
    held, home = weights(source), "model.layers.3.block_sparse_moe.experts.2."
    gate_up = torch.cat([held[f"{home}w1.weight"], held[f"{home}w3.weight"]])
    assert torch.equal(stored.read(columns)[0, 0], gate_up)


def test_dtypes_are_kept_or_changed_on_demand_and_never_mixed(make, tmp_path):
    source = make(dtype=torch.float32)
    expected = weights(source)
    conversion.hf_to_megatron(source, tmp_path / "wide", ParallelConfig())
    narrow, again = tmp_path / "narrow", tmp_path / "again"
    conversion.megatron_to_hf(tmp_path / "wide", narrow, dtype="bfloat16")
    assert_same(weights(narrow), {name: t.bfloat16() for name, t in expected.items()})
    assert json.loads((narrow / "config.json").read_text())["dtype"] == "bfloat16"

    norm = "model.norm.weight"
    save_file(expected | {norm: expected[norm].bfloat16()}, source / "model.safetensors")
    with pytest.raises(ValueError, match="the tensors are bfloat16 and float32; choose one with --dtype"):
        conversion.hf_to_megatron(source, tmp_path / "mixed", ParallelConfig())
    conversion.hf_to_megatron(source, tmp_path / "mixed", ParallelConfig(), "float32")
    conversion.megatron_to_hf(tmp_path / "mixed", again)
    assert {tensor.dtype for tensor in weights(again).values()} == {torch.float32}


def test_what_is_no_checkpoint_or_damaged_is_one_clear_line(make, tmp_path):
    source, checkpoint, target = make(), tmp_path / "run/checkpoints/step-000004", tmp_path / "hf"
    conversion.hf_to_megatron(source, checkpoint, ParallelConfig())

    def refused(path, says, **options):
        with pytest.raises(ValueError, match=says) as caught:
            conversion.megatron_to_hf(path, target, **options)
        assert "\n" not in str(caught.value)
        assert not target.exists()

    refused(source, r"no meta\.json in it; expected a checkpoint such as runs/NAME")
    refused(tmp_path / "run", "the newest in it is .*run/checkpoints/step-000004$")
    refused(tmp_path / "nothing", r"no meta\.json in it")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((source / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    refused(
        checkpoint, r"linear_fc1.weight has shape \(4, 96, 32\); config.json asks for \(4, 128", model=other
    )
    file = checkpoint / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused(checkpoint, "__0_0.distcp is not what was written")
    file.write_bytes(content)
    source.rename(tmp_path / "moved")
    refused(checkpoint, "source and not there; give --model FOLDER")
    conversion.megatron_to_hf(checkpoint, target, tmp_path / "moved")
    assert_same(weights(target), weights(tmp_path / "moved"))


def test_a_layout_that_does_not_fit_or_a_target_that_exists_writes_nothing(make, tmp_path):
    source, target = make(), tmp_path / "checkpoint"
    with pytest.raises(ValueError, match="pipeline=5 is more than the model's 4 layers"):
        conversion.hf_to_megatron(source, target, ParallelConfig(pipeline=5))
    assert not target.exists()
    target.mkdir()
    for convert in (conversion.hf_to_megatron, conversion.reshard):
        with pytest.raises(ValueError, match="exists; remove it or choose another name"):
            convert(source, target, ParallelConfig())
    with pytest.raises(ValueError, match="exists; remove it or choose another name"):
        conversion.megatron_to_hf(source, target)
    target.rmdir()
    (source / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        conversion.hf_to_megatron(source, target, ParallelConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_that_the_config_does_not_ask_for_are_not_left_behind(make, tmp_path):
    source, target = make(), tmp_path / "checkpoint"
    found = weights(source) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    conversion.hf_to_megatron(source, tmp_path / "derived", ParallelConfig())
    save_file(found | {"model.layers.4.mlp.up_proj.weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"config\.json asks for no tensor model\.layers\.4\.mlp\.up_proj\.weight"
    ):
        conversion.hf_to_megatron(source, target, ParallelConfig())
    assert not target.exists()


def test_an_output_layer_beside_tied_embeddings_is_left_behind_only_where_it_is_the_same(make, tmp_path):
    source, target = make("llama-3-tied"), tmp_path / "checkpoint"
    found = weights(source)
    output = found["model.embed_tokens.weight"].clone()
    save_file(found | {"lm_head.weight": output}, source / "model.safetensors")
    conversion.hf_to_megatron(source, tmp_path / "same", ParallelConfig())
    output[-1, -1] += 1
    save_file(found | {"lm_head.weight": output}, source / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings true, and the weights a lm_head"):
        conversion.hf_to_megatron(source, target, ParallelConfig())
    assert not target.exists()


@pytest.fixture
def reward_model(tmp_path):
    torch.manual_seed(3)
    config = Qwen2Config(**SIZES, num_labels=1, tie_word_embeddings=True)
    AutoModelForSequenceClassification.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "rm")
    (tmp_path / "rm/tokenizer.json").write_text("{}")
    return tmp_path / "rm"


def test_a_reward_model_comes_back_bit_by_bit_over_two_layouts(reward_model, tmp_path):
    one, four, target = (tmp_path / name for name in ("one", "four", "hf"))
    conversion.hf_to_megatron(reward_model, one, ParallelConfig())
    conversion.reshard(one, four, TWO_BY_TWO)
    conversion.megatron_to_hf(four, target)
    assert_same(weights(target), weights(reward_model))
    again = AutoModelForSequenceClassification.from_pretrained(target)
    assert (type(again).__name__, again.config.num_labels) == ("Qwen2ForSequenceClassification", 1)


def test_a_value_model_is_cut_and_converted_beside_its_policy(make, reward_model, tmp_path):
    policy, checkpoint, four = make(), tmp_path / "step-000004", tmp_path / "four"
    conversion.hf_to_megatron(policy, checkpoint, ParallelConfig())
    conversion.hf_to_megatron(reward_model, checkpoint / "value", ParallelConfig())
    (checkpoint / "value/meta.json").unlink()
    facts = json.loads((checkpoint / "meta.json").read_text())
    complete(checkpoint.rename(tmp_path / "partial"), checkpoint, facts)
    with pytest.raises(ValueError, match="the value model's folder is not told in it; give --value-model"):
        conversion.reshard(checkpoint, four, TWO_BY_TWO)
    with pytest.raises(ValueError, match="the value model's folder is not told in it; give --model FOLDER"):
        conversion.megatron_to_hf(checkpoint, tmp_path / "none", value=True)
    told = facts | {"value_model": str(reward_model)}
    complete(checkpoint.rename(tmp_path / "again"), checkpoint, told)
    conversion.reshard(checkpoint, four, TWO_BY_TWO)
    halves = StoredTensors(four / "value").stored("decoder.layers.mlp.linear_fc2.weight")
    assert {chunk.shape for chunk in halves} == {(1, 32, 24)}
    conversion.megatron_to_hf(four, tmp_path / "policy")
    conversion.megatron_to_hf(four, tmp_path / "value", value=True)
    assert_same(weights(tmp_path / "policy"), weights(policy))
    assert_same(weights(tmp_path / "value"), weights(reward_model))
    plain = tmp_path / "plain"
    conversion.hf_to_megatron(policy, plain, ParallelConfig())
    with pytest.raises(ValueError, match=r"no value model in it; its run had no learner\.value"):
        conversion.megatron_to_hf(plain, tmp_path / "none", value=True)


MEASURED = """
import json, re, sys
from pathlib import Path
from learner import conversion
from learner.config import ParallelConfig

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def convert(folder):
    conversion.hf_to_megatron(folder / "hf", folder / "one", ParallelConfig())
    conversion.reshard(folder / "one", folder / "two", ParallelConfig(tensor=2))
    conversion.megatron_to_hf(folder / "two", folder / "back")

convert(Path(sys.argv[1]))
before = peak()
convert(Path(sys.argv[2]))
print(peak() - before)
"""


def test_the_peak_of_memory_is_a_small_part_of_a_large_model(tmp_path):
    """Beside what a tiny model takes: libraries, and buffers of fixed size."""
    tiny, large = tmp_path / "tiny", tmp_path / "large"
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    for folder, config in ((tiny, SIZES), (large, sizes)):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config, dtype="float32"))
        model.save_pretrained(folder / "hf", max_shard_size="10MB")
    size = sum(tensor.nbytes for tensor in weights(large / "hf").values())
    assert size > 200e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tiny), str(large)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < size / 3
    assert_same(weights(large / "back"), weights(large / "hf"))


@pytest.mark.parametrize("limit", [300, 20_000])
def test_what_the_disk_does_not_take_is_one_line_with_the_target_and_leaves_nothing(make, tmp_path, limit):
    source, stored, target = make(), tmp_path / "stored", tmp_path / "to" / "it"
    conversion.hf_to_megatron(source, stored, ParallelConfig())
    for arguments in (("hf-to-megatron", source), ("reshard", stored), ("megatron-to-hf", stored)):
        process = subprocess.run(
            [Path(sys.executable).with_name("slipstream"), "convert", *arguments, target],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 2, process.stderr
        assert process.stderr == f"error: {target}: cannot be written: File too large\n"
        assert not list(target.parent.iterdir())
