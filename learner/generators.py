"""The random generators' states of each rank, in a checkpoint beside its weights."""

from pathlib import Path
from typing import Any

import torch

from learner import parallel


def save(folder: Path) -> None:
    """Write those of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import save_file

    tracker: Any = get_cuda_rng_tracker()
    named = {f"tracker.{k}": v for k, v in tracker.get_states().items()}
    save_file({"torch": torch.get_rng_state(), **named}, _file(folder))


def load(folder: Path) -> None:
    """Go on from them."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import load_file

    states = load_file(_file(folder))
    torch.set_rng_state(states.pop("torch"))
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states({k.removeprefix("tracker."): v for k, v in states.items()})


def _file(folder: Path) -> Path:
    return folder / f"rng-{parallel.rank():05d}.safetensors"
