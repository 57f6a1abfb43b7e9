"""Adapters against a dense oracle on Hugging Face's model, in the optimizer, in checkpoints and exported."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from buffer.experiment import ModelConfig
from learner import conversion, convert, parallel
from learner.adapter import Adapter, without_adapters
from learner.checkpoint import Checkpoints, Setup
from learner.config import EmaConfig, LoraConfig, OptimizerConfig, ParallelConfig
from learner.layout import Row, lay_out
from learner.lora import PEFT, Initial, trained_slots
from learner.megatron_folder import StoredTensors
from learner.model import build_model
from learner.offline.config import OfflineLearnerConfig, RewardConfig, SftConfig
from learner.offline.encoding import Encoded
from learner.offline.stages import make_stage
from learner.offline.trainer import Trainer
from learner.optimizer import Trainable, make_trainable, set_rates
from learner.reference.fingerprint import fingerprint
from learner.reference.local import Reference

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = LoraConfig(rank=3, alpha=5)
SOME = LoraConfig(rank=2, alpha=7, modules=("v_proj", "q_proj", "up_proj"))
OF = {"llama": ALL, "qwen2": SOME, "qwen3": ALL, "mixtral": LoraConfig(rank=3, modules=ATTENTION)}
LAYOUT = ParallelConfig()


@pytest.fixture(scope="module")
def one_process():
    parallel.initialize(LAYOUT, seed=3)
    yield
    parallel.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A made model of each kind, whose biases are not zero."""
    root = tmp_path_factory.mktemp("models")
    for kind, config in CONFIGS.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / kind)
    return root


def rows():
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 67, (n,), generator=draw).tolist(),
            torch.randint(0, 67, (m,), generator=draw).tolist(),
        )
        for n, m in ((5, 9), (12, 3), (1, 20))
    ]


def batch(at_target=False):
    segments = [
        [Row(number, torch.tensor(p).numpy(), torch.tensor(r).numpy(), torch.arange(len(r)).numpy())]
        for number, (p, r) in enumerate(rows())
    ]
    return lay_out(segments, at_target=at_target)


def adapters(model):
    return [module for module in model.modules() if isinstance(module, Adapter)]


def moved(model, seed=9):
    """With A and B as training might leave them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for adapter in adapters(model):
            for parameter in adapter.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


def by_name(model, config, value=lambda parameter: parameter):
    """A and B by `peft`'s names."""
    return {
        whole.name: value(model.get_parameter(slot.parameter))
        for slot in trained_slots(model.family, LAYOUT, config)
        for whole in slot.whole
    }


def fused_by_hand(weights, trained, scale):
    found = dict(weights)
    for name, weight in weights.items():
        path = PEFT + name.removesuffix(".weight")
        if f"{path}.lora_A.weight" in trained:
            product = trained[f"{path}.lora_B.weight"] @ trained[f"{path}.lora_A.weight"]
            found[name] = weight + scale * product
    return found


