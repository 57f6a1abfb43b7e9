"""After every publish the real vLLM is what a fresh engine would be, and agrees with the learner."""

import asyncio
import contextlib
import copy
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from buffer.experiment import ModelConfig
from rollout.engine import CompletionAborted, Request
from rollout.vllm_engine import VLLMEngine, token_versions
from sync.buckets import spec_of
from sync.config import SyncConfig
from sync.errors import ChecksumMismatch, EngineLost, ManifestRefused
from sync.group import Connecting, Seat
from sync.manifest import Manifest
from sync.publisher import Publisher
from sync.receiver import Receiver
from sync.sink import OnUpdate, StagePlan
from sync.stager import make_seal
from sync.wire import Entries

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[1]
PROMPT = [1, 5, 6, 7, 9]
LONG_PROMPT = [1, *range(20, 320)]
"""Of some blocks of the prefix cache: what it has of the version before must not be taken."""
PROMPTS = [PROMPT, [1, 300, 17], LONG_PROMPT]
TEMPERATURE = 0.8
"""Of what is sampled; not 1, so that forgetting it shows."""
SAMPLES, SAMPLED = 12, 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ids = itertools.count()


def make_model(family: str, tied: bool, dtype: torch.dtype):
    """A two-layer model whose next token varies: with weights of the usual size it repeats itself."""
    import transformers

    torch.manual_seed(7)
    kind, own = {
        "llama": (transformers.LlamaConfig, {}),
        "llama-3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
        "mistral": (transformers.MistralConfig, {"sliding_window": None}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
        "mixtral-all": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 4}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            {
                "head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": True,
            },
        ),
    }[family]
    config = kind(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=tied, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, initializer_range=0.2, **own,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if family == "mixtral-all":
        soften_routers(model)
    return model


def soften_routers(model) -> None:
    """Make bfloat16's rounding of a router's logits as harmless as all other rounding.

    Sharp routers turn it into a token's logprob that is anything: most of all where two of four experts are
    chosen and the second and the third are near a tie (docs/log.md), so that here all four are.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(0.25)


def shake(model, seed: int) -> None:
    """Other weights: another version."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(noise.to(parameter.dtype))


@dataclass
class Rig:
    """One engine, its receiver's parts, and the model whose weights it is to have."""

    engine: object
    sink: object
    model: object
    folder: Path

    async def generate(
        self,
        count: int,
        temperature: float = 0.0,
        salt: str | None = None,
        prompt_ids: list[int] = PROMPT,
        on_tokens: Callable[[int], None] = lambda count: None,
    ):
        """Tokens, logprobs and version spans; `on_tokens` is told how many there are so far."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": prompt_ids} | ({"cache_salt": salt} if salt else {})
        final = None
        async for output in self.engine.generate(prompt, params, request_id=f"r{next(_ids)}"):
            final = output
            on_tokens(len(output.outputs[0].token_ids))
        assert final is not None
        completion = final.outputs[0]
        logprobs = [
            entry[token].logprob
            for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        return list(completion.token_ids), logprobs, completion.weight_versions

    def expected(self, count: int) -> list[int]:
        with torch.no_grad():
            ids = self.model.generate(
                torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return ids[0].tolist()[len(PROMPT) :]

    def logprobs(self, tokens: list[int]) -> list[float]:
        return hf_logprobs(self.model, tokens)

    def specs(self):
        return [spec_of(name, tensor) for name, tensor in self.model.named_parameters()]

    async def publish(self, publisher: Publisher, version: int):
        def work():
            publisher.publish(version, self.specs(), iter(list(self.model.named_parameters())))
            return publisher.wait_loaded()

        return await asyncio.get_running_loop().run_in_executor(None, work)


def hf_logprobs(model, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Hugging Face's, of tokens behind PROMPT, from one forward pass in the model's own type."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0].float()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [table[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(tokens)]


async def accept(left: Entries) -> Entries:
    """Nobody waits for READY here."""
    return {}


class Program:
    """A process that answers orders, a line of JSON each."""

    def __init__(self, name: str, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / name)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
            )  # fmt: skip

    async def ask(self, **order: object) -> dict:
        """The answer; meanwhile the event loop serves the engine and its receiver."""
        return await asyncio.to_thread(self._ask, json.dumps(order))

    def _ask(self, order: str) -> dict:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        return json.loads(answer)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The learner and the maker of fresh engines, which serve all cases: their imports take seconds."""
    logs = tmp_path_factory.mktemp("programs")
    started = [Program(f"{name}.py", logs / name) for name in ("publishing_learner", "fresh_engines")]
    yield started
    for program in started:
        program.end()


# vLLM's classes for our families (SmolLM is its Llama); tied and not, in both types.
CASES = [
    ("llama", True, "float32"), ("qwen3", False, "float32"),
    ("qwen2", True, "bfloat16"), ("llama-3", False, "bfloat16"),
    ("mistral", False, "float32"), ("qwen3_moe", False, "float32"),
    ("mixtral", False, "float32"), ("mixtral-all", False, "bfloat16"),
]  # fmt: skip


# To vLLM a Mistral, and a Llama 3, is loaded as a Llama is, and an output layer of its own as a Qwen3's.
ALIKE = ("mistral", "llama-3")
SHORT = [pytest.param(c, marks=pytest.mark.long) if c[0] in ALIKE else c for c in CASES]
every_case = pytest.mark.parametrize("rig", SHORT, indirect=True, ids=lambda case: "-".join(map(str, case)))
first_case = pytest.mark.parametrize("rig", CASES[:1], indirect=True, ids=["first"])


@pytest.fixture(scope="module")
def rig(request, tmp_path_factory):
    """An engine on the case's model; its event loop runs for the module's tests one after the other.

    The first one has its worker in a process of its own, as a server has by default; the others start faster.
    """
    options = {} if request.param == CASES[0] else {"distributed_executor_backend": "uni"}
    yield from _rig(*request.param, tmp_path_factory.mktemp("model"), **options)


def _rig(family: str, tied: bool, dtype: str, folder: Path, **options):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from sync.vllm_sink import VllmSink, engine_options

    model = make_model(family, tied, getattr(torch, dtype))
    model.save_pretrained(folder)
    loop = asyncio.new_event_loop()

    async def start():
        arguments = AsyncEngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=1024, enforce_eager=True,
            logprobs_mode="processed_logprobs", disable_log_stats=True, kv_cache_memory_bytes=1 << 28,
            **engine_options(), **options,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        return engine, VllmSink(engine)

    engine, sink = loop.run_until_complete(start())
    yield loop, Rig(engine, sink, model, folder)
    engine.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


@contextlib.asynccontextmanager
async def receiving(rig: Rig, config: SyncConfig):
    receiver = Receiver(config, "test", "server-0", rig.sink)
    task = asyncio.create_task(receiver.run())
    try:
        yield receiver
    finally:
        task.cancel()
        await asyncio.wait([task])


class Line:
    """A publisher and a receiver around an engine, for the length of a `with`."""

    def __init__(self, rig: Rig, address: str) -> None:
        config = SyncConfig(address=address, bucket_mib=1, transfer_timeout_s=20)
        self.publisher = Publisher(config, "test", torch.device("cpu"))
        self._receiving = receiving(rig, config)

    async def __aenter__(self):
        self.publisher.start()
        self.receiver = await self._receiving.__aenter__()
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, self.publisher.wait_for_members, 1, 30)
        return self

    async def __aexit__(self, *_):
        await self._receiving.__aexit__(None, None, None)
        self.publisher.close()


