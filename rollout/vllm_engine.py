"""The engine that generates: vLLM, whose weights are replaced while requests run."""

import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.experiment import ModelConfig
from rollout.config import EngineConfig
from rollout.engine import Completion, CompletionAborted, CompletionFailed, Request
from rollout.vllm_process import VLLMProcess, request_failures
from sync.sink import OnUpdate, WeightSink


class VLLMEngine:
    """vLLM, sampling from the plain softmax at a temperature, with per-token weight versions.

    Args:
        model: Folder, length and dtype.
        config: Layout and memory.
        stop: Texts that end a completion. Without any, vLLM need not detokenize each step.
        seed: Servers must differ in it, or they would draw the same noise; see `server_seed`.
        on_update: What becomes of running requests when the weights change.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_update: OnUpdate = "keep",
    ) -> None:
        self._model = model
        self._stop = list(stop)
        self._seed = seed
        self._on_update: OnUpdate = on_update
        self._process = VLLMProcess(config)
        self._sink: WeightSink | None = None

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM; None while it is not up."""
        return self._process.llm

    @property
    def sink(self) -> WeightSink:
        assert self._sink is not None, "the engine is not started"
        return self._sink

    async def start(self) -> None:
        """Blocks the event loop while vLLM starts: nothing else of the server runs yet."""
        self._process.prepare()
        from sync.vllm_sink import VllmSink, engine_options

        self._process.start(
            self._model.path,
            self._model.dtype,
            self._model.max_length,
            seed=self._seed,
            logprobs_mode="processed_logprobs",
            **engine_options(),
        )
        self._sink = VllmSink(self.llm, self._on_update)

    async def freeze(self) -> None:
        """Label the folder's own weights version 0, where no learner will publish any."""
        await self.llm.update_weight_version("0")

    async def generate(self, request: Request) -> Completion:
        outputs = self._outputs(request, self.sampling_params(request))
        with request_failures(_failed):
            finished = [output async for output in outputs if output.finished]
        if not finished:
            raise CompletionFailed("engine", "no output")
        return self._completion(finished[0].outputs[0])

    async def stream(self, request: Request) -> AsyncIterator[str]:
        """The text of one completion, without special tokens, piece by piece as it is sampled; a call that is
        cancelled ends the request in the engine.

        Raises:
            CompletionFailed, EngineFailed: As `generate`.
        """
        from vllm.sampling_params import RequestOutputKind

        params = self.sampling_params(request)
        params.detokenize, params.output_kind = True, RequestOutputKind.DELTA
        with request_failures(_failed):
            async for output in self._outputs(request, params):
                yield output.outputs[0].text

    def _outputs(self, request: Request, params: Any) -> AsyncIterator[Any]:
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(request.prompt_ids, cache_salt=str(request.version))
        return self.llm.generate(prompt, params, request.request_id)

    async def wait_failed(self) -> str:
        return await self._process.wait_failed()

    async def close(self) -> None:
        self._sink = None
        await self._process.close()

    def sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or 0,
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
        if output.finish_reason == "abort" and self._on_update == "abort":
            raise CompletionAborted(len(output.token_ids))
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


def _failed(why: str) -> CompletionFailed:
    return CompletionFailed("engine", why)


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
