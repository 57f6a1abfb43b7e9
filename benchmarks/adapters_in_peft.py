"""Whether an exported adapter is what Hugging Face's `peft` takes it for.

    pip install peft
    python benchmarks/adapters_in_peft.py

`peft` is no dependency of the project. Made models of every kind get adapters whose A and B are no zeros any
more, are exported as a run exports them (`RUN_DIR/adapter` and `RUN_DIR/model`), and are opened by `peft`
beside the base. Compared are the logits, or scores, of the two folders, and, of policies, with the logprobs
of the learner's own model; float32, the largest difference of any number. Writes
benchmarks/results/adapters_in_peft.json.
"""

import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import write_result
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from learner import convert, parallel
from learner.adapter import Adapter
from learner.config import LoraConfig, ParallelConfig
from learner.layout import Row, lay_out
from learner.model import build_model

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ATTENTION = LoraConfig(rank=4, alpha=12, modules=("q_proj", "k_proj", "v_proj", "o_proj"))
ALL = LoraConfig(rank=4, alpha=12)
KINDS: dict[str, tuple[Any, LoraConfig]] = {
    "Llama, tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), ALL),
    "Mistral": (MistralConfig(**SIZES), LoraConfig(rank=4, alpha=12, modules=("v_proj", "down_proj"))),
    "Qwen2": (Qwen2Config(**SIZES), ALL),
    "Qwen3": (Qwen3Config(**SIZES, head_dim=16), ALL),
    "Mixtral, attention": (MixtralConfig(**SIZES, num_local_experts=4), ATTENTION),
}
IDS = torch.randint(1, 128, (3, 24), generator=torch.Generator().manual_seed(7))


def main() -> None:
    from peft import PeftModel

    parallel.initialize(ParallelConfig(), seed=3)
    figures: dict[str, Any] = {}
    for kind, (config, lora) in KINDS.items():
        for head in ("vocabulary", "score") if kind.startswith("Llama") else ("vocabulary",):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                model = exported(folder, config, lora, head)
                load = AutoModelForCausalLM if head == "vocabulary" else AutoModelForSequenceClassification
                name = kind if head == "vocabulary" else f"{kind}, reward model"
                figures[name] = compared(load, PeftModel, folder, model)
    parallel.shutdown()
    versions = {name: importlib.metadata.version(name) for name in ("peft", "transformers")}
    write_result("adapters_in_peft", {**versions, "largest_difference": figures})
    assert all(found < 1e-4 for of in figures.values() for key, found in of.items() if key != "base")


def exported(folder: Path, config: Any, lora: LoraConfig, head: Any) -> Any:
    """The learner's model, once its folders are written."""
    torch.manual_seed(5)
    of = AutoModelForCausalLM if head == "vocabulary" else AutoModelForSequenceClassification
    config.num_labels = 1 if head == "score" else 2
    base = of.from_config(config)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    base.save_pretrained(folder / "base")
    assert AutoConfig.from_pretrained(folder / "base").architectures
    model = build_model(folder / "base", ParallelConfig(), torch.float32, head=head, adapters=lora)
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in adapters_of(model):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
        if head == "score":
            model.score.weight.add_(torch.randn(model.score.weight.shape, generator=draw))
    convert.save_adapter(model, lora, folder / "base", folder / "adapter")
    convert.save_hf(model, folder / "base", folder / "model")
    return model


def adapters_of(model: Any) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Adapter):
            yield from module.parameters()


@torch.no_grad()
def compared(load: Any, peft: Any, folder: Path, model: Any) -> dict[str, float]:
    """Largest differences to what `peft` computes; `base` is how far the adapters move the base's."""
    base = load.from_pretrained(folder / "base", dtype=torch.float32).eval()
    plain = base(IDS).logits
    adapted = peft.from_pretrained(base, folder / "adapter").eval()(IDS).logits
    fused = load.from_pretrained(folder / "model", dtype=torch.float32).eval()(IDS).logits
    found = {"fused folder": distance(adapted, fused), "base": distance(adapted, plain)}
    if model.family.head == "vocabulary":
        logprobs, _ = model.eval()(batch(), 1.0)
        wanted = adapted.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None]).flatten()
        found["learner's logprobs"] = distance(logprobs, wanted)
    return found


def batch() -> Any:
    """Every token but each row's first is a target."""
    rows = [
        [Row(i, ids[:1].numpy().astype(np.int32), ids[1:].numpy().astype(np.int32), np.arange(len(ids) - 1))]
        for i, ids in enumerate(IDS)
    ]
    return lay_out(rows)


def distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max())


if __name__ == "__main__":
    main()
