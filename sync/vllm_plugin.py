"""Inside vLLM's workers: receives versions in the background and loads them while the engine is paused.

vLLM finds `register` through the entry point `vllm.general_plugins` in each of its processes. The front
process (`sync.vllm_sink`) drives the engine through vLLM's own weight-transfer calls: init begins a staging,
shutdown drops it, and start, update, finish load what is staged. vLLM has no call that asks a transfer engine
how far it is, so a worker extension adds one.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from sync.buckets import unpack
from sync.errors import ManifestRefused
from sync.expected import ExpectedModel, read_specs
from sync.group import Seat
from sync.manifest import Manifest
from sync.stager import Stager

logger = logging.getLogger(__name__)

BACKEND = "slipstream"


def register() -> None:
    """Make the backend known; vLLM may call this several times in one process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "sync.vllm_plugin", "StagingEngine")
        logging.getLogger(initialize_layerwise_reload.__module__).addFilter(_is_worth_a_warning)


def _is_worth_a_warning(record: logging.LogRecord) -> bool:
    """At every load vLLM warns of layers that got no weights; these two never have any of their own.

    A rotary embedding is a table, and an output layer is tied, or else `ExpectedModel` asks for its weight.
    """
    return not record.getMessage().startswith(("RotaryEmbedding: ", "ParallelLMHead: "))


@dataclass
class StageOrder(WeightTransferInitInfo):
    """`sync.sink.StagePlan` in plain values; made by VllmSink, read by StagingEngine."""

    version: int
    epoch: int
    fresh: bool
    host: str
    port: int
    first_rank: int
    group_size: int
    backend: str
    timeout_s: float
    manifest: bytes
    """msgpack of `Manifest.to_wire`: one value, where vLLM's own encoding would walk every tensor's row."""


@dataclass
class LoadOrder(WeightTransferUpdateInfo):
    version: int


class StagingEngine(WeightTransferEngine[StageOrder, LoadOrder]):
    """One worker's side of every publish."""

    init_info_cls = StageOrder
    update_info_cls = LoadOrder
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stager = Stager(self.device)
        self._expected: ExpectedModel | None = None
        self._refusal: str | None = None

    def init_transfer_engine(self, init_info: StageOrder) -> None:
        """Begin to stage a version; returns at once. A manifest of another model is refused in the status."""
        manifest = Manifest.from_wire(msgpack.unpackb(init_info.manifest))
        self._refusal = self._objection(manifest)
        if self._refusal is not None:
            self._stager.drop()
            return
        seat = Seat(
            init_info.host, init_info.port, init_info.epoch, init_info.first_rank + self.parallel_config.rank,
            init_info.group_size, init_info.backend, init_info.timeout_s,
        )  # fmt: skip
        self._stager.begin(seat, init_info.fresh, init_info.version, manifest)

    def status(self) -> dict[str, object]:
        if self._refusal is not None:
            return {"state": "failed", "cause": ManifestRefused.cause, "reason": self._refusal}
        return self._stager.status()

    def start_weight_update(self) -> None:
        """Nothing yet: what takes the weights away belongs together with what brings them."""

    @torch.inference_mode()
    def receive_weights(self, update_info: LoadOrder) -> None:
        """Load what is staged. The engine must be paused: half-way through, its weights are on no device."""
        manifest, stream = self._stager.staged(update_info.version)
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        weights = (pair for pair in unpack(manifest, stream) if not (tied and pair[0] == "lm_head.weight"))
        with _experts_packed_anew(self.model, self.device):
            initialize_layerwise_reload(self.model)
            try:
                load: Any = self.model.load_weights
                load(weights)
            finally:  # also after an error: it puts every layer back together, fit to be loaded again
                finalize_layerwise_reload(self.model, self.model_config)
        if tied:
            self._refresh_tied_head()

    def finish_weight_update(self) -> None:
        """Nothing left."""

    def shutdown(self) -> None:
        """Drop what is staged or on its way."""
        self._refusal = None
        self._stager.drop()

    def _objection(self, manifest: Manifest) -> str | None:
        if self._expected is None:
            tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            dtype = str(self.model_config.dtype).removeprefix("torch.")
            self._expected = ExpectedModel(read_specs(Path(self.model_config.model)), dtype, tied)
        try:
            self._expected.check(manifest)
        except ManifestRefused as refusal:
            return str(refusal)
        return None

    def _refresh_tied_head(self) -> None:
        """Give a tied output layer the new embeddings where it does not read them from the shared parameter.

        On CPU a linear layer computes with a packed copy of its weight, made when the weight is loaded and
        held by `layer.cpu_linear`. A tied head is loaded no weight of its own, so the reload never packs it
        anew, and it would go on with the first version's embeddings.
        """
        head = getattr(self.model, "lm_head", None)
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def _experts_packed_anew(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Have experts that are loaded meanwhile packed for the CPU's kernel, as at the first load.

    vLLM does that together with making the kernel, and skips both where there is one: it would read plain
    weights as packed ones. So nothing is there while weights are loaded, and the same kernel afterwards.
    """
    layers = model.modules() if device.type == "cpu" else ()
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in layers]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None)]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            method.moe_kernel = kernel


class StagingExtension:
    """Mixed into vLLM's worker class: answers what its own calls cannot."""

    weight_transfer_engine: StagingEngine

    def staging_status(self) -> dict[str, object]:
        """How far this rank's staging is: `Stager.status`."""
        return self.weight_transfer_engine.status()
