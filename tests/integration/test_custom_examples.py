"""The examples of docs/custom.md, each started as it is shipped, on a made model; `two-judges.yaml` is in
`test_reward_models.py`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_runs import Run, learn, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOME = Path(__file__).parents[2]
SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
STEPS = 2
TEMPLATE = (
    "{% for m in messages %}<im> {{ m['role'] }} {{ m['content'] }} <eos> nl {% endfor %}"
    "{% if add_generation_prompt %}<im> assistant{% endif %}"
)
WORDS = ["<pad>", "<eos>", "<im>", "nl", "user", "assistant", "Higher.", *map(str, range(1, 10))]


@pytest.fixture(scope="module")
def digits_model(tmp_path_factory) -> Path:
    """A Llama of sixteen words, nine of them digits and one the end: it answers with numbers, in turns."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("digits") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def started(digits_model, tmp_path) -> Callable[..., tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Runs an example for two steps as its head says; gives the steps' metrics and the samples."""

    def start(name: str, *more: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        small = ("rollout.engine.kv_cache_gib=0.25", "logging.samples_every=1", "eval=null")
        own = (f"model.path={digits_model}", f"run_dir={tmp_path}/run", f"learner.steps={STEPS}")
        command = [SLIPSTREAM, "run", f"configs/custom/{name}.yaml", *own, *small, *more]
        done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        metrics, samples = (
            [json.loads(line) for line in (tmp_path / "run" / file).read_text().splitlines()]
            for file in ("metrics.jsonl", "samples.jsonl")
        )
        assert [row["step"] for row in metrics] == [1, 2]
        return metrics, samples

    return start


@pytest.mark.long
def test_a_reward_of_ones_own_beside_the_rule_of_the_demo(started):
    rows, samples = started("brevity")
    for row in rows:
        right, short = row["reward_parts/brevity/right"], row["reward_parts/brevity/short"]
        assert row["reward_parts/answer"] == right, "both ask the same of a number"
        assert short <= right
        assert row["reward/mean"] == pytest.approx(right + 0.5 * (right + short))
    for sample in samples:
        parts = sample["reward_parts"]
        words = max(1, len(sample["text"].split()))
        assert parts["brevity/short"] == pytest.approx(parts["brevity/right"] * min(1.0, 10 / words))


@pytest.mark.long
def test_an_environment_of_several_turns_with_its_prompts_and_its_reward(started):
    rows, samples = started("guess", "rollout.sampling.max_tokens=48")
    assert {sample["turns"] for sample in samples} & {2, 3}, "it guesses again"
    for sample in samples:
        parts = sample["reward_parts"]
        early = 0.2 * (3 - sample["turns"]) * parts["answer/found"]
        assert parts["answer/early"] == pytest.approx(early)
        total = parts["answer/found"] + parts["answer/early"] + parts["answer/form"]
        assert sample["reward"] == pytest.approx(total)
    for row in rows:
        named = [f"reward_parts/answer/{part}" for part in ("found", "early", "form")]
        assert row["reward/mean"] == pytest.approx(sum(row[name] for name in named))


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict[str, Run]:
    """By the real learner on recorded batches, all in one process; of each example also what it replaces."""
    root = tmp_path_factory.mktemp("learned")
    model, lr = make_model(root / "model"), {"lr": 0.5, "warmup_steps": 0, "schedule": "constant"}
    changes: dict[str, dict[str, Any]] = {
        "anneal": {},
        "anneal-main-loop": {"loop": None},
        "anneal-grpo": {"algorithm": {"advantage": "grpo"}},
        "dual_clip": {"optimizer": lr},
        "dual_clip-ppo": {"optimizer": lr, "algorithm": {"loss": "ppo"}},
    }
    runs = {}
    for name, learner in changes.items():
        run = Run(root / name, model, **learner)
        run.experiment["base"] = str(HOME / f"configs/custom/{name.partition('-')[0]}.yaml")
        runs[name] = run
    learn(1, list(runs.values()))
    return runs


def test_a_loop_of_ones_own_charges_a_rising_price_and_an_advantage_takes_ranks(learned):
    rows = learned["anneal"].rows
    assert [row["own/price"] for row in rows] == pytest.approx([0.02 * k / 4 for k in range(4)])
    in_main_loop, in_grpo = (learned[f"anneal-{name}"].rows for name in ("main-loop", "grpo"))
    assert rows[0]["grad_norm"] == in_main_loop[0]["grad_norm"], "the first price is 0"
    assert rows[1]["grad_norm"] != in_main_loop[1]["grad_norm"]
    assert "own/price" not in in_main_loop[0]
    assert rows[0]["grad_norm"] != in_grpo[0]["grad_norm"]
    assert learned["anneal"].told("published") == list(range(5))


def test_a_loss_of_ones_own_bounds_what_ppo_does_not(learned):
    """Its first update is PPO's, so the second finds the same policy: with less loss, as bad tokens grew."""
    dual, ppo = (learned[name].rows[0] for name in ("dual_clip", "dual_clip-ppo"))
    assert dual["loss"] < ppo["loss"] - 1e-3
