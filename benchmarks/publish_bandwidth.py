"""What a publish costs: its bandwidth against a bare gloo broadcast, and what decoding loses to it.

A learner process publishes SmolLM2-135M, in the type this machine computes fast, to the real vLLM. While
the engine is idle, publishes alternate with bare broadcasts of the same bytes in the same buckets to a
process that does nothing else. Then the engine decodes: tokens are counted alone, and while buckets are
being staged.

On one machine, as here, a version lies in memory that the learner shares. With --sent it is broadcast, as it
would be to another machine: over the loopback, where the two ends of a bare broadcast take a whole core
each, which on two cores leaves none for packing and checking. So a bare broadcast whose ends do no more than
sum each bucket where it lies is measured too: a publish without packing, without a handshake and without an
engine beside it. With --link-gbit it is sent over the loopback of a network namespace that is held to that
rate, as a link between two machines would be.

    python benchmarks/publish_bandwidth.py [--model DIR] [--rounds 8] [--sent | --link-gbit 10]
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from record import write_result

from buffer.processor import native_dtype
from sync.buckets import checksum, spec_of
from sync.config import SyncConfig
from sync.group import BroadcastGroup, Connecting, Seat
from sync.manifest import Manifest
from sync.publisher import Publisher
from sync.receiver import Receiver

BUCKET_MIB = 64
ALONE_S = 5.0
SHAPED = "SLIPSTREAM_BENCHMARK_LINK_IS_SHAPED"
SPAWN = multiprocessing.get_context("spawn")


def connect_barely(rank: int, other: Connection) -> BroadcastGroup:
    """A group of two, which tell each other over a pipe how they are reached."""
    seat = Seat("127.0.0.1", 1, "nonce", rank, 2, "gloo", 600)
    connecting = Connecting(seat, torch.device("cpu"), lambda: None)
    other.send(connecting.left())
    connecting.bring(other.recv())
    connecting.thread.join()
    return connecting.result()


def learn(address: str, model: str, shared: bool, commands: Connection, bare: Connection) -> None:
    """The learner's process: publishes, or broadcasts barely, as it is told; answers with the seconds."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, native_dtype())
    tensors = list(AutoModelForCausalLM.from_pretrained(model, dtype=dtype).named_parameters())
    specs = [spec_of(*pair) for pair in tensors]
    manifest = Manifest.layout(specs, BUCKET_MIB << 20)
    config = SyncConfig(address=address, bucket_mib=BUCKET_MIB, shared_memory=shared)
    publisher = Publisher(config, "bench", torch.device("cpu"))
    publisher.start()
    commands.send(manifest.stream_bytes)
    stream = torch.ones(manifest.stream_bytes, dtype=torch.uint8)
    version, group = 0, None
    while (command := commands.recv()) != "end":
        started = time.perf_counter()
        if command == "publish":
            assert publisher.wait_for_members(1, 60)
            publisher.publish(version, specs, iter(tensors))
            held = time.perf_counter() - started
            publisher.wait_loaded()
            version += 1
        else:
            group = group or connect_barely(0, bare)
            with_sums = command == "summed"
            group.broadcast(torch.tensor([with_sums]))
            send_barely(group, stream, with_sums)
            held = time.perf_counter() - started
        commands.send(held)
    publisher.close()


def send_barely(group: BroadcastGroup, stream: torch.Tensor, with_sums: bool) -> None:
    """Each bucket is summed, if at all, while the one before is on its way."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        sent = None
        for bucket in stream.split(BUCKET_MIB << 20):
            if with_sums:
                checksum(bucket)
            if sent is not None:
                sent.result()
            sent = pool.submit(group.broadcast, bucket)


def receive_barely(learner: Connection, stream_bytes: int) -> None:
    """The other end of the bare broadcast, into memory that is touched already."""
    group = connect_barely(1, learner)
    stream = torch.zeros(stream_bytes, dtype=torch.uint8)
    with_sums = torch.tensor([False])
    with ThreadPoolExecutor(max_workers=1) as pool:
        while True:
            group.broadcast(with_sums)
            for bucket in stream.split(BUCKET_MIB << 20):
                group.broadcast(bucket)
                if with_sums.item():
                    pool.submit(checksum, bucket)


class Decoding:
    """Requests that keep the engine busy, and a count of their tokens."""

    def __init__(self, engine: Any, requests: int) -> None:
        self._engine = engine
        self.tokens = 0
        self._tasks = [asyncio.create_task(self._generate(index)) for index in range(requests)]

    async def _generate(self, index: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=900, ignore_eos=True, detokenize=False)
        for turn in range(1000):
            before = 0
            prompt = {"prompt_token_ids": [1, 5, 6, 7 + index]}
            async for output in self._engine.generate(prompt, params, request_id=f"{index}-{turn}"):
                count = len(output.outputs[0].token_ids)
                self.tokens, before = self.tokens + count - before, count

    async def rate(self, seconds: float) -> float:
        tokens, started = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - started)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class CountingSink:
    """A sink around vLLM's that notes the tokens and the seconds between start and end of each staging."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.decoding: Decoding | None = None
        self.staged: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def stage(self, plan: Any) -> int:
        tokens, started = self.decoding.tokens if self.decoding else 0, time.perf_counter()
        checksum = await self._sink.stage(plan)
        if self.decoding is not None:
            self.staged.append((self.decoding.tokens - tokens, time.perf_counter() - started))
        return checksum


