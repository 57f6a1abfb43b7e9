import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest

SMOLLM2 = Path(__file__).parents[3] / ".cache/models/SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smollm2():
    if not (SMOLLM2 / "config.json").exists():
        pytest.fail(f"{SMOLLM2} is missing: run `python -m launch.demo_model` first")
    return SMOLLM2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Llama of four layers with untied embeddings, random weights, and words t3 to t511 as tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,  # far from uniform, so that a wrong logprob shows
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # Models ship sampling defaults: none may reach the sampler, or the logprobs would be of another policy.
    shipped = folder / "generation_config.json"
    defaults = {"do_sample": True, "temperature": 0.3, "top_k": 1, "top_p": 0.1, "repetition_penalty": 3.0}
    shipped.write_text(json.dumps(json.loads(shipped.read_text()) | defaults))
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, 512)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    return folder
