"""What tests of whole services run on: a made model of two layers, and an experiment around it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.placement import free_port

REWARD = '''
def share_of_even_words(text, row):
    """A uniform policy gets about a half."""
    words = [w for w in text.split() if w.startswith("t")]
    return sum(int(w[1:]) % 2 == 0 for w in words) / max(len(words), 1)
'''


@pytest.fixture(scope="session")
def made_model(tmp_path_factory) -> Path:
    """A Llama with tied embeddings, random weights, and words t3 to t63 as tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("made") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, 64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def free_address() -> Callable[[], str]:
    def find() -> str:
        return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"

    return find


@pytest.fixture(scope="session")
def made_reward_model(made_model, tmp_path_factory) -> Path:
    """A Llama that gives one score, far outside of 0 to 1, and has the made model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("made") / "reward"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=0,
    )
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(made_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_experiment(made_model, tmp_path_factory) -> Callable[..., Path]:
    """Makes a folder with a reward of its own, prompts, and `experiment.yaml`; keywords override sections."""

    def make(name: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "my_reward.py").write_text(REWARD)
        rows = [{"prompt": f"t{i} t{i + 1}"} for i in range(3, 43)]
        (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        settings: dict[str, Any] = {
            "name": name,
            "run_dir": "run",
            "model": {"path": str(made_model), "max_length": 64, "dtype": "float32"},
            "data": {"train": {"kind": "jsonl", "path": "prompts.jsonl"}},
            "rollout": {
                "group_size": 8,
                "sampling": {"max_tokens": 12},
                "engine": {"kv_cache_gib": 0.25, "max_num_seqs": 64},
                "rewards": {"even": {"function": "my_reward:share_of_even_words"}},
            },
            "buffer": {"groups_per_batch": 4, "max_staleness": 2, "address": "tcp://127.0.0.1:0"},
            "sync": {"address": "tcp://127.0.0.1:0"},
            "learner": {"optimizer": {"lr": 3e-3}, "checkpoint": {"every": 4}},
            "eval": {"source": {"kind": "jsonl", "path": "prompts.jsonl"}, "samples": 1},
        }
        for section, values in changes.items():
            known = settings.get(section, {})
            settings[section] = known | values if isinstance(values, dict) else values
        (folder / "experiment.yaml").write_text(yaml.safe_dump(settings))
        return folder

    return make
