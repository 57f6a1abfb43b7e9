from pathlib import Path

import pytest

from buffer.experiment import ModelConfig
from buffer.processor import has_gpu, native_dtype


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags : fpu avx avx2 fma", "float32"),
        ("flags : fpu avx512f avx512bw", "float32"),
        ("flags : fpu avx512f avx512_bf16", "bfloat16"),
        ("Features : fp asimd bf16", "bfloat16"),
    ],
)
def test_a_processor_that_only_emulates_bfloat16_computes_in_float32(tmp_path: Path, line, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\n")
    assert native_dtype(cpuinfo, devices=tmp_path) == expected


def test_a_cuda_device_computes_in_bfloat16(tmp_path: Path):
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)
    assert native_dtype(tmp_path / "absent", devices=tmp_path) == "bfloat16"


def test_auto_and_nothing_said_are_the_same_concrete_type():
    assert ModelConfig(path="m").dtype == ModelConfig(path="m", dtype="auto").dtype == native_dtype()  # type: ignore[arg-type]
