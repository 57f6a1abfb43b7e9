"""The engine that serves: vLLM's AsyncLLM in this process, its core and workers in processes of their own."""

import asyncio
import logging
import math
import os
import subprocess
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.experiment import ModelConfig
from buffer.processor import native_dtype
from rollout.config import EngineConfig
from rollout.engine import Completion, CompletionFailed, EngineFailed, Request
from rollout.orphans import children_without_ctrl_c, start_guard
from sync.sink import WeightSink

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.5
SHUTDOWN_S = 1.0
"""After that vLLM kills its processes."""


class VLLMEngine:
    """vLLM, sampling from the plain softmax at a temperature, with per-token weight versions.

    Args:
        model: Folder, length and dtype.
        config: Layout and memory.
        stop: Texts that end a completion. Without any, vLLM need not detokenize each step.
        seed: Servers must differ in it, or they would draw the same noise; see `server_seed`.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, stop: Sequence[str] = (), seed: int = 0
    ) -> None:
        self._model = model
        self._config = config
        self._stop = list(stop)
        self._seed = seed
        self.llm: Any = None
        self._sink: WeightSink | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def sink(self) -> WeightSink:
        assert self._sink is not None, "the engine is not started"
        return self._sink

    async def start(self) -> None:
        """Blocks the event loop while vLLM starts: nothing else of the server runs yet."""
        _set_environment(self._config)
        self._guard = start_guard()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from sync.vllm_sink import VllmSink, engine_options

        on_cpu = current_platform.is_cpu()
        if on_cpu and self._model.dtype == "bfloat16" != native_dtype():
            logger.warning(
                "this processor emulates bfloat16, far slower than float32; set model.dtype=float32"
            )
        args = AsyncEngineArgs(
            model=self._model.path,
            dtype=self._model.dtype,
            max_model_len=self._model.max_length,
            seed=self._seed,
            tensor_parallel_size=self._config.tensor_parallel,
            pipeline_parallel_size=self._config.pipeline_parallel,
            max_num_seqs=self._config.max_num_seqs,
            enforce_eager=self._config.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            kv_cache_memory_bytes=int(self._config.kv_cache_gib * 2**30) if on_cpu else None,
            gpu_memory_utilization=self._config.gpu_memory_utilization,
            disable_log_stats=True,
            **engine_options(),
        )
        try:
            with children_without_ctrl_c():
                self.llm = AsyncLLM.from_engine_args(args)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineFailed(
                f"vLLM does not start with {self._model.path}: {_first_line(error)}"
            ) from error
        self._sink = VllmSink(self.llm)

    async def freeze(self) -> None:
        """Label the folder's own weights version 0, where no learner will publish any."""
        await self.llm.update_weight_version("0")

    async def generate(self, request: Request) -> Completion:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = tokens_input(request.prompt_ids, cache_salt=str(request.version))
        outputs = self.llm.generate(prompt, self.sampling_params(request), request.request_id)
        try:
            finished = [output async for output in outputs if output.finished]
        except EngineDeadError as error:
            raise EngineFailed(f"vLLM's engine died: {_first_line(error)}") from error
        except (EngineGenerateError, ValueError) as error:
            raise CompletionFailed("engine", _first_line(error.__cause__ or error)) from error
        if not finished:
            raise CompletionFailed("engine", "no output")
        return self._completion(finished[0].outputs[0])

    async def wait_failed(self) -> str:
        while not self.llm.errored:  # noqa: ASYNC110  vLLM's monitor thread only sets a flag
            await asyncio.sleep(HEALTH_PERIOD_S)
        return f"vLLM's engine died: {_first_line(self.llm.dead_error)}"

    async def close(self) -> None:
        if self.llm is not None:
            # It has nothing to save, and its workers rarely end when they are asked to.
            for name in ("vllm.v1.utils", "vllm.utils.system_utils"):
                logging.getLogger(name).setLevel(logging.ERROR)
            await asyncio.to_thread(self.llm.shutdown, SHUTDOWN_S)
            self.llm = self._sink = None
        if self._guard is not None:
            await asyncio.to_thread(self._guard.communicate)  # closes the pipe; what vLLM left over is killed
            self._guard = None

    def sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop=self._stop,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=bool(self._stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _completion(self, output: Any) -> Completion:
        """From a finished `CompletionOutput`."""
        if output.finish_reason not in ("stop", "length"):
            raise CompletionFailed("engine", f"finished by {output.finish_reason}")
        token_ids = list(output.token_ids)
        return Completion(
            token_ids=np.asarray(token_ids, np.int32),
            logprobs=sampled_logprobs(token_ids, output.logprobs),
            versions=token_versions(len(token_ids), output.weight_versions),
            finish_reason=output.finish_reason,
            text=output.text if self._stop else self._decode(token_ids),
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self.llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)


def sampled_logprobs(token_ids: Sequence[int], flat: Any) -> NDArray[np.float32]:
    """The logprob of each sampled token, float32 [N], out of vLLM's `FlatLogprobs`.

    A position may hold other tokens too (the most probable ones), in any order: the entry is found by its id.

    Raises:
        CompletionFailed: `nonfinite_logprob`, or `engine` when an entry is missing.
    """
    if flat is None or len(flat.start_indices) != len(token_ids):
        raise CompletionFailed("engine", "not one logprob a token")
    values = np.empty(len(token_ids), np.float32)
    for position, token_id in enumerate(token_ids):
        start, end = flat.start_indices[position], flat.end_indices[position]
        try:
            values[position] = flat.logprobs[flat.token_ids.index(token_id, start, end)]
        except ValueError:
            raise CompletionFailed("engine", f"no logprob of sampled token {token_id}") from None
    if not np.isfinite(values).all():
        raise CompletionFailed("nonfinite_logprob", f"at position {int(np.argmin(np.isfinite(values)))}")
    return values


def token_versions(num_tokens: int, spans: Any) -> NDArray[np.int32]:
    """Spread vLLM's `WeightVersionSpan`s over the tokens they cover, int32 [N].

    Raises:
        CompletionFailed: `engine` when a token has no version, or a label is not ours.
    """
    versions = np.full(num_tokens, -1, np.int32)
    for span in spans or ():
        if not span.version.isdecimal():
            raise CompletionFailed(
                "engine", f"sampled by weights labelled {span.version!r}, not a policy version"
            )
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise CompletionFailed("engine", "a token without a weight version")
    return versions


def server_seed(seed: int, name: str) -> int:
    """A sampling seed of this server's own, the same after a restart."""
    return zlib.crc32(f"{seed}/{name}".encode()) & 0x7FFFFFFF


def thread_binding(cores: str | None, ranks: int, allowed: Sequence[int]) -> str:
    """What VLLM_CPU_OMP_THREADS_BIND should say.

    vLLM's own choice leaves one core per rank idle; ours gives all of them, shared out evenly over the ranks.

    Args:
        cores: The user's word, which wins.
        ranks: Worker processes of this server.
        allowed: Cores this process may run on.
    """
    if cores is not None:
        return cores
    if ranks == 1:
        return ",".join(map(str, allowed))
    share = max(1, math.floor(len(allowed) / ranks))
    starts = [rank * share % len(allowed) for rank in range(ranks)]
    return "|".join(",".join(map(str, allowed[start : start + share])) for start in starts)


def _set_environment(config: EngineConfig) -> None:
    """What vLLM takes only from the environment; its processes inherit it."""
    ranks = config.tensor_parallel * config.pipeline_parallel
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(
        config.cores, ranks, sorted(os.sched_getaffinity(0))
    )
    # By default OpenMP threads spin at every barrier. Where a learner or another server shares the cores, the
    # spinning keeps away the very thread that is waited for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
