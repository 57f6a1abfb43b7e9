"""Who gets which cores, GPUs and ports when every service runs on one machine."""

import os
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

FEWEST_CORES_TO_SPLIT = 4
"""With fewer, halves would be too small: every service uses all cores and the kernel shares them."""

_held: dict[int, int] = {}
"""Port that this process has given to its services → the open socket that says so."""

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever asks for any: one of those may be gone before a service listens."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Cores:
    """What the services' threads may use."""

    learner_threads: int
    engines: tuple[str | None, ...]
    """VLLM_CPU_OMP_THREADS_BIND of each; None takes every core."""


def usable_cores() -> list[int]:
    """The cores this process may run on, no more of them than a container's CPU quota pays for."""
    cores = sorted(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = cores[: max(1, round(int(limit) / int(period)))]
    return cores


def split_cores(cores: list[int], engines: Sequence[int], processes: int) -> Cores:
    """Half of the cores for the engines, half for training, when there are enough of them for that.

    Args:
        cores: The usable cores' numbers.
        engines: Ranks of each engine on this machine, of servers and scorers; each rank gets its own cores.
        processes: Ranks of the learner on this machine, and of the models that have their own beside it.
    """
    engine_ranks = sum(engines)
    share = len(cores) // 2 // engine_ranks
    if len(cores) < FEWEST_CORES_TO_SPLIT or share == 0:
        return Cores(max(1, len(cores) // processes), (None,) * len(engines))
    binds = [_span(cores[i * share : (i + 1) * share]) for i in range(engine_ranks)]
    spans = iter(binds)
    grouped = [list(islice(spans, ranks)) for ranks in engines]
    left = len(cores) - engine_ranks * share
    return Cores(max(1, left // processes), tuple("|".join(g) for g in grouped))


def _span(cores: list[int]) -> str:
    whole = cores == list(range(cores[0], cores[-1] + 1)) and len(cores) > 1
    return f"{cores[0]}-{cores[-1]}" if whole else ",".join(map(str, cores))


def visible_gpus() -> list[str]:
    """Names of the CUDA devices that the services may use, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def split_gpus(gpus: list[str], ranks: Sequence[int]) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each service of so many ranks; None when there are too few for one each."""
    if len(gpus) < sum(ranks):
        return None
    names = iter(gpus)
    return [",".join(islice(names, count)) for count in ranks]


def settle_address(key: str, address: str, taken: set[str]) -> str:
    """The address itself when its port is free; on loopback otherwise one with a free port.

    Other hosts know a wider address, so that one is never changed.

    Args:
        key: The config key, for the message.
        address: `tcp://HOST:PORT`; port 0 asks for a free one.
        taken: Addresses given to other services of this run; the answer is added.

    Raises:
        ValueError: The address is malformed, or a wider one's port is taken.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{key}={address}: expected tcp://HOST:PORT")
    if port == "0" or address in taken or not (port_is_free(host, int(port)) and hold(int(port))):
        if host not in LOOPBACK:
            raise ValueError(
                f"{key}={address}: cannot listen there: not an address of this machine, or port {port} is "
                "taken; choose another"
            )
        address = f"tcp://{host}:{next(p for p in free_ports(host) if hold(p))}"
    taken.add(address)
    return address


def port_is_free(host: str, port: int) -> bool:
    with _bindable(host) as probe:
        try:
            probe.bind((_plain(host), port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """One where nobody listens now."""
    return next(free_ports(host))


def free_ports(host: str) -> Iterator[int]:
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    return (port for port in ports if port_is_free(host, port))


def hold(port: int) -> bool:
    """Keep a port from other runs until this process ends, however it does; whether it is ours now.

    A service listens ten seconds after it was given its port, and another run may look for one in between.
    What is bound is a name that only runs know, in the network namespace that the port is of: the port
    itself would then be taken for the service too.
    """
    if port in _held:
        return True
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0slipstream-port-{port}")
    except OSError:
        holder.close()
        return False
    _held[port] = holder.detach()  # it stays open until the process ends
    return True


def _bindable(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_STREAM)
    # As ZeroMQ binds: the port of a run that just ended counts as free.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe


def _plain(host: str) -> str:
    return "" if host == "*" else host.strip("[]")
