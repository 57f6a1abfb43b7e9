"""Fresh vLLM engines on given folders: a program, an order in JSON a line in, an answer a line out.

    python fresh_engines.py

An order is {model, dtype, prompts, count}. Each is done by a plain engine in a process of its own, forked
from this one, which has only imported vLLM: that is what takes most of an engine's start.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the fork is the engine's process

import vllm.model_executor.models.llama
import vllm.model_executor.models.mixtral
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.model_executor.models.qwen3_moe
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams


def greedy(model: str, dtype: str, prompts: list[list[int]], count: int) -> list[dict[str, list]]:
    """`count` most probable tokens behind each prompt, and their logprobs."""
    engine = LLM(
        model=model, dtype=dtype, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=16,
        enforce_eager=True, logprobs_mode="processed_logprobs", kv_cache_memory_bytes=1 << 26,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False)
    found = []
    # One at a time, as the server is asked: a matrix of another height may be multiplied in another order.
    for prompt in prompts:
        (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
        found.append({"token_ids": tokens, "logprobs": logprobs})
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        if os.fork() == 0:
            print(json.dumps({"completions": greedy(**json.loads(line))}), file=answers, flush=True)
            os._exit(0)
        _, status = os.wait()
        if status:
            sys.exit(f"an engine ended with {status}")


if __name__ == "__main__":
    main()
