"""Online DPO on real Megatron, with the weights' average and pretraining text beside it.

Every layout, a resume that goes on exactly, checkpoints by the clock, and a policy that learns.
"""

import json
import shutil

import pytest
import torch
from learner_runs import STEPS, Run, assert_same, continued, learn, make_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from learner import conversion

pytestmark = pytest.mark.slow

DPO = {"loss": "dpo", "dpo": {"beta": 0.2, "label_smoothing": 0.05}}
LEARNING = {"steps": 14, "algorithm": {"loss": "dpo"}, "optimizer": {"lr": 2e-2}, "checkpoint": {"every": 14}}
LORA = {"rank": 2, "alpha": 8}
COMPARED = (
    *("dpo/accuracy", "dpo/margin", "dpo/chosen", "dpo/rejected", "dpo/pairs", "dpo/groups_without_pair"),
    *("ptx/loss", "ptx/tokens", "kl/completion"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("model"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(path)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (31,), generator=draw).tolist()
    texts = [torch.randint(3, 128, (n,), generator=draw).tolist() for n in lengths]
    rows = [{"text": " ".join(f"w{i}" for i in ids)} for ids in texts]
    (path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model, **changes):
    """Two updates of a batch, with 7 texts each; the average at a decay that a few steps show."""
    return {
        "updates_per_batch": 2,
        "algorithm": DPO,
        "ema": {"decay": 0.6},
        "ptx": {
            "data": {"kind": "jsonl", "path": str(model / "texts.jsonl")},
            "coefficient": 0.5,
            "batch_size": 7,
        },
        "checkpoint": {"every": 2, "export": True},
        **changes,
    }


def average_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "run/ema_model/model.safetensors")


def assert_all_same(got: Run, expected: Run, rel: float) -> None:
    """What is told of the pairs and the text, and the average, too."""
    assert_same(got, expected, rel)
    for one, two in zip(got.rows, expected.rows, strict=True):
        # At first the policy is its reference: rounding alone puts the pairs in order.
        for key in COMPARED if one["step"] > 1 else COMPARED[1:]:
            assert one[key] == pytest.approx(two[key], rel=rel, abs=rel / 10), (one["step"], key)
    found = average_of(got)
    for name, tensor in average_of(expected).items():
        assert torch.allclose(found[name], tensor, rtol=rel, atol=rel), name


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """What one process does; the first run ended by SIGKILL at batch 3, behind the checkpoint of step 2."""
    root = tmp_path_factory.mktemp("one")
    killed = Run(root / "killed", model, options={"kill_at": 3}, **settings(model))
    learn(1, [killed], killed=True)
    clocked = {"every": None, "every_s": 1e-6, "keep": 9, "export": True}
    runs = {
        "whole": Run(root / "whole", model, **settings(model)),
        "resumed": continued(killed, model, "resumed", **settings(model)),
        "bfloat16": Run(root / "bfloat16", model, dtype="bfloat16", **settings(model, checkpoint=clocked)),
        "lora": Run(root / "lora", model, **settings(model, lora=LORA)),
        "learning": Run(root / "learning", model, options={"own_samples": str(model)}, **LEARNING),
    }
    learn(1, list(runs.values()))
    return {"killed": killed, **runs}


@pytest.fixture(scope="module")
def two(model, one, tmp_path_factory):
    """What two processes do; "moved" goes on under another layout."""
    root = tmp_path_factory.mktemp("two")
    layouts = {"data": {"distributed_optimizer": True}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    runs = {
        name: Run(root / name, model, layout=layout, **settings(model)) for name, layout in layouts.items()
    }
    runs["moved"] = continued(one["killed"], model, "moved", layout={"tensor": 2}, **settings(model))
    learn(2, list(runs.values()))
    return runs


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline", "moved"])
def test_every_layout_gives_the_same_numbers(layout, one, two):
    rows = one["whole"].rows
    assert all(r["dpo/pairs"] > 0 and r["ptx/texts"] + r["ptx/left_out"] == 14 for r in rows)
    assert_all_same(two[layout], one["whole"], rel=1e-3)


def test_published_are_the_adapters_fused_with_their_weights(one):
    run = one["lora"]
    exported = load_file(run.folder / "run/model/model.safetensors")
    assert exported.keys() == run.weights.keys()
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in exported.items())


def test_a_killed_learner_goes_on_exactly_with_its_average_and_its_place_in_the_text(one):
    assert [r["step"] for r in one["killed"].rows] == [1, 2, 3]
    assert "resumed from" in one["resumed"].log
    assert_all_same(one["resumed"], one["whole"], rel=0)


def test_the_average_follows_the_published_weights(one):
    """It lags behind them, and is exported in the model's type."""
    run, name = one["whole"], "model.layers.0.mlp.up_proj.weight"
    last = load_file(run.folder / "run/model/model.safetensors")[name]
    assert torch.equal(last, run.weights[name]), "exporting the average leaves the weights as they were"
    assert not torch.equal(average_of(run)[name], last)
    assert average_of(one["bfloat16"])[name].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["whole", "bfloat16"])
def test_a_checkpoints_average_converts_to_what_was_exported(name, one, tmp_path):
    checkpoint = one[name].folder / f"run/checkpoints/step-{STEPS:06d}"
    conversion.megatron_to_hf(checkpoint, tmp_path / "hf", averaged=True)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), average_of(one[name])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    shutil.rmtree(tmp_path / "hf")
    plain = one["learning"].folder / "run/checkpoints/step-000014"
    with pytest.raises(ValueError, match=r"no average of the weights in it; its run had no learner\.ema"):
        conversion.megatron_to_hf(plain, tmp_path / "hf", averaged=True)


def test_checkpoints_come_by_the_clock(one):
    found = sorted(p.name for p in (one["bfloat16"].folder / "run/checkpoints").iterdir())
    assert found == [f"step-{step:06d}" for step in range(1, STEPS + 1)]


def test_a_policy_that_answers_itself_learns_from_its_pairs(one):
    rows = one["learning"].rows
    rewards = [r["reward/mean"] for r in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert all(r["rho/mean"] == pytest.approx(1, abs=1e-3) for r in rows), "its own samples, at once"
    assert sum(r["dpo/accuracy"] for r in rows[-3:]) / 3 > sum(r["dpo/accuracy"] for r in rows[:2]) / 2