def assert_same_policy(rig: Rig, tokens: list[int], logprobs: list[float]) -> None:
    """The same greedy tokens and logprobs as Hugging Face, in float32."""
    assert tokens == rig.expected(len(tokens))
    assert max(gaps(logprobs, rig.logprobs(tokens))) < 1e-3


def gaps(ones: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ones, others, strict=True)]


def learner_settings(rig: Rig, address: str, folder: Path) -> dict:
    return {
        "name": "test",
        "run_dir": str(folder / "run"),
        "model": {"path": str(rig.folder), "dtype": dtype_of(rig), "max_length": 1024},
        "buffer": {"groups_per_batch": 1},
        "rollout": {"group_size": SAMPLES, "sampling": {"temperature": TEMPERATURE}},
        "learner": {"threads": 1, "optimizer": {"lr": 0.05}},
        "sync": {"address": address, "bucket_mib": 1},
    }


def dtype_of(rig: Rig) -> str:
    return str(rig.model.dtype).removeprefix("torch.")


async def sample(rig: Rig, version: int) -> list[dict]:
    """A group's completions, as the engine samples them together."""
    running = [rig.generate(SAMPLED, TEMPERATURE, str(version)) for _ in range(SAMPLES)]
    made = await asyncio.gather(*running)
    assert {tuple(token_versions(SAMPLED, spans)) for *_, spans in made} == {(version,) * SAMPLED}
    return [{"token_ids": tokens, "logprobs": logprobs} for tokens, logprobs, _ in made]


