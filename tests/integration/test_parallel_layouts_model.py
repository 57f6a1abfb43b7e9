"""The policy over real processes: every layout computes one process's numbers and saves the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("model_layouts.py")
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
MODELS = [
    ("float32", LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True)),
    ("float32", Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    (
        "bfloat16",
        Qwen2Config(**SIZES | {"num_hidden_layers": 3}, num_key_value_heads=1, tie_word_embeddings=True),
    ),
]
LAYOUTS = {"one": (1, 1), "tp4": (4, 1), "pp3": (1, 3), "tp2pp2": (2, 2)}
"""Of five layers stages have 2, 2 and 1, or 3 and 2; a key-value head is on one, two or four tensor ranks."""


def make_models(folder):
    torch.manual_seed(5)
    jobs = []
    for number, (dtype, config) in enumerate(MODELS):
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        path = folder / f"model-{number}"
        model.to(getattr(torch, dtype)).save_pretrained(path)
        jobs.append({"path": str(path), "dtype": dtype})
    return [*jobs, jobs[-1] | {"dtype": "float32"}]  # what the bfloat16 model's numbers really are


def micro_batch(generator, shapes):
    """Prompts and completions of random tokens, as the fields of a micro-batch."""
    positions, segments, targets, wanted, size = [], [], [], [], 0
    width = max(len(lengths) for _, lengths in shapes)
    for prompt, lengths in shapes:
        start = size
        segments.append([start, prompt, *lengths, *[0] * (width - len(lengths))])
        positions += range(prompt)
        size += prompt
        for length in lengths:
            positions += range(prompt, prompt + length)
            targets += [start + prompt - 1, *range(size, size + length - 1)]
            wanted += range(size, size + length)
            size += length
    tokens = torch.randint(0, 131, (size,), generator=generator)
    return {
        "token_ids": tokens[None],
        "position_ids": torch.tensor(positions)[None],
        "segments": torch.tensor(segments),
        "target_positions": torch.tensor(targets),
        "target_ids": tokens[torch.tensor(wanted)],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every layout's folder; the micro-batches differ in length, as trained ones do."""
    root = tmp_path_factory.mktemp("layouts")
    models = make_models(root)
    generator = torch.Generator().manual_seed(8)
    shapes = [[(9, (7, 3, 12))], [(20, (5,)), (4, (2, 8))], [(6, (4, 4, 4))]]
    batches = [micro_batch(generator, shape) for shape in shapes]
    fields = {f"{n}.{name}": tensor for n, batch in enumerate(batches) for name, tensor in batch.items()}
    save_file(fields, root / "batches.safetensors")
    for name, (tensor, pipeline) in LAYOUTS.items():
        out = root / name
        out.mkdir()
        job = {"tensor": tensor, "pipeline": pipeline, "out": str(out), "models": models}
        (out / "job.json").write_text(json.dumps(job | {"batches": str(root / "batches.safetensors")}))
        torchrun(tensor * pipeline, out)
    return root


def torchrun(processes, out):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(PROGRAM), str(out / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


NARROW, WIDENED = len(MODELS) - 1, len(MODELS)
"""The number of the bfloat16 model, and of the same in float32."""


def computed(runs, layout, number):
    """Logprobs, and gradients by name."""
    files = (runs / layout / f"{what}-{number}.safetensors" for what in ("logprobs", "gradients"))
    logprobs, gradients = map(load_file, files)
    return logprobs["logprobs"], gradients


@pytest.mark.parametrize("number", [n for n in range(len(MODELS) + 1) if n != NARROW])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_layout_computes_what_one_process_does(runs, layout, number):
    (logprobs, gradients), (found, slopes) = (computed(runs, name, number) for name in ("one", layout))
    torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
    assert slopes.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(slopes[name], gradient, atol=1e-4 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_in_bfloat16_a_layout_is_as_near_to_the_truth_as_one_process_is(runs, layout):
    """A shard's sums are rounded where the whole one's are not, and by how much depends on the processor."""
    truth, true_slopes = computed(runs, "one", WIDENED)
    (logprobs, gradients), (found, slopes) = (computed(runs, name, NARROW) for name in ("one", layout))
    assert (found - truth).abs().mean() <= 1.2 * (logprobs - truth).abs().mean()
    own, its = (relative_errors(one, true_slopes) for one in (gradients, slopes))
    assert max(its.values()) <= 0.15, its
    assert sum(its.values()) <= 1.2 * sum(own.values())


def relative_errors(gradients, truth):
    return {name: float((g - truth[name]).norm() / truth[name].norm()) for name, g in gradients.items()}


@pytest.mark.parametrize("number", range(len(MODELS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_saves_the_bits_it_loaded(runs, layout, number):
    expected = load_file(runs / f"model-{number}" / "model.safetensors")
    found = load_file(runs / layout / f"saved-{number}" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
