"""Low-rank adapters (LoRA, arXiv 2106.09685): W' = W + alpha / rank · B · A, with W frozen and B first zero.

What they are called, how a layout cuts them, and W' out of what is stored; `learner/adapter.py` trains them.
Shapes: A [rank, in] and B [out, rank] for each adapted module of Hugging Face's, also where Megatron keeps
several of them in one linear.
"""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.config import LoraConfig, ParallelConfig
from learner.families import Family
from learner.safetensors_folder import WholeTensors
from learner.slots import ALL, RowSlot, Slot, StackedSlot, Whole, slots

PEFT = "base_model.model."
"""Before a module's name, in the format of Hugging Face's `peft`."""


def factors(slot: Slot, config: LoraConfig) -> dict[str, tuple[Slot, Slot]]:
    """The slots of A and B of every adapted module whose weight lies in `slot`, by the module's name.

    Of a column-parallel weight every tensor rank has A and its rows of B; of a row-parallel one its columns
    of A, and B. Where tensor ranks share key-value heads, a rank's rows of q, k and v are an equal part of
    all three together and of none by itself: every rank then has B whole.
    """
    found: dict[str, tuple[Slot, Slot]] = {}
    if slot.expert is not None:
        return found
    home = slot.parameter.removesuffix("weight") + "adapter."
    of_a, of_b = (Slot, StackedSlot) if isinstance(slot, StackedSlot) else (RowSlot, Slot)
    if isinstance(slot, StackedSlot) and slot.splits_groups:
        of_b = Slot
    for name, shape in slot.whole:
        path, _, kind = name.rpartition(".")
        module = path.rpartition(".")[2]
        if kind == "weight" and module in config.modules:
            a = Whole(f"{PEFT}{path}.lora_A.weight", (config.rank, shape[1]))
            b = Whole(f"{PEFT}{path}.lora_B.weight", (shape[0], config.rank))
            found[module] = (
                of_a(f"{home}a.{module}", slot.stage, (a,), slot.tensor),
                of_b(f"{home}b.{module}", slot.stage, (b,), slot.tensor, slot.groups),
            )
    return found


def trained_slots(family: Family, layout: ParallelConfig, config: LoraConfig) -> list[Slot]:
    """Every parameter that is trained, by `peft`'s names: the adapters', and a score model's new row."""
    every = slots(family, layout)
    found = [slot for of in every for pair in factors(of, config).values() for slot in pair]
    for slot in every:
        if slot.parameter == "score.weight":
            (whole,) = slot.whole
            found.append(replace(slot, whole=(Whole(PEFT + whole.name, whole.shape),)))
    return found


def fuse(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B · A, added in float32 and rounded to the type of W."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


class Initial:
    """`WholeTensors` of a new adapter: A as `peft` draws it, uniform within 1 / √in, and B zero.

    It depends on the seed and the name alone, so that every layout starts from the same.
    """

    def __init__(self, whole: Whole, seed: int) -> None:
        self._whole = whole
        self._seed = seed

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        assert (name, shape) == self._whole

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        values = torch.zeros(self._whole.shape)
        if name.endswith(".lora_A.weight"):
            digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
            bound = 1 / math.sqrt(values.shape[1])
            values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(digest)))
        return values[rows, ALL if columns is None else columns]


class FusedFolder:
    """`WholeTensors` of a frozen base and the adapters trained on it, by the base's names."""

    def __init__(
        self,
        base: WholeTensors,
        trained: WholeTensors,
        family: Family,
        config: LoraConfig,
        dtype: torch.dtype,
    ) -> None:
        """Args:
        trained: By the names of `trained_slots`.
        dtype: Of the weights in training: the base is rounded to it first.
        """
        self._base = base
        self._trained = trained
        self._config = config
        self._dtype = dtype
        self._names = {w.name for slot in trained_slots(family, ParallelConfig(), config) for w in slot.whole}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if PEFT + name in self._names:
            self._trained.check(PEFT + name, shape)
        else:
            self._base.check(name, shape)

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        if PEFT + name in self._names:
            return self._trained.read(PEFT + name, rows, columns)
        base = self._base.read(name, rows, columns).to(self._dtype)
        path = PEFT + name.removesuffix(".weight")
        if f"{path}.lora_A.weight" not in self._names:
            return base
        a = self._trained.read(f"{path}.lora_A.weight", ALL, columns)
        return fuse(base, a, self._trained.read(f"{path}.lora_B.weight", rows), self._config.scale)


def peft_config(family: Family, config: LoraConfig, base: Path) -> str:
    """The adapter_config.json by which `peft` puts the adapters on the model of folder `base`."""
    score = family.head == "score"
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if score else "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.modules),
        "modules_to_save": ["score"] if score else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return json.dumps(fields, indent=2) + "\n"
