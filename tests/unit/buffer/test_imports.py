import subprocess
import sys
from pathlib import Path

import buffer


def test_the_buffer_imports_without_torch_vllm_or_megatron():
    modules = [f"buffer.{p.stem}" for p in Path(buffer.__file__).parent.glob("*.py") if p.stem[0] != "_"]
    program = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
        "print([m for m in ('torch', 'vllm', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_service_loop_fits_one_screen():
    source = (Path(buffer.__file__).parent / "service.py").read_text().splitlines()
    start = next(n for n, line in enumerate(source) if line.startswith("async def _serve"))
    length = next(
        n for n, line in enumerate(source[start + 1 :], 1) if line.startswith(("def ", "class ", "async "))
    )
    assert length <= 50
