"""What slots cut, conversions write and Megatron's own modules hold, bit by bit, under every layout: also
where stages have unequally many layers, or several tensor ranks share a key-value head."""

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from learner import conversion, convert, families, parallel
from learner.adapter import Adapter
from learner.config import LoraConfig, ParallelConfig
from learner.lora import factors
from learner.megatron_folder import StoredTensors, cut
from learner.model import PolicyModel
from learner.safetensors_folder import SafetensorsFolder
from learner.slots import slots

HEADS, KV_HEADS, SIZE = 8, 2, 4
LAYOUTS = [ParallelConfig(tensor=t, pipeline=p) for t in (1, 2, 4, 8) for p in (1, 2, 3)]
STAGES = {(4, 1): [4], (4, 2): [2, 2], (4, 3): [1, 2, 1], (5, 1): [5], (5, 2): [3, 2], (5, 3): [2, 2, 1]}


@pytest.fixture(scope="module", params=[4, 5])
def source(request, tmp_path_factory):
    """A made Qwen2, with biases, of so many layers."""
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=67,
        hidden_size=HEADS * SIZE,
        intermediate_size=48,
        num_hidden_layers=request.param,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("source")
    model.save_pretrained(path)
    return path


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def rank_of(uncut, rank, layout, axis=0):
    """A tensor rank's equal part."""
    return uncut.chunk(layout.tensor, axis)[rank]


def by_head(held, layer, kind):
    """As `megatron.core.transformer.attention` takes them apart: q1 q2 q3 q4 k1 v1, q5 q6 q7 q8 k2 v2."""
    q, k, v = (
        [*held[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"].split(SIZE)] for name in ("q", "k", "v")
    )
    each = HEADS // KV_HEADS
    groups = [[*q[each * n : each * (n + 1)], k[n], v[n]] for n in range(KV_HEADS)]
    return torch.cat([head for group in groups for head in group])


def expected_on(held, layout, stage, rank):
    """Every parameter of a rank by Megatron's name, written down without our slots."""
    counts = STAGES[sum(1 for name in held if name.endswith("q_proj.bias")), layout.pipeline]

    def padded(name):
        table = held[name]
        rows = -(-len(table) // layout.tensor) * layout.tensor
        return torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])

    found = {}
    for number in range(counts[stage]):
        layer = sum(counts[:stage]) + number
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{number}."
        for kind in ("weight", "bias"):
            found[f"{theirs}self_attention.linear_qkv.{kind}"] = rank_of(
                by_head(held, layer, kind), rank, layout
            )
        gate, up = (rank_of(held[f"{ours}mlp.{name}_proj.weight"], rank, layout) for name in ("gate", "up"))
        found |= {
            f"{theirs}self_attention.linear_proj.weight": rank_of(
                held[ours + "self_attn.o_proj.weight"], rank, layout, 1
            ),
            f"{theirs}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{theirs}mlp.linear_fc2.weight": rank_of(held[ours + "mlp.down_proj.weight"], rank, layout, 1),
            f"{theirs}input_layernorm.weight": held[ours + "input_layernorm.weight"],
            f"{theirs}pre_mlp_layernorm.weight": held[ours + "post_attention_layernorm.weight"],
        }
    if stage == 0:
        found["embedding.word_embeddings.weight"] = rank_of(padded("model.embed_tokens.weight"), rank, layout)
    if stage == layout.pipeline - 1:
        found["decoder.final_layernorm.weight"] = held["model.norm.weight"]
        found["output_layer.weight"] = rank_of(padded("lm_head.weight"), rank, layout)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"tp{one.tensor}pp{one.pipeline}")
def test_shards_are_megatrons_and_join_to_what_was_cut(source, layout):
    held, folder, family = weights(source), SafetensorsFolder(source), families.read(source)
    found = {}
    for slot in slots(family, layout):
        shards = [slot.read(folder, rank) for rank in range(layout.tensor)]
        for rank, shard in enumerate(shards):
            assert tuple(shard.shape) == slot.shard_shape
            expected = expected_on(held, layout, slot.stage, rank)
            assert torch.equal(shard, expected[slot.parameter]), (slot.parameter, rank)
        found |= dict(zip((whole.name for whole in slot.whole), slot.join(shards), strict=True))
    assert_same(found, held)


def chunks(folder):
    stored = StoredTensors(folder)
    return {key: sorted((chunk.start, chunk.shape) for chunk in stored.stored(key)) for key in stored.shapes}


