"""A second set of a model's layers, which takes a version in while the first one serves. For the CPU.

vLLM's own reload takes a layer's weights away before it brings new ones, so the engine must stand still for
all of it: sorting the tensors into the layers, and packing every matrix for the CPU's kernels, which is most
of the time. A twin does that beside decoding, and the pause is left with exchanging references.

A GPU's captured graphs read weights at fixed addresses, and its memory has no room for a second model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

EXCHANGED = ("_parameters", "_buffers", "cpu_linear")
"""What a layer computes with: its tensors, and the packed copy of a matrix that a CPU's kernel reads."""


def can_have_twin(model: nn.Module, device: torch.device) -> bool:
    """Experts share one kernel object between the layers of both sets, so a mixture has no twin."""
    kernels = (getattr(getattr(layer, "quant_method", None), "moe_kernel", None) for layer in model.modules())
    return device.type == "cpu" and not any(kernels)


class Twin:
    """Of a model that vLLM has loaded. Holds a second copy of its weights from `load` until `exchange`."""

    def __init__(self, model: nn.Module, config: ModelConfig, tied: bool) -> None:
        """`tied`: the output layer is the embedding."""
        self._tied = tied
        self._config = config
        self._tensors: dict[int, Tensor] = {}
        self._twins: dict[int, nn.Module] = {}
        self._model = self._twin(model)
        self._loaded = False
        self._pairs = [(layer, self._twins[id(layer)]) for layer in model.modules()]

    def load(self, weights: Any) -> None:
        """Take a whole version in; the model that serves is not touched.

        Args:
            weights: (Hugging Face name, tensor), as for vLLM's `load_weights`.
        """
        self._loaded = False
        initialize_layerwise_reload(self._model)
        try:
            load: Any = self._model.load_weights
            load(weights)
        finally:  # also after an error: it puts every layer back together, fit to be loaded again
            finalize_layerwise_reload(self._model, self._config)
        if self._tied:
            repack_head(self._model)
        self._loaded = True

    def exchange(self) -> None:
        """Give the model that serves what was loaded; it must stand still.

        Raises:
            RuntimeError: Nothing was loaded since the last exchange.
        """
        if not self._loaded:
            raise RuntimeError("no version is loaded to exchange with")
        self._loaded = False
        for layer, twin in self._pairs:
            for name in EXCHANGED:
                if name in layer.__dict__:
                    layer.__dict__[name], twin.__dict__[name] = twin.__dict__[name], layer.__dict__[name]
            twin.__dict__["cpu_linear"] = None  # the old version's packed matrix

    def _twin(self, layer: nn.Module) -> nn.Module:
        """The same layer with tensors of its own; what else it refers to is shared."""
        if id(layer) not in self._twins:
            twin: nn.Module = object.__new__(type(layer))
            twin.__dict__ |= layer.__dict__
            self._twins[id(layer)] = twin
            twin._parameters = {name: self._own(p) for name, p in layer._parameters.items()}  # pyright: ignore
            twin._buffers = {name: self._own(b) for name, b in layer._buffers.items()}
            twin._modules = {name: child and self._twin(child) for name, child in layer._modules.items()}
            twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
            info = get_layerwise_info(layer)
            parameters, buffers = info.restore_metadata
            LAYERWISE_INFO[twin] = LayerReloadingInfo(
                ({n: to_meta_tensor(p) for n, p in parameters.items()},
                 {n: to_meta_tensor(b) for n, b in buffers.items()}),
                info.restore_device,
            )  # fmt: skip
        return self._twins[id(layer)]

    def _own(self, tensor: Tensor | None) -> Any:
        """A copy with the tensor's class and attributes; tied ones stay tied."""
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            copy = tensor.data.clone()
            copy.__class__ = tensor.__class__
            vars(copy).update(vars(tensor))
            self._tensors[id(tensor)] = copy
        return self._tensors[id(tensor)]


def repack_head(model: nn.Module) -> None:
    """Give a tied output layer the new embeddings where it does not read them from the shared parameter.

    On CPU a linear layer computes with a packed copy of its weight, made when the weight is loaded and held
    by `layer.cpu_linear`. A tied head is loaded no weight of its own, so the reload never packs it anew, and
    it would go on with the first version's embeddings.
    """
    head: Any = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
