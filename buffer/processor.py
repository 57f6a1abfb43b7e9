"""What this machine computes with, and which number format `model.dtype: auto` therefore stands for."""

from pathlib import Path
from typing import Literal

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Of /proc/cpuinfo, on x86 and on ARM: the processor multiplies bfloat16 itself."""

COMPUTING_ENVIRONMENT = {
    # Threads that sleep at barriers leave the core to whatever shares it: a learner beside an engine, any
    # other work beside an offline stage. Those that spin, the default, keep it from the thread they wait for.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Otherwise glibc maps memory anew for every large activation, and each page of it is a fault.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Of a process that computes on CPU, from its start."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether a CUDA device is there, without importing torch."""
    return any(devices.glob("nvidia[0-9]*"))


def native_dtype(
    cpuinfo: Path = Path("/proc/cpuinfo"), devices: Path = Path("/dev")
) -> Literal["bfloat16", "float32"]:
    """bfloat16 with a CUDA device or a processor that has it, otherwise float32.

    A processor without it emulates bfloat16: on AVX2 its matrix products were 5 to 15 times slower than
    float32's.
    """
    if has_gpu(devices):
        return "bfloat16"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "float32"
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"
