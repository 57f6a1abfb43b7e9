"""vLLM's AsyncLLM in this process, its core and workers in processes of their own: start, watch, end."""

import asyncio
import logging
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from buffer.processor import COMPUTING_ENVIRONMENT, native_dtype
from rollout.config import EngineConfig
from rollout.engine import EngineFailed
from rollout.engine_log import POINTER, said_since, standard_error
from rollout.orphans import children_without_ctrl_c, start_guard

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.5
SHUTDOWN_S = 1.0
"""After that vLLM kills its processes."""


class VLLMProcess:
    """One AsyncLLM, `llm` once it is started, and no process of it left behind, however this one ends.

    Args:
        config: Layout and memory.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._guard: subprocess.Popen[bytes] | None = None
        self.llm: Any = None

    def prepare(self) -> None:
        """What has to be before anything of vLLM is imported."""
        _set_environment(self._config)
        self._guard = start_guard()

    def start(self, model: str, dtype: str, max_length: int, **arguments: Any) -> None:
        """Blocks while vLLM starts.

        Args:
            model: Hugging Face folder.
            dtype: Of the weights.
            max_length: Longest sequence, tokens.
            arguments: Further ones of vLLM's AsyncEngineArgs.

        Raises:
            EngineFailed: It does not come up.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = current_platform.is_cpu()
        if on_cpu and (free := _free_gib()) < self._config.kv_cache_gib:
            raise EngineFailed(
                f"engine.kv_cache_gib={self._config.kv_cache_gib:g}: this machine has {free:.1f} GiB of "
                "memory left; lower it, or end what else takes memory"
            )
        if on_cpu and dtype == "bfloat16" != native_dtype():
            logger.warning("this processor emulates bfloat16, far slower than float32; set dtype float32")
        args = AsyncEngineArgs(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_length,
            tensor_parallel_size=self._config.tensor_parallel,
            pipeline_parallel_size=self._config.pipeline_parallel,
            max_num_seqs=self._config.max_num_seqs,
            enforce_eager=self._config.enforce_eager,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=int(self._config.kv_cache_gib * 2**30) if on_cpu else None,
            gpu_memory_utilization=self._config.gpu_memory_utilization,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **arguments,
        )
        before = standard_error()
        try:
            with children_without_ctrl_c():
                self.llm = AsyncLLM.from_engine_args(args)
        except (RuntimeError, ValueError, OSError) as error:
            # Of what failed in a process of its own vLLM says here only that the cause stands above.
            told = first_line(error)
            cause = said_since(before) if POINTER.search(told) else None
            raise EngineFailed(f"vLLM does not start with {model}: {cause or told}") from error

    async def wait_failed(self) -> str:
        """Wait until the engine dies by itself; returns what is known of why."""
        while not self.llm.errored:  # noqa: ASYNC110  vLLM's monitor thread only sets a flag
            await asyncio.sleep(HEALTH_PERIOD_S)
        return f"vLLM's engine died: {first_line(self.llm.dead_error)}"

    async def close(self) -> None:
        if self.llm is not None:
            # It has nothing to save, and its workers rarely end when they are asked to.
            for name in ("vllm.v1.utils", "vllm.utils.system_utils"):
                logging.getLogger(name).setLevel(logging.ERROR)
            await asyncio.to_thread(self.llm.shutdown, SHUTDOWN_S)
            self.llm = None
        if self._guard is not None:
            await asyncio.to_thread(self._guard.communicate)  # closes the pipe; what vLLM left over is killed
            self._guard = None


@contextmanager
def request_failures(failed: Callable[[str], Exception]) -> Iterator[None]:
    """What vLLM raises of one request: the engine's end as EngineFailed, all else as what `failed` makes of a
    line that says why."""
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineFailed(f"vLLM's engine died: {first_line(error)}") from error
    except (VLLMError, ValueError) as error:
        raise failed(first_line(error.__cause__ or error)) from error


def _free_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib / 2**20


def _set_environment(config: EngineConfig) -> None:
    """What vLLM takes only from the environment; its processes inherit it."""
    ranks = config.tensor_parallel * config.pipeline_parallel
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(
        config.cores, ranks, sorted(os.sched_getaffinity(0))
    )
    for name, value in COMPUTING_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


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


def first_line(error: BaseException) -> str:
    # A ValidationError's own first line counts its mistakes.
    told = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    lines = told.strip().splitlines()
    return lines[0] if lines else type(error).__name__