Order = Callable[[str], Awaitable[float]]


async def measure(
    arguments: argparse.Namespace, address: str, commands: Connection, learner: Connection
) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from sync.vllm_sink import VllmSink, engine_options

    options = AsyncEngineArgs(
        model=arguments.model, dtype=native_dtype(), max_model_len=1024, enforce_eager=True,
        kv_cache_memory_bytes=1 << 30, disable_log_stats=True, **engine_options(),
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(options)
    sink = CountingSink(VllmSink(engine))
    receiver = Receiver(SyncConfig(address=address), "bench", "server-0", sink)
    running = asyncio.create_task(receiver.run())
    loop = asyncio.get_running_loop()
    stream_bytes = await loop.run_in_executor(None, commands.recv)
    bare = SPAWN.Process(target=receive_barely, args=(learner, stream_bytes), daemon=True)
    bare.start()

    async def order(command: str) -> float:
        commands.send(command)
        return await loop.run_in_executor(None, commands.recv)

    idle = await idle_seconds(order, arguments.rounds)
    rates = {command: stream_bytes / statistics.median(times) / 1e9 for command, times in idle.items()}
    summed, ratios = (
        [bare / other for bare, other in zip(idle["bare"], idle[name], strict=True)]
        for name in ("summed", "publish")
    )
    sink.decoding = Decoding(engine, arguments.requests)
    load = await under_load(order, arguments.rounds, sink.decoding, receiver)
    sink.decoding.stop()
    commands.send("end")
    bare.kill()
    running.cancel()
    await asyncio.wait([running])
    engine.shutdown()
    during = sum(t for t, _ in sink.staged) / sum(s for _, s in sink.staged)
    return {
        "model_megabytes": stream_bytes / 1e6,
        "bare_gigabytes_per_second": rates["bare"],
        "publish_gigabytes_per_second": rates["publish"],
        "publish_over_bare": rates["publish"] / rates["bare"],
        "publish_over_bare_median_of_rounds": statistics.median(ratios),
        "bare_with_sums_over_bare_median_of_rounds": statistics.median(summed),
        "target_publish_over_bare": 0.8,
        **load,
        "decode_tokens_per_second_while_staging": during,
        "decode_while_staging_over_alone": during / load["decode_tokens_per_second_alone"],
        "target_decode_while_staging_over_alone": 0.6,
        "stage_seconds_while_decoding": statistics.median(s for _, s in sink.staged),
        "settings": vars(arguments) | {"dtype": native_dtype()},
    }


async def idle_seconds(order: Order, rounds: int) -> dict[str, list[float]]:
    """Seconds of publishes and of bare broadcasts in turn, while the engine has nothing to do."""
    await order("bare"), await order("publish")  # connects, and touches the memory
    seconds: dict[str, list[float]] = {"bare": [], "publish": [], "summed": []}
    for _ in range(rounds):
        for command, times in seconds.items():
            times.append(await order(command))
            print(f"idle {command}: {times[-1]:.3f} s", flush=True)
    return seconds


async def under_load(order: Order, rounds: int, decoding: Decoding, receiver: Receiver) -> dict[str, float]:
    """Decoding alone and publishes beside it, in turn."""
    await asyncio.sleep(3)
    alone, pauses, loads = [], [], []
    for _ in range(rounds):
        alone.append(await decoding.rate(ALONE_S))
        await order("publish")
        update = receiver.last_update
        assert update is not None
        pauses.append(update.pause_seconds)
        loads.append(update.load_seconds)
        print(
            f"alone {alone[-1]:.0f} tokens/s; load {loads[-1]:.2f} s, paused for {pauses[-1]:.2f} s",
            flush=True,
        )
    return {
        "decode_tokens_per_second_alone": statistics.mean(alone),
        "pause_seconds_median": statistics.median(pauses),
        "pause_seconds_max": max(pauses),
        "load_seconds_median": statistics.median(loads),
    }


def shape_link(gigabits: int) -> None:
    """Begin again in a network namespace of our own, whose loopback passes so much."""
    shaped = f"tbf rate {gigabits}gbit burst 4mb latency 100ms"
    prepare = f'ip link set lo up && tc qdisc add dev lo root {shaped} && exec "$0" "$@"'
    os.environ[SHAPED] = "1"
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", prepare, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--cores", default="0-1", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--sent", action="store_true", help="over the loopback, not in shared memory")
    parser.add_argument("--link-gbit", type=int, help="rate of the link, in gigabits a second")
    arguments = parser.parse_args()
    if arguments.link_gbit and SHAPED not in os.environ:
        shape_link(arguments.link_gbit)
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": arguments.cores}
    address = "tcp://127.0.0.1:5712"
    ours, theirs = SPAWN.Pipe()
    to_bare, to_learner = SPAWN.Pipe()
    shared = not (arguments.sent or arguments.link_gbit)
    given = (address, arguments.model, shared, theirs, to_bare)
    learner = SPAWN.Process(target=learn, args=given, daemon=True)
    learner.start()
    kind = "_link" if arguments.link_gbit else "_sent" if arguments.sent else ""
    write_result(f"publish_bandwidth{kind}", asyncio.run(measure(arguments, address, ours, to_learner)))
    learner.join(10)


if __name__ == "__main__":
    main()
