"""Megatron on a machine without CUDA: where megatron-core 0.16.1 assumes CUDA, and what each place becomes.

`apply` is called once, before any model is built, by `learner.parallel.initialize`, and only where torch has
no CUDA. Every place was found by removing its entry and seeing training fail; a place that moved in another
megatron-core ends the start with its name, instead of a wrong number later.
"""

import importlib
import importlib.metadata
import types
import warnings
from typing import Any

import torch

MEGATRON_VERSION = "0.16.1"

LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
"""Constants inside megatron's functions, and what they are on CPU."""

LITERAL_PLACES: dict[str, str] = {
    "pipeline_parallel.schedules:forward_backward_no_pipelining": "counts tokens on device cuda",
    "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": (
        "counts tokens on device cuda"
    ),
    "optimizer.clip_grads:get_grad_norm_fp32": "overflow buffer and norm on device cuda",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32": "asserts that gradients are torch.cuda.FloatTensor",
    "optimizer.optimizer:MixedPrecisionOptimizer.__init__": "unit loss scale on device cuda (bfloat16)",
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__": (
        "sorts parameters by torch.cuda types (bfloat16)"
    ),
    "optimizer.optimizer:FP32Optimizer.__init__": "unit loss scale on device cuda (float32)",
    "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": (
        "sorts parameters by torch.cuda types"
    ),
    "utils:local_multi_tensor_l2_norm": "returns the gradient norm on device cuda",
}
"""`module:function` under megatron.core whose code holds one of LITERALS, and what it does with it."""

_applied = False


class MovedPlaceError(RuntimeError):
    """This megatron-core is not the one whose CUDA assumptions are listed here."""


def apply() -> None:
    """Adapt megatron-core to this machine's CPU. Does nothing the second time.

    Raises:
        MovedPlaceError: Another megatron-core is installed, or a listed place is not where it was.
    """
    global _applied
    if _applied:
        return
    assert not torch.cuda.is_available(), "the CPU backend would break training on CUDA"
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise MovedPlaceError(
            f"megatron-core {found} is installed, the CPU backend knows {MEGATRON_VERSION}; "
            f"install megatron-core=={MEGATRON_VERSION}"
        )
    with warnings.catch_warnings():
        # On CPU their absence is no news.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        _replace_names()
        for place in LITERAL_PLACES:
            rewrite_literals(place)
    _applied = True


def _replace_names() -> None:
    """Names that raise "Torch not compiled with CUDA enabled"."""
    # Some twenty sites allocate on `device=torch.cuda.current_device()`: DDP's buffers, what p2p receives.
    _set(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # p2p_communication waits for its batched sends; dist_checkpointing before it reads tensors. CPU
    # operations are done when they return.
    _set(torch.cuda, "synchronize", lambda *_args, **_kwargs: None)
    # language_module moves the tied embedding before its all-reduce; the optimizer moves what it reloads.
    _set(torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
    # tensor_parallel.random keeps a generator state per name and swaps it in; here it is the CPU generator's.
    _set(torch.cuda, "get_rng_state", lambda *_args, **_kwargs: torch.get_rng_state())
    _set(torch.cuda, "manual_seed", torch.manual_seed)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # The all-to-all dispatcher of experts copies its counts to the host on a stream of its own.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    _set(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none")
    _set(dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _counts_at_hand)
    _set(random, "_set_cuda_rng_state", lambda state, *_args, **_kwargs: torch.set_rng_state(state))
    _set(random, "_get_cuda_rng_state", lambda *_args, **_kwargs: torch.get_rng_state())


def _counts_at_hand(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Counts are on the host already; the collective only wants those of each rank as numpy's."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(dispatcher, name)
            if torch.is_tensor(counts):
                setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


def _set(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise MovedPlaceError(
            f"the CPU backend replaces {owner.__name__}.{name}, which is not there any more"
        )
    setattr(owner, name, value)


def rewrite_literals(place: str) -> None:
    """Swap LITERALS among the constants of one function of megatron-core, in place.

    Rewriting the constants costs nothing per call; a TorchFunctionMode that maps the device would tax every
    operation, and a copy of these functions would be hundreds of lines.

    Raises:
        MovedPlaceError: The function is gone, or holds none of the literals.
    """
    module_name, _, path = place.partition(":")
    target: Any = importlib.import_module(f"megatron.core.{module_name}")
    for part in path.split("."):
        target = getattr(target, part, None)
    target = getattr(target, "__func__", target)
    target = getattr(target, "__wrapped__", target)
    code = getattr(target, "__code__", None)
    if code is None:
        raise MovedPlaceError(f"the CPU backend rewrites megatron.core.{place}, which is not there")
    swapped = _swap(code)
    if swapped.co_consts == code.co_consts:
        raise MovedPlaceError(f"the CPU backend rewrites megatron.core.{place}, which has no CUDA literal")
    target.__code__ = swapped


def _swap(constant: Any) -> Any:
    if isinstance(constant, str):
        return LITERALS.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_swap(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_swap(item) for item in constant.co_consts))
    return constant