def test_conversions_come_back_bit_by_bit_through_every_layout(source, tmp_path):
    """From each to the next, with whatever that one's ranks would have written."""
    held, made = weights(source), []
    for number, layout in enumerate(LAYOUTS):
        made.append(tmp_path / f"made-{number}")
        conversion.hf_to_megatron(source, made[-1], layout)
    for number, (before, layout) in enumerate(zip(made, LAYOUTS[1:] + LAYOUTS[:1], strict=True)):
        target = tmp_path / f"resharded-{number}"
        conversion.reshard(before, target, layout)
        conversion.megatron_to_hf(target, tmp_path / f"hf-{number}")
        assert_same(weights(tmp_path / f"hf-{number}"), held)
        assert chunks(target) == chunks(made[(number + 1) % len(made)])
        assert len([*target.glob("*.distcp")]) == layout.tensor * layout.pipeline


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"tp{one.tensor}pp{one.pipeline}")
def test_megatrons_modules_hold_and_save_what_the_slots_say(source, layout, as_rank):
    held, folder, family = weights(source), SafetensorsFolder(source), families.read(source)
    for number in range(layout.tensor * layout.pipeline):
        with as_rank(layout, number):
            stage, rank = parallel.pp_rank(), parallel.tp_rank()
            model = PolicyModel(family, family.transformer_config(layout, torch.float32, False))
            convert.load(model, folder)
            assert_same(dict(model.named_parameters()), expected_on(held, layout, stage, rank))
            described = model.sharded_state_dict()
            apply_factories(described)
        ours = {
            (chunk.key, chunk.whole, chunk.start, chunk.shape)
            for slot in slots(family, layout)
            if slot.stage == stage and rank in slot.owners
            for chunk, _ in cut(slot, rank, family, layout.pipeline)
        }
        assert {(t.key, t.global_shape, t.global_offset, shape_of(t)) for t in stored_of(described)} == ours


def test_adapters_of_ranks_that_share_heads_make_up_the_dense_ones(source, as_rank):
    """Weights joined, and gradients summed, as the ranks' exchange does which the fake group leaves out."""
    layout, config = ParallelConfig(tensor=4), LoraConfig(rank=3, alpha=5, modules=("q_proj", "v_proj"))
    folder, draw = SafetensorsFolder(source), torch.Generator().manual_seed(6)
    (slot, *_) = (s for s in slots(families.read(source), layout) if "qkv.weight" in s.parameter)
    trained = {
        module: [torch.randn(of.whole[0].shape, generator=draw).requires_grad_() for of in pair]
        for module, pair in factors(slot, config).items()
    }
    x, slopes = torch.randn(7, 32, generator=draw), torch.randn(slot.full_shape[0], 7, generator=draw)
    shards, found = [], {module: [0, 0] for module in trained}
    for rank in range(4):
        with as_rank(layout, rank):
            adapter = Adapter(slot, config, torch.float32, seed=1)
            for module, pair in trained.items():
                for held, whole in zip((adapter.a, adapter.b), pair, strict=True):
                    held[module].data.copy_(whole.detach())
            shard = slot.read(folder, rank)
            (adapter.multiply(x, shard, None) * rank_of(slopes, rank, layout).T).sum().backward()
            shards.append(adapter.fused(shard))
            for module, sums in found.items():
                sums[:] = [sums[0] + adapter.a[module].grad, sums[1] + adapter.b[module].grad]
    for whole, fused, of_outputs in zip(slot.whole, slot.join(shards), slot.join([slopes]), strict=True):
        dense = folder.read(whole.name, slice(None))
        if pair := trained.get(whole.name.split(".")[-2]):
            dense = dense + config.scale * pair[1] @ pair[0]
            (dense @ x.T * of_outputs).sum().backward()
        torch.testing.assert_close(fused, dense.detach())
    for module, sums in found.items():
        for summed, whole in zip(sums, trained[module], strict=True):
            torch.testing.assert_close(summed, whole.grad, atol=1e-4, rtol=1e-4)


def stored_of(described):
    """What a rank writes: of equal copies the first one's."""
    tensors = [one for one in leaves(described) if isinstance(one, ShardedTensor)]
    return [one for one in tensors if is_main_replica(one.replica_id)]


def leaves(tree):
    if isinstance(tree, dict | list):
        return [
            leaf for branch in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(branch)
        ]
    return [tree]


def shape_of(tensor):
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