def hf_logprobs(call):
    found = []
    for prompt, response in rows():
        logprobs = call(torch.tensor([prompt + response])).logits[0, :-1].log_softmax(-1)
        found.append(logprobs[len(prompt) - 1 :].gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_new_adapters_leave_the_bases_numbers_bit_by_bit(one_process, folders, kind, dtype):
    base = build_model(folders / kind, LAYOUT, dtype)
    model = build_model(folders / kind, LAYOUT, dtype, adapters=OF[kind])
    assert len(adapters(model)) == 2 * (2 if kind == "mixtral" else 2 if kind == "qwen2" else 4)
    with torch.no_grad():
        expected, _ = base(batch())
        assert torch.equal(model(batch())[0], expected)
        assert not torch.equal(moved(model)(batch())[0], expected)
        with without_adapters(model):
            assert torch.equal(model(batch())[0], expected), "switched off it is the base"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_and_gradients_are_those_of_a_dense_sum(one_process, folders, kind, recompute):
    config = OF[kind]
    model = moved(build_model(folders / kind, LAYOUT, torch.float32, recompute, adapters=config))
    found, _ = model(batch())
    slopes = torch.randn(len(found), generator=torch.Generator().manual_seed(2))
    (found * slopes).sum().backward()

    trained = by_name(model, config, lambda p: p.detach().clone().requires_grad_())
    hf = AutoModelForCausalLM.from_pretrained(folders / kind, dtype=torch.float32)
    weights = fused_by_hand(dict(hf.named_parameters()), trained, config.alpha / config.rank)
    expected = hf_logprobs(lambda ids: functional_call(hf, weights, (ids,)))
    (expected * slopes).sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    gradients = by_name(model, config, lambda p: p.grad)
    for name, oracle in trained.items():
        scale = oracle.grad.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(gradients[name], oracle.grad, atol=1e-4 * scale, rtol=0, msg=name)
    others = {id(p) for adapter in adapters(model) for p in adapter.parameters()}
    assert all(p.grad is None and not p.requires_grad for p in model.parameters() if id(p) not in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_goes_out_is_what_the_layers_multiply_by(one_process, folders, tmp_path, kind, dtype):
    model = moved(build_model(folders / kind, LAYOUT, dtype, adapters=OF[kind]))
    convert.save_hf(model, folders / kind, tmp_path / "hf")
    again = build_model(tmp_path / "hf", LAYOUT, dtype)
    with torch.no_grad():
        assert torch.equal(again(batch())[0], model(batch())[0])
    trained = by_name(model, OF[kind], lambda p: p.detach().float())
    source = {
        name: tensor.to(dtype).float()
        for name, tensor in load_file(folders / kind / "model.safetensors").items()
    }
    by_hand = fused_by_hand(source, trained, OF[kind].scale)
    for name, tensor in load_file(tmp_path / "hf/model.safetensors").items():
        assert tensor.dtype == dtype
        torch.testing.assert_close(
            tensor, by_hand[name].to(dtype), atol=1e-6, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5
        )


def test_the_adapter_alone_is_in_pefts_format(one_process, folders, tmp_path):
    model = moved(build_model(folders / "qwen2", LAYOUT, torch.float32, adapters=SOME))
    convert.save_adapter(model, SOME, folders / "qwen2", tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["task_type"]) == (2, 7.0, "CAUSAL_LM")
    assert told["target_modules"] == ["q_proj", "v_proj", "up_proj"]
    assert told["base_model_name_or_path"] == str(folders / "qwen2")
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    a = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
    assert found[a].shape == (2, 32)
    assert found[a.replace("lora_A", "lora_B")].shape == (16, 2)
    assert len(found) == 2 * 3 * 2
    by_hand = fused_by_hand(load_file(folders / "qwen2/model.safetensors"), found, 7 / 2)
    for name, tensor in convert.export_hf(model):
        torch.testing.assert_close(tensor, by_hand[name], atol=1e-6, rtol=1e-5)


def test_the_start_depends_on_seed_and_name_alone_and_is_pefts(one_process, folders):
    (model, same) = (build_model(folders / "llama", LAYOUT, torch.float32, adapters=ALL) for _ in range(2))
    first, second = by_name(model, ALL), by_name(same, ALL)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    for name, tensor in first.items():
        assert bool(tensor.any()) == ("lora_A" in name)
    bound = 32**-0.5
    a = first[f"{PEFT}model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert 0.8 * bound < a.abs().max() <= bound
    slot = trained_slots(model.family, LAYOUT, ALL)[0]
    assert not torch.equal(Initial(slot.whole[0], 4).read(slot.whole[0].name, slice(None)), a)


def test_experts_take_none(one_process, folders):
    with pytest.raises(
        ValueError, match=r"the experts of MixtralForCausalLM take no adapters; set it to \[q_proj"
    ):
        build_model(folders / "mixtral", LAYOUT, torch.float32, adapters=ALL)


@pytest.fixture
def make(one_process, folders):
    def trainable(dtype="float32", sharded=False, ema=False) -> Trainable:
        layout = ParallelConfig(distributed_optimizer=sharded)
        model = build_model(folders / "llama", layout, getattr(torch, dtype), adapters=ALL)
        average = EmaConfig(decay=0.6) if ema else None
        return make_trainable(model, OptimizerConfig(lr=0.05, weight_decay=0.1), layout, average)

    return trainable


def step(trainable, seed):
    set_rates(trainable.optimizer, 0.05, OptimizerConfig(weight_decay=0.1))
    trainable.model.zero_grad_buffer()
    trainable.optimizer.zero_grad()
    draw = torch.Generator().manual_seed(seed)
    for parameter in trainable.model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
    assert trainable.step(1.0)[1]


def weights(trainable):
    return {name: p.detach().clone() for name, p in trainable.model.module.named_parameters()}


KINDS = [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]


@pytest.mark.parametrize(("dtype", "sharded"), KINDS)
def test_adapters_alone_have_gradients_moments_and_steps(make, dtype, sharded):
    trainable = make(dtype, sharded)
    before = weights(trainable)
    trained = {name for name in before if ".adapter." in name}
    assert {n for n, p in trainable.model.module.named_parameters() if hasattr(p, "main_grad")} == trained
    step(trainable, 0)
    after = weights(trainable)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    masters = trainable.optimizer.get_parameters()
    assert all(m.dtype == torch.float32 for m in masters)
    assert sum(m.numel() for m in masters) == sum(before[name].numel() for name in trained)


@pytest.mark.parametrize(("dtype", "sharded"), KINDS)
def test_a_resume_goes_on_as_if_nothing_had_been(make, tmp_path, dtype, sharded):
    setup = Setup(dtype, sharded, 1, 1, 1, 1, "digest", "model", ALL.model_dump(mode="json"))
    first = make(dtype, sharded, ema=True)
    step(first, 1)
    Checkpoints(tmp_path, 2, setup).save(1, first)
    stored = StoredTensors(tmp_path / "checkpoints/step-000001")
    assert stored.shapes, "adapters are all that is stored"
    assert all(".adapter." in name for name in stored.shapes)
    second = make(dtype, sharded, ema=True)
    assert Checkpoints(tmp_path, 2, setup).resume(second) == 1
    for trainable in (first, second):
        step(trainable, 2)
    for found, expected in ((weights(second), weights(first)), averages(second, first)):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    other = Setup(dtype, sharded, 1, 1, 1, 1, "digest", "model", LoraConfig(rank=4).model_dump(mode="json"))
    with pytest.raises(
        ValueError, match=r"written with learner\.lora={rank: 3, alpha: 5, .* this run has {rank: 4"
    ):
        Checkpoints(tmp_path, 2, other).resume(second)


def averages(*trainables):
    found = []
    for trainable in trainables:
        with trainable.ema.in_place():
            found.append(weights(trainable))
    return found


def test_a_checkpoint_converts_to_what_the_run_exports_and_is_a_start(make, folders, tmp_path):
    setup = Setup(
        "float32", False, 1, 1, 1, 1, "digest", str(folders / "llama"), ALL.model_dump(mode="json")
    )  # fmt: skip
    trainable = make(ema=True)
    for seed in range(2):
        step(trainable, seed)
    Checkpoints(tmp_path, 2, setup).save(2, trainable)
    path = tmp_path / "checkpoints/step-000002"
    conversion.megatron_to_hf(path, tmp_path / "hf")
    conversion.megatron_to_hf(path, tmp_path / "average", averaged=True)
    model = trainable.model.module
    assert_close(load_file(tmp_path / "hf/model.safetensors"), dict(convert.export_hf(model)))
    with trainable.ema.in_place():
        assert_close(load_file(tmp_path / "average/model.safetensors"), dict(convert.export_hf(model)))
    started = build_model(folders / "llama", LAYOUT, torch.float32, checkpoint=path)
    assert_close(dict(convert.export_hf(started)), dict(convert.export_hf(model)))
    with pytest.raises(
        ValueError,
        match="it holds these alone, which are not cut anew; resume from it as it is",
    ):
        conversion.reshard(path, tmp_path / "again", LAYOUT)


def trained_again(folder, name="model.layers.1.mlp.up_proj.weight"):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1e-4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def started_from(model, init_from=None):
    return fingerprint(ModelConfig(path=str(model), dtype="float32"), init_from and str(init_from))


def saved(make, run_dir, model, **facts):
    """A checkpoint of adapters whose run was told that it started from there."""
    told = {"lora": ALL.model_dump(mode="json"), **facts}
    setup = Setup("float32", False, 1, 1, 1, 1, "digest", str(model), **told)
    Checkpoints(run_dir, 2, setup).save(1, make())
    return run_dir / "checkpoints/step-000001"


def test_adapters_are_laid_on_the_weights_they_were_trained_on_alone(make, folders, tmp_path):
    base, kept = tmp_path / "base", tmp_path / "kept"
    shutil.copytree(folders / "llama", base)
    shutil.copytree(base, kept)
    path = saved(make, tmp_path / "told", base, start=started_from(base))
    older = saved(make, tmp_path / "older", base)
    conversion.megatron_to_hf(path, tmp_path / "hf")
    trained_again(base)
    reason = (
        rf"^{path}: its adapters were trained on other weights than {base} has now; bring those back; "
        r"`slipstream convert megatron-to-hf --model FOLDER` takes them elsewhere$"
    )
    with pytest.raises(ValueError, match=reason):
        conversion.megatron_to_hf(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match=reason):
        build_model(folders / "llama", LAYOUT, torch.float32, checkpoint=path)
    conversion.megatron_to_hf(path, tmp_path / "again", kept)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "hf/model.safetensors"
    ).read_bytes()
    conversion.megatron_to_hf(older, tmp_path / "untold")


def test_adapters_above_a_checkpoint_are_laid_on_that_one_alone(make, folders, tmp_path):
    start, model = tmp_path / "start", tmp_path / "model"
    shutil.copytree(folders / "llama", model)
    conversion.hf_to_megatron(model, start, LAYOUT)
    facts = {"init_from": str(start), "start": started_from(model, start)}
    path = saved(make, tmp_path, model, **facts)
    build_model(model, LAYOUT, torch.float32, checkpoint=path)
    conversion.megatron_to_hf(path, tmp_path / "hf")
    shutil.rmtree(start)
    trained_again(model)
    conversion.hf_to_megatron(model, start, LAYOUT)
    for use in (
        lambda: build_model(model, LAYOUT, torch.float32, checkpoint=path),
        lambda: conversion.megatron_to_hf(path, tmp_path / "other", folders / "llama"),
    ):
        with pytest.raises(
            ValueError, match=f"adapters were trained on other weights than {start} has now; bri"
        ):
            use()


def test_a_value_models_adapters_are_laid_on_the_weights_they_were_trained_on_alone(make, folders, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folders / "llama", base)
    facts = {"value_model": str(base), "value_lora": ALL.model_dump(mode="json")}
    value = build_model(base, LAYOUT, torch.float32, head="score", adapters=ALL)
    trainable = make_trainable(value, OptimizerConfig(lr=0.05), LAYOUT, None)
    setup = Setup("float32", False, 1, 1, 1, 1, "digest", str(base), **facts, value_start=started_from(base))
    Checkpoints(tmp_path, 2, setup).save(1, make(), value=trainable)
    path = tmp_path / "checkpoints/step-000001"
    conversion.megatron_to_hf(path, tmp_path / "hf", value=True)
    trained_again(base)
    with pytest.raises(
        ValueError, match=rf"its value model's adapters were trained on other weights than {base} has now"
    ):
        conversion.megatron_to_hf(path, tmp_path / "other", value=True)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_a_reward_models_row_is_trained_whole(one_process, folders, tmp_path):
    model = build_model(folders / "llama", LAYOUT, torch.float32, head="score", adapters=ALL)
    assert model.score.weight.requires_grad
    moved(model)
    convert.save_hf(model, folders / "llama", tmp_path / "hf")
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = [hf(torch.tensor([p + r])).logits.item() for p, r in rows()]
    found = model(batch(at_target=True))
    ends = torch.tensor([len(r) for _, r in rows()]).cumsum(0) - 1
    assert found[ends].tolist() == pytest.approx(expected, abs=1e-5)
    convert.save_adapter(model, ALL, folders / "llama", tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (told["task_type"], told["modules_to_save"]) == ("SEQ_CLS", ["score"])
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.score.weight"], model.score.weight)


@pytest.mark.parametrize("config", [SftConfig(kind="sft"), RewardConfig(kind="reward")])
def test_an_offline_stage_lowers_its_loss_with_adapters_alone(one_process, folders, config):
    learner = OfflineLearnerConfig(optimizer=OptimizerConfig(lr=0.02))
    stage = make_stage(config)
    model = build_model(folders / "llama", LAYOUT, torch.float32, head=stage.head, adapters=ALL)
    trainable = make_trainable(model, learner.optimizer, LAYOUT)
    trainer = Trainer(learner, stage, trainable, None, steps=8)
    before = weights(trainable)
    prompt, *responses = (np.array(ids, np.int32) for ids in (rows()[0][0], *(r for _, r in rows())))
    scores = (1.0, 0.5, 0.0) if stage.head == "score" else ()
    examples = [Encoded(prompt, tuple(responses), scores)]
    losses = [trainer.update(step, trainer.prepare(examples))["loss"] for step in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    after = weights(trainable)
    trained = {name for name in before if ".adapter." in name or name == "score.weight"}
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained


def test_the_reference_is_the_policy_without_them(make, folders):
    policy, base = make(), build_model(folders / "llama", LAYOUT, torch.float32)
    step(policy, 3)
    (found,) = Reference(policy.model, is_policy=True).logprobs([batch()])
    with torch.no_grad():
        assert torch.equal(found, base(batch())[0])
        assert not torch.equal(policy.model(batch())[0], found), "it is itself again"


def test_modules_are_named_once_and_in_order():
    assert LoraConfig(modules=("down_proj", "q_proj", "q_proj")).modules == ("q_proj", "down_proj")
    assert LoraConfig(rank=8, alpha=4).scale == 0.5
