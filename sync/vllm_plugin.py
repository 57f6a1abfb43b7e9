"""Inside vLLM's workers: receives versions in the background and brings them in while the engine is paused.

vLLM finds `register` through the entry point `vllm.general_plugins` in each of its processes. The front
process (`sync.vllm_sink`) drives the engine through vLLM's own weight-transfer calls: init begins a staging,
shutdown drops it, and start, update, finish load what is staged. vLLM has no call that asks a transfer engine
how far it is, so a worker extension adds one.
"""

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from sync.errors import LoadFailed, ManifestRefused
from sync.expected import ExpectedModel, read_specs
from sync.group import Seat
from sync.manifest import Manifest
from sync.stager import Stager
from sync.vllm_twin import Twin, can_have_twin, repack_head
from sync.vllm_waiting import sleep_instead_of_spinning
from sync.wire import Entries

logger = logging.getLogger(__name__)

BACKEND = "slipstream"
PREPARING_NICENESS = 10
"""A tenth of the weight of decoding in the scheduler."""


def register() -> None:
    """Make the backend known; vLLM may call this several times in one process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "sync.vllm_plugin", "StagingEngine")
        logging.getLogger(initialize_layerwise_reload.__module__).addFilter(_is_worth_a_warning)
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # as the services answer it
        if not torch.cuda.is_available():
            sleep_instead_of_spinning()


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
    nonce: str = field(repr=False)
    fresh: bool
    host: str
    first_rank: int
    group_size: int
    backend: str
    memory: str
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
        self._stager = Stager(self.device, prepare=self._prepare)
        self._twin: Twin | None = None
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
            init_info.host, init_info.epoch, init_info.nonce,
            init_info.first_rank + self.parallel_config.rank, init_info.group_size, init_info.backend,
            init_info.timeout_s,
        )  # fmt: skip
        self._stager.begin(seat, init_info.fresh, init_info.version, manifest, init_info.memory)

    def bring(self, entries: Entries) -> None:
        """What every rank of the group that is being built left: this one goes on to the others."""
        self._stager.bring(entries)

    def status(self) -> dict[str, object]:
        if self._refusal is not None:
            return {"state": "failed", "cause": ManifestRefused.cause, "reason": self._refusal}
        return self._stager.status()

    def start_weight_update(self) -> None:
        """Nothing yet: what takes the weights away belongs together with what brings them."""

    @torch.inference_mode()
    def receive_weights(self, update_info: LoadOrder) -> None:
        """Bring in what is staged. The engine must be paused: half-way through, its weights are of two
        versions, or on no device."""
        manifest, stream = self._stager.staged(update_info.version)
        if self._twin is not None:
            self._twin.exchange()
            return
        with _experts_packed_anew(self.model, self.device):
            initialize_layerwise_reload(self.model)
            try:
                load: Any = self.model.load_weights
                load(self._weights(manifest, stream))
            finally:  # also after an error: it puts every layer back together, fit to be loaded again
                finalize_layerwise_reload(self.model, self.model_config)
        if self._tied:
            repack_head(self.model)

    @torch.inference_mode()
    def _prepare(self, manifest: Manifest, stream: torch.Tensor) -> None:
        """On the receiving thread, while the engine decodes: all that needs no pause.

        Raises:
            LoadFailed: vLLM cannot load it.
        """
        if not can_have_twin(self.model, self.device):
            return
        # Of this thread alone, on Linux: decoding comes first where both want a core.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREPARING_NICENESS)
        try:
            self._twin = self._twin or Twin(self.model, self.model_config, self._tied)
            self._twin.load(self._weights(manifest, stream))
        except Exception as error:  # vLLM's loading raises whatever it likes
            raise LoadFailed(f"{type(error).__name__}: {error}") from error

    def _weights(self, manifest: Manifest, stream: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What is staged, as vLLM's `load_weights` wants it."""
        return (pair for pair in unpack(manifest, stream) if not (self._tied and pair[0] == "lm_head.weight"))

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def finish_weight_update(self) -> None:
        """Nothing left."""

    def shutdown(self) -> None:
        """Drop what is staged or on its way."""
        self._refusal = None
        self._stager.drop()

    def _objection(self, manifest: Manifest) -> str | None:
        if self._expected is None:
            dtype = str(self.model_config.dtype).removeprefix("torch.")
            self._expected = ExpectedModel(read_specs(Path(self.model_config.model)), dtype, self._tied)
        try:
            self._expected.check(manifest)
        except ManifestRefused as refusal:
            return str(refusal)
        return None


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

    def staging_bring(self, entries: Entries) -> None:
        """What every rank of the group that is being built left: `Stager.bring`."""
        self.weight_transfer_engine.bring(entries)
