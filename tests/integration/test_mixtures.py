"""Mixtures of experts on real Megatron over gloo: however experts are dealt out, training is the same."""

import shutil

import pytest
import torch
from learner_runs import STEPS, Run, assert_same, continued, learn
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner import conversion
from learner.config import ParallelConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of four experts, two of them for every token."""
    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.05,
        dtype="float32",
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def resharded(run: Run, step: int, **layout) -> Run:
    """It goes on with nothing but its checkpoint of that step, cut for another layout."""
    checkpoints = run.folder / "run/checkpoints"
    written = checkpoints.rename(checkpoints.with_name("as-written"))
    whole = written / f"step-{step:06d}"
    conversion.reshard(whole, checkpoints / whole.name, ParallelConfig(**layout))
    return run


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    """The weights as a checkpoint cut for four ranks, beside a folder that has the model's shape alone."""
    folder = tmp_path_factory.mktemp("converted")
    conversion.hf_to_megatron(model, folder / "checkpoint", ParallelConfig(tensor=2, expert=4))
    shutil.copytree(model, folder / "shape")
    (folder / "shape" / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def runs(model, converted, tmp_path_factory):
    """Two processes, then one, then four; some go on where fewer or more left off."""
    root = tmp_path_factory.mktemp("runs")
    sharded = {"distributed_optimizer": True}
    made: dict[str, Run] = {
        "expert": Run(
            root / "expert",
            converted / "shape",
            init_from=str(converted / "checkpoint"),
            layout={"expert": 2},
        ),
        "tensor-expert": Run(root / "tensor-expert", model, layout={"tensor": 2, "expert": 2}),
        "cut-at-two": Run(
            root / "cut-at-two", model, layout={"expert": 2, **sharded}, options={"stop_at": 2}
        ),
    }
    learn(2, list(made.values()))
    one = {
        "whole": Run(root / "whole", model),
        "cut-at-one": Run(root / "cut-at-one", model, options={"stop_at": 2}),
        "from-two": continued(made["cut-at-two"], model, "from-two", layout=sharded),
    }
    learn(1, list(one.values()))
    four = {
        "data-expert": Run(root / "data-expert", model, layout={"expert": 2, **sharded}),
        "all": Run(root / "all", model, layout={"tensor": 2, "expert": 4}, recompute=True),
        "pipeline": Run(root / "pipeline", model, layout={"pipeline": 2, "expert": 2}),
        "from-one": continued(one["cut-at-one"], model, "from-one", layout={"tensor": 2, "expert": 2}),
        "from-two-sharded": continued(
            made["cut-at-two"], model, "from-two-sharded", layout={"expert": 4, **sharded}
        ),
    }
    resharded(four["from-two-sharded"], 2, tensor=2, expert=4)
    learn(4, list(four.values()))
    return made | one | four


@pytest.mark.parametrize("layout", ["expert", "tensor-expert", "data-expert", "all", "pipeline"])
def test_experts_dealt_out_train_as_in_one_process(layout, runs):
    """Losses, gradient norms before clipping, and exported weights."""
    assert_same(runs[layout], runs["whole"], rel=1e-3)


@pytest.mark.parametrize("resumed", ["from-two", "from-one", "from-two-sharded"])
def test_a_checkpoint_resumes_under_another_expert_size(resumed, runs):
    assert "resumed from" in runs[resumed].log
    assert_same(runs[resumed], runs["whole"], rel=1e-3)


@pytest.mark.parametrize("name", ["whole", "tensor-expert", "data-expert", "pipeline"])
def test_a_checkpoint_converts_to_the_weights_that_were_published(name, runs, tmp_path):
    checkpoint = runs[name].folder / f"run/checkpoints/step-{STEPS:06d}"
    conversion.megatron_to_hf(checkpoint, tmp_path / "hf")
    found, expected = load_file(tmp_path / "hf/model.safetensors"), runs[name].weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
