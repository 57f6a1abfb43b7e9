"""The parts of the vLLM engine that need no engine."""

import asyncio
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest
from pydantic import AfterValidator, TypeAdapter, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from buffer.experiment import ModelConfig
from rollout.config import EngineConfig
from rollout.engine import CompletionFailed, EngineFailed, Request
from rollout.vllm_engine import VLLMEngine, sampled_logprobs, server_seed, token_versions
from rollout.vllm_process import first_line, request_failures, thread_binding


def flat(*positions):
    logprobs = FlatLogprobs()
    for position in positions:
        logprobs.append({token: Logprob(value) for token, value in position.items()})
    return logprobs


def test_the_sampled_tokens_logprob_is_found_by_its_id():
    # The most probable token first, then the sampled one; and the other way round.
    logprobs = flat({7: -0.1, 3: -2.5}, {4: -3.0, 9: -0.05}, {5: -0.7})
    values = sampled_logprobs([3, 4, 5], logprobs)
    assert values.dtype == np.float32
    assert values.tolist() == pytest.approx([-2.5, -3.0, -0.7])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_logprob_that_is_no_number_fails_the_completion(bad):
    with pytest.raises(CompletionFailed) as failed:
        sampled_logprobs([3, 4], flat({3: -1.0}, {4: bad}))
    assert failed.value.kind == "nonfinite_logprob"


@pytest.mark.parametrize("logprobs", [None, flat({3: -1.0}), flat({3: -1.0}, {9: -1.0})])
def test_a_missing_logprob_fails_the_completion(logprobs):
    with pytest.raises(CompletionFailed) as failed:
        sampled_logprobs([3, 4], logprobs)
    assert failed.value.kind == "engine"


def test_spans_become_one_version_a_token():
    spans = [WeightVersionSpan("3", 0, 2), WeightVersionSpan("5", 2, 5)]
    versions = token_versions(5, spans)
    assert versions.dtype == np.int32
    assert versions.tolist() == [3, 3, 5, 5, 5]


@pytest.mark.parametrize(
    "spans", [None, [WeightVersionSpan("3", 0, 1)], [WeightVersionSpan("default", 0, 2)]]
)
def test_a_token_without_a_policy_version_fails_the_completion(spans):
    with pytest.raises(CompletionFailed):
        token_versions(2, spans)


class Llm:
    """Stands in for AsyncLLM: keeps what it was asked, answers with one output; knows no token's text."""

    def __init__(self, output):
        self.output, self.asked = output, []

    async def generate(self, prompt, params, request_id):
        self.asked.append((prompt, params, request_id))
        yield SimpleNamespace(finished=True, outputs=[self.output])

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: "read", encode=lambda text: [0])


@pytest.mark.parametrize("stop", [(), ("=",)])
def test_what_vllm_is_asked_and_that_its_answer_is_taken_as_it_is(stop):
    spans = [WeightVersionSpan("7", 0, 1), WeightVersionSpan("8", 1, 3)]
    logprobs = flat({31: -0.5}, {5: -1.5}, {2: -2.5})
    llm = Llm(CompletionOutput(0, "up to the stop", [31, 5, 2], None, logprobs, finish_reason="stop",
                               weight_versions=spans))  # fmt: skip
    engine = VLLMEngine(ModelConfig(path="m"), EngineConfig(), stop)
    engine._process.llm = llm
    completion = asyncio.run(engine.generate(Request("r", [9, 4], 16, 0.7, version=7)))

    ((prompt, params, request_id),) = llm.asked
    assert (prompt["prompt_token_ids"], request_id) == ([9, 4], "r")
    # Cached keys and values of another version's weights must not be found.
    assert prompt["cache_salt"] == "7"
    plain = SamplingParams(
        temperature=0.7, max_tokens=16, stop=list(stop), logprobs=0, flat_logprobs=True,
        detokenize=bool(stop), output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True,
    )  # fmt: skip
    assert params == plain, "anything else, such as top_p, would sample from another policy"
    assert completion.token_ids.tolist() == [31, 5, 2]
    assert completion.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert completion.versions.tolist() == [7, 8, 8]
    assert completion.text == ("up to the stop" if stop else "read")


@pytest.mark.parametrize(("on_update", "kind"), [("abort", "aborted"), ("keep", "engine")])
def test_an_abort_is_one_of_the_weights_only_where_they_do_so(on_update, kind):
    engine = VLLMEngine(ModelConfig(path="m"), EngineConfig(), on_update=on_update)
    engine._process.llm = Llm(CompletionOutput(0, "", [31, 5], None, None, finish_reason="abort"))
    with pytest.raises(CompletionFailed) as failed:
        asyncio.run(engine.generate(Request("r", [9, 4], 16, 0.7, version=7)))
    assert failed.value.kind == kind
    assert getattr(failed.value, "tokens", 2) == 2


def failed(why):
    return CompletionFailed("engine", why)


@pytest.mark.parametrize("error", [VLLMValidationError("too long\nby far"), ValueError("too long")])
def test_what_vllm_refuses_is_a_failed_request_and_not_the_servers_end(error):
    with pytest.raises(CompletionFailed, match=r"^engine: too long$"), request_failures(failed):
        raise error


def test_an_engine_that_died_is_told_from_a_request_that_failed():
    with pytest.raises(EngineFailed, match="vLLM's engine died"), request_failures(failed):
        raise EngineDeadError


def test_of_a_config_that_is_refused_the_reason_is_told_and_not_the_number():
    def refuse(value):
        raise ValueError("no such folder\nPlease verify:\n1. this\n2. that")

    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Annotated[str, AfterValidator(refuse)]).validate_python("x")
    assert first_line(refused.value) == "Value error, no such folder"


def test_servers_draw_different_noise_and_the_same_after_a_restart():
    assert server_seed(1, "server-0") == server_seed(1, "server-0")
    assert len({server_seed(seed, f"server-{i}") for seed in (1, 2) for i in range(8)}) == 16


@pytest.mark.parametrize(
    ("cores", "ranks", "allowed", "expected"),
    [
        (None, 1, [0, 1], "0,1"),
        (None, 2, [0, 1, 2, 3], "0,1|2,3"),
        (None, 2, [4, 6], "4|6"),
        (None, 2, [3], "3|3"),
        ("0-1", 1, [0, 1, 2], "0-1"),
        ("nobind", 2, [0, 1, 2], "nobind"),
    ],
)
def test_every_allowed_core_is_used_unless_told_otherwise(cores, ranks, allowed, expected):
    assert thread_binding(cores, ranks, allowed) == expected
