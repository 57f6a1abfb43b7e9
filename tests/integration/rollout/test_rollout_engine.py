"""vLLM itself behind the Engine seam, against a Hugging Face forward over the tokens it sampled."""

import asyncio

import numpy as np
import pytest
import torch

from buffer.experiment import ModelConfig
from rollout.config import EngineConfig
from rollout.engine import EngineFailed, Request
from rollout.vllm_engine import VLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "What is 4 + 3?"


class Served:
    """One running engine, its event loop, and the same model in Hugging Face."""

    def __init__(self, path, stop=()):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.runner = asyncio.Runner()
        self.stop = list(stop)
        model = ModelConfig(path=str(path), max_length=512, dtype="float32")
        self.engine = VLLMEngine(model, EngineConfig(kv_cache_gib=0.5, max_num_seqs=32), stop, seed=3)
        self.runner.run(self.engine.start())
        self.label(0)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.num_requests = 0

    def label(self, version):
        self.runner.run(self.engine.llm.update_weight_version(str(version)))

    def request(self, prompt_ids, temperature, max_tokens=48, version=0, **more):
        self.num_requests += 1
        return Request(f"r{self.num_requests}", prompt_ids, max_tokens, temperature, version, **more)

    def generate(self, *requests):
        async def all_of_them():
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.runner.run(all_of_them())

    @torch.no_grad()
    def logprobs(self, prompt_ids, completion, temperature):
        """Hugging Face's log-softmax at each sampled position, [N, vocabulary]."""
        ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
        logits = self.reference(ids).logits[0, len(prompt_ids) - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, dim=-1).numpy()


@pytest.fixture(scope="module")
def smol(smollm2):
    served = Served(smollm2, stop=("=",))
    yield served
    served.runner.run(served.engine.close())
    served.runner.close()


@pytest.fixture(scope="module")
def tiny(tiny_model):
    served = Served(tiny_model)
    yield served
    served.runner.run(served.engine.close())
    served.runner.close()


def chat(served):
    return served.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )


def check_logprobs(served, prompt_ids, temperature):
    requests = [served.request(prompt_ids, temperature, max_tokens=32) for _ in range(8)]
    worst = off_argmax = 0
    for completion in served.generate(*requests):
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        expected = served.logprobs(prompt_ids, completion, temperature)
        chosen = expected[np.arange(len(expected)), completion.token_ids]
        worst = max(worst, float(np.abs(chosen - completion.logprobs).max()))
        off_argmax += int((expected.argmax(-1) != completion.token_ids).sum())
    assert off_argmax > 0, "every token was the most probable one: this would not show which was picked"
    assert worst <= 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logprobs_are_the_models_own_tied(smol, temperature):
    check_logprobs(smol, chat(smol), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logprobs_are_the_models_own_untied(tiny, temperature):
    check_logprobs(tiny, [1, 5, 9, 77, 300], temperature)


def test_greedy_takes_the_most_probable_tokens(tiny):
    prompt_ids = [1, 5, 9]
    (completion,) = tiny.generate(tiny.request(prompt_ids, temperature=0.0))
    expected = tiny.logprobs(prompt_ids, completion, 1.0)
    assert completion.token_ids.tolist() == expected.argmax(-1).tolist()


def test_the_few_most_probable_tokens_are_drawn_where_that_is_asked(tiny):
    prompt_ids = [1, 5, 9]
    requests = [tiny.request(prompt_ids, temperature=1.0, top_k=3) for _ in range(4)]
    requests.append(tiny.request(prompt_ids, temperature=1.0, top_p=1e-6))
    *few, greedy = tiny.generate(*requests)
    ranks = set()
    for completion in few:
        expected = tiny.logprobs(prompt_ids, completion, 1.0)
        chosen = expected[np.arange(len(expected)), completion.token_ids]
        ranks |= set((expected > chosen[:, None]).sum(-1).tolist())
    assert ranks == {0, 1, 2}
    best = tiny.logprobs(prompt_ids, greedy, 1.0).argmax(-1)
    assert greedy.token_ids.tolist() == best.tolist()


def test_a_sampled_end_mark_is_among_the_tokens_and_not_in_the_text(smol):
    prompt_ids = chat(smol)
    completions = smol.generate(*(smol.request(prompt_ids, 1.0, max_tokens=64) for _ in range(12)))
    ended = [c for c in completions if c.token_ids[-1] == smol.tokenizer.eos_token_id]
    assert ended
    for completion in ended:
        assert completion.finish_reason == "stop"
        assert smol.tokenizer.eos_token not in completion.text
    for completion in completions:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 64


def test_a_stop_text_ends_the_text_and_its_tokens_are_kept(smol):
    prompt_ids = chat(smol)
    # One in six says it: of 64 all are silent once in a hundred thousand times.
    completions = smol.generate(*(smol.request(prompt_ids, 1.0) for _ in range(64)))
    stopped = [c for c in completions if "=" in smol.tokenizer.decode(c.token_ids)]
    assert stopped
    for completion in stopped:
        assert completion.finish_reason == "stop"
        assert "=" not in completion.text
        assert smol.tokenizer.decode(completion.token_ids).startswith(completion.text)
        assert "=" in smol.tokenizer.decode(completion.token_ids[-1:])
        assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)


def test_text_without_stop_texts_is_the_tokens_decoded(tiny):
    (completion,) = tiny.generate(tiny.request([1, 5, 9], 1.0))
    assert completion.text == tiny.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_each_token_carries_the_version_that_sampled_it(tiny):
    """The version goes up while the requests run, as often as it can until the last one ends."""
    llm = tiny.engine.llm

    async def go():
        requests = [tiny.request([1, 5, 9 + i], 1.0, max_tokens=400) for i in range(8)]
        running = asyncio.gather(*map(tiny.engine.generate, requests))
        version = 0
        while not running.done():
            version += 1
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.update_weight_version(str(version))
            await llm.resume_generation()
            await asyncio.wait([running], timeout=0.1)
        return await running, version

    completions, newest = tiny.runner.run(go())
    tiny.label(0)
    crossed = [c for c in completions if len(set(c.versions.tolist())) > 1]
    assert crossed, "no completion was running when the version changed"
    for completion in completions:
        assert len(completion.versions) == len(completion.token_ids)
        assert (np.diff(completion.versions) >= 0).all()
        assert set(completion.versions.tolist()) <= set(range(newest + 1))


def test_a_cancelled_call_ends_the_request_in_the_engine(tiny):
    async def go():
        request = tiny.request([1, 5, 9], 1.0, max_tokens=500)
        running = asyncio.create_task(tiny.engine.generate(request))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return tiny.engine.llm.get_num_unfinished_requests()

    assert tiny.runner.run(go()) == 0


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path):
    async def go():
        model = ModelConfig(path=str(tmp_path), max_length=64)
        engine = VLLMEngine(model, EngineConfig())
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineFailed) as failed:
        asyncio.run(go())
    assert "\n" not in str(failed.value)