async def greedy(rig: Rig, version: int) -> list[dict]:
    made = [await rig.generate(24, 0.0, str(version), prompt) for prompt in PROMPTS]
    return [{"token_ids": tokens, "logprobs": logprobs} for tokens, logprobs, _ in made]


@every_case
def test_after_each_publish_of_a_learner_the_server_is_a_fresh_engine_and_agrees_with_it(
    rig, address, programs, tmp_path
):
    """Three publishes by real Megatron, with a real update on the engine's own samples before each."""
    loop, rig = rig
    settings = learner_settings(rig, address, tmp_path)
    found = loop.run_until_complete(publish_and_compare(rig, programs, settings, tmp_path, range(4)))
    assert_agrees(rig, found)


@first_case
def test_after_each_publish_of_adapters_the_server_is_a_fresh_engine_on_the_fused_folder(
    rig, address, programs, tmp_path
):
    """Theirs are the only weights that learn; the server gets them fused with those that stay as they are."""
    loop, rig = rig
    settings = learner_settings(rig, address, tmp_path)
    settings["learner"]["lora"] = {"rank": 4, "alpha": 16}
    found = loop.run_until_complete(publish_and_compare(rig, programs, settings, tmp_path, range(5, 8)))
    assert_agrees(rig, found)
    before, after = (load_file(f / "model.safetensors") for f in (rig.folder, tmp_path / "exported-7"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


@dataclass
class Found:
    """Of a run of publishes, by version."""

    served: list[list[dict]]
    """The engine's greedy completions."""
    from_learner: list[list[float]]
    """|Δ| of the engine's logprobs of its own samples."""
    from_hf: list[list[float]]


async def publish_and_compare(
    rig: Rig, programs: list[Program], settings: dict, folder: Path, versions: range
) -> Found:
    """Publish the first version; train and publish each other, and compare it with a fresh engine."""
    learner, engines = programs
    exact = dtype_of(rig) == "float32"
    found = Found([], [], [])

    async def compare(version: int) -> None:
        exported = folder / f"exported-{version}"
        await learner.ask(do="save", folder=str(exported))
        served = await greedy(rig, version)
        found.served.append(served)
        if (
            exact or version == versions[-1]
        ):  # a start takes seconds; bfloat16 takes no other way than float32
            order = {"model": str(exported), "dtype": dtype_of(rig), "prompts": PROMPTS, "count": 24}
            fresh = (await engines.ask(**order))["completions"]
            for one, two in zip(served, fresh, strict=True):
                assert one["token_ids"] == two["token_ids"]
                assert max(gaps(one["logprobs"], two["logprobs"])) <= 1e-5
        samples = await sample(rig, version)
        found.from_learner.append((await learner.ask(do="gap", prompt=PROMPT, samples=samples))["gaps"])
        found.from_hf.append(gaps_to_hugging_face(exported, rig.model.dtype, samples))

    first, *others = versions
    await learner.ask(do="build", settings=settings)
    async with receiving(rig, SyncConfig(**settings["sync"])) as receiver:
        assert await learner.ask(do="publish", version=first) == {"members": ["server-0"]}
        for version in others:
            update = {"prompt": PROMPT, "samples": await sample(rig, version - 1)}
            trained = await learner.ask(do="train", version=version - 1, **update)
            assert trained["trained_tokens"] == SAMPLES * SAMPLED
            assert math.log(trained["rho_max"]) <= (1e-3 if exact else 0.5)
            assert await learner.ask(do="publish", version=version) == {"members": ["server-0"]}
            assert receiver.version == version
            await compare(version)
    return found


def assert_agrees(rig: Rig, found: Found) -> None:
    """The engine with the learner, after each publish of another version."""
    assert all(one != two for one, two in itertools.pairwise(found.served))
    assert all(len(of) == SAMPLES * SAMPLED for of in found.from_learner)
    if dtype_of(rig) == "float32":
        assert max(map(max, found.from_learner)) <= 1e-3
    else:
        assert sum(map(sum, found.from_learner)) <= 1.2 * sum(map(sum, found.from_hf))


def gaps_to_hugging_face(folder: Path, dtype: torch.dtype, samples: list[dict]) -> list[float]:
    """How far the engine is from a Hugging Face model of this dtype, token by token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return [
        gap for s in samples for gap in gaps(s["logprobs"], hf_logprobs(model, s["token_ids"], TEMPERATURE))
    ]


@contextlib.contextmanager
def updating(rig: Rig, on_update: OnUpdate):
    """The same engine, which does something else with what runs when a version comes in."""
    from sync.vllm_sink import VllmSink

    before, rig.sink = rig.sink, VllmSink(cast(Any, rig.engine), on_update)
    yield
    rig.sink = before


@first_case
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_request_in_flight_over_two_publishes_labels_each_token_with_what_sampled_it(rig, address, on_update):
    loop, rig = rig
    policies = {}
    count = 1000

    async def publish(line, version):
        shake(rig.model, version)
        policies[version] = copy.deepcopy(rig.model)
        await rig.publish(line.publisher, version)

    async def scenario():
        progress = asyncio.Queue()

        async def twenty_tokens_more():
            async with asyncio.timeout(60):
                for _ in range(progress.qsize() + 20):
                    await progress.get()

        async with Line(rig, address) as line:
            await publish(line, 10)
            running = asyncio.create_task(rig.generate(count, salt="10", on_tokens=progress.put_nowait))
            for version in (11, 12):
                await twenty_tokens_more()
                await publish(line, version)
            assert not running.done(), "the request ended before the second publish; give it more tokens"
            return await running

    with updating(rig, on_update):
        tokens, logprobs, spans = loop.run_until_complete(scenario())
    versions = token_versions(count, spans).tolist()
    assert sorted(set(versions)) == [10, 11, 12]
    assert versions == sorted(versions)
    highest, expected = mixed_policy(policies, tokens, versions, on_update == "keep")
    assert max(gaps(logprobs, expected)) < 1e-3
    assert max(gaps(highest, expected)) < 1e-3  # greedy, but for what rounding decides


def mixed_policy(
    policies: dict, tokens: list[int], versions: list[int], keep: bool
) -> tuple[list[float], list[float]]:
    """Hugging Face's highest logprob and the token's own, where a label says which model predicts the token.

    With `keep` the keys and values of the positions before stay those of the models that computed them, else
    they are the predicting model's. With a label one token off another model would predict that token, and
    the next ones would see another past.
    """
    from transformers import DynamicCache

    past, ids, tables, start = DynamicCache(), PROMPT + tokens, [], 0
    for version, model in sorted(policies.items()):
        end = len(PROMPT) - 1 + len([v for v in versions if v <= version])
        with torch.no_grad():
            if keep:
                logits = model(torch.tensor([ids[start:end]]), past_key_values=past).logits[0]
            else:
                logits = model(torch.tensor([ids[:end]])).logits[0, start:]
        tables.append(torch.log_softmax(logits.float(), dim=-1))
        start = end
    table = torch.cat(tables)[len(PROMPT) - 1 :]
    return table.amax(-1).tolist(), table.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@first_case
def test_tokens_are_made_while_a_version_is_staged(rig, address):
    """The learner yields its second tensor, and with it the last bucket, only when tokens came meanwhile."""
    loop, rig = rig
    made, before, during = [0], [], []

    def tensors():
        for index, pair in enumerate(list(rig.model.named_parameters())):
            if index == 1:  # READY has come and the version is not sealed: staging goes on
                before.append(made[0])
                deadline = time.monotonic() + 10
                while made[0] < before[0] + 20 and time.monotonic() < deadline:
                    time.sleep(0.01)
                during.append(made[0] - before[0])
            yield pair

    def publish(publisher: Publisher) -> None:
        publisher.publish(61, rig.specs(), tensors())
        publisher.wait_loaded()

    async def scenario():
        async with Line(rig, address) as line:
            await rig.publish(line.publisher, 60)
            running = asyncio.create_task(
                rig.generate(1000, salt="60", on_tokens=lambda count: made.__setitem__(0, count))
            )
            shake(rig.model, 61)
            await asyncio.to_thread(publish, line.publisher)
            assert during[0] >= 20, "no tokens while the version was staged"
            *_, spans = await running
            versions = token_versions(1000, spans).tolist()
            assert versions[before[0] + during[0] - 1] == 60, "they are of the version before"
            assert versions[-1] == 61

    loop.run_until_complete(scenario())


@first_case
def test_request_that_an_update_aborts_tells_its_tokens_and_is_sampled_anew(rig, address):
    from rollout.config import EngineConfig

    loop, rig = rig
    engine = VLLMEngine(ModelConfig(path=str(rig.folder)), EngineConfig(), on_update="abort")
    engine._process.llm = rig.engine
    runs = itertools.count()

    def request(version: int, tokens: int) -> Request:
        return Request(f"run-{next(runs)}", PROMPT, tokens, 1.0, version)

    async def scenario():
        async with Line(rig, address) as line:
            await rig.publish(line.publisher, 13)
            running = asyncio.create_task(engine.generate(request(13, 1000)))
            await rig.generate(30, salt="13")
            shake(rig.model, 14)
            await rig.publish(line.publisher, 14)
            with pytest.raises(CompletionAborted) as aborted:
                await running
            assert 20 < aborted.value.tokens < 1000
            # The salt of the old version finds nothing of its cache.
            tokens, logprobs, spans = await rig.generate(24, salt="13")
            assert set(token_versions(24, spans)) == {14}
            assert_same_policy(rig, tokens, logprobs)

    with updating(rig, "abort"):
        loop.run_until_complete(scenario())


def with_another(what: str, tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors, of which one has another shape, dtype or name."""
    wrong = dict(tensors)
    if what == "shape":
        wrong[name] = torch.zeros(1, 2, dtype=wrong[name].dtype)
    elif what == "dtype":
        wrong[name] = wrong[name].to(torch.float16)
    else:
        wrong[f"{name}.of_another_model"] = wrong.pop(name)
    return wrong


@first_case
@pytest.mark.parametrize("what", ["shape", "dtype", "name"])
def test_a_tensor_of_another_model_is_refused_by_name_before_anything_is_loaded(rig, address, what):
    loop, rig = rig

    async def scenario():
        async with Line(rig, address) as line:
            await rig.publish(line.publisher, 20)
            before = await rig.generate(16, salt="20")
            name = "model.layers.1.mlp.down_proj.weight"
            wrong = with_another(what, dict(rig.model.named_parameters()), name)

            def work():
                specs = [spec_of(n, t) for n, t in wrong.items()]
                line.publisher.publish(21, specs, iter(wrong.items()))
                return line.publisher.wait_loaded()

            report = await asyncio.get_running_loop().run_in_executor(None, work)
            assert report.members == []
            assert report.lost[0][0] == "server-0"
            assert name in report.lost[0][1]
            assert await rig.generate(16, salt="20") == before
            # It joins again and takes a version that fits.
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, line.publisher.wait_for_members, 1, 30)
            shake(rig.model, 22)
            report = await rig.publish(line.publisher, 22)
            assert report.members == ["server-0"]
            tokens, logprobs, _ = await rig.generate(16, salt="22")
            assert_same_policy(rig, tokens, logprobs)

    loop.run_until_complete(scenario())


@first_case
def test_corrupted_bucket_is_refused_and_the_next_version_loads(rig, address):
    loop, rig = rig

    def send_corrupted(connecting: Connecting, manifest: Manifest) -> None:
        connecting.thread.join()
        group = connecting.result()
        for index in range(manifest.num_buckets):
            start, end = manifest.bucket(index)
            group.broadcast(torch.full((end - start,), index, dtype=torch.uint8))
        group.broadcast(make_seal(30, [1234] * manifest.num_buckets, torch.device("cpu")))

    async def scenario():
        before = await rig.generate(16)
        manifest = Manifest.layout(rig.specs(), 1 << 20)
        ranks = 1 + rig.sink.world_size
        seat = Seat("127.0.0.1", 1, "nonce", 0, ranks, "gloo", 20.0)
        connecting = Connecting(seat, torch.device("cpu"), lambda: None)

        async def introduce(left: Entries) -> Entries:
            entries = left | connecting.left()
            connecting.bring(entries)
            return entries

        plan = StagePlan(30, 1, "nonce", True, "127.0.0.1", 1, ranks, "gloo", "", 20.0, manifest, introduce)
        sending = asyncio.get_running_loop().run_in_executor(None, send_corrupted, connecting, manifest)
        with pytest.raises(ChecksumMismatch, match="bucket 0"):
            await rig.sink.stage(plan)
        await sending
        await rig.sink.drop()
        assert (await rig.generate(16))[0] == before[0]
        async with Line(rig, address) as line:
            shake(rig.model, 31)
            report = await rig.publish(line.publisher, 31)
            assert report.members == ["server-0"]
        tokens, logprobs, _ = await rig.generate(16, salt="31")
        assert_same_policy(rig, tokens, logprobs)

    loop.run_until_complete(scenario())


@first_case
def test_tensor_missing_from_the_manifest_is_refused_by_name(rig):
    loop, rig = rig
    specs = [spec for spec in rig.specs() if spec.name != "model.norm.weight"]
    manifest = Manifest.layout(specs, 1 << 20)
    plan = StagePlan(40, 1, "nonce", True, "127.0.0.1", 1, 2, "gloo", "", 5.0, manifest, accept)
    with pytest.raises(ManifestRefused, match=r"model\.norm\.weight: not in the manifest"):
        loop.run_until_complete(rig.sink.stage(plan))
    assert math.isfinite(loop.run_until_complete(rig.generate(2))[1][0])


def test_tensor_parallel_server_takes_a_version_on_every_rank(tmp_path, address, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    for loop, rig in _rig("llama", True, "float32", tmp_path, tensor_parallel_size=2):

        async def scenario(rig=rig):
            assert rig.sink.world_size == 2
            async with Line(rig, address) as line:
                for version in range(2):
                    shake(rig.model, 50 + version)
                    report = await rig.publish(line.publisher, version)
                    assert report.members == ["server-0"]
                    tokens, logprobs, _ = await rig.generate(16, salt=str(version))
                    assert_same_policy(rig, tokens, logprobs)

        loop.run_until_complete(scenario())


def test_a_call_to_an_engine_that_dies_meanwhile_does_not_wait_for_its_answer():
    """vLLM never answers it; a server that holds on to it would neither end nor say why."""
    from sync.vllm_sink import VllmSink

    class Dying:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1, world_size=1))
        errored, dead_error = False, RuntimeError("its core was killed")

        async def shutdown_weight_transfer_engine(self) -> None:
            self.errored = True
            await asyncio.Event().wait()

    with pytest.raises(EngineLost, match="its core was killed"):
        asyncio.run(asyncio.wait_for(VllmSink(cast(Any, Dying())).drop(), 5))
