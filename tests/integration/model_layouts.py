"""Run under torchrun by test_parallel_layouts_model.py: one forward and backward pass, export and save, per
model.

Argument: a JSON file with `tensor`, `pipeline`, `out` and `models`, a list of {path, dtype}. Writes, per
model number n, `logprobs-n.safetensors` (last stage, tensor rank 0), `gradients-n.safetensors` and the folder
`saved-n` (rank 0).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file, save_file

from learner import convert, parallel
from learner.config import ParallelConfig
from learner.layout import Segment
from learner.model import build_model


def micro_batches(path):
    """Those the test packed: tensors by `{number}.{field}`, segments as rows of numbers."""
    tensors = load_file(path)
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    found = []
    for number in range(count):
        fields = {n.split(".")[1]: t for n, t in tensors.items() if n.startswith(f"{number}.")}
        rows = fields.pop("segments").tolist()
        segments = [Segment(start, prompt, tuple(n for n in rest if n)) for start, prompt, *rest in rows]
        found.append(SimpleNamespace(**fields, segments=segments))
    return found


def forward_backward(model, batches):
    """Logprobs of all micro-batches, on the last stage; gradients are left in the parameters' main_grad."""

    def forward_step(iterator, model):
        def loss(output):
            logprobs, entropy = output
            slopes = torch.linspace(-1, 2, len(logprobs))
            total = (logprobs * slopes).sum() + 0.1 * entropy.sum()
            return total, torch.tensor(0, dtype=torch.int32), logprobs.detach()

        return model(next(iterator), 0.9), loss

    model.config.calculate_per_token_loss = True
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=max(b.token_ids.shape[1] for b in batches),
        micro_batch_size=1,
        forward_only=False,
    )


def trained_by_megatron(model):
    """In its data-parallel wrapper, whose end of a pass sums what ranks share: tied embeddings, norms of
    heads."""

    def finalize(chunks, num_tokens=None, **options):
        finalize_model_grads(chunks, None, **options)

    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    model.config.finalize_model_grads_func = finalize
    wrapped.zero_grad_buffer()
    return wrapped


def export_gradients(model):
    """Gradients in Hugging Face's layout: put in the parameters' place and exported as they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    return dict(convert.export_hf(model))


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    layout, out = ParallelConfig(tensor=job["tensor"], pipeline=job["pipeline"]), Path(job["out"])
    torch.set_num_threads(1)
    parallel.COLLECTIVE_S = 120.0
    parallel.initialize(layout)
    for number, wanted in enumerate(job["models"]):
        model = build_model(wanted["path"], layout, getattr(torch, wanted["dtype"]))
        convert.save_hf(model, wanted["path"], out / f"saved-{number}")
        found = forward_backward(trained_by_megatron(model), micro_batches(job["batches"]))
        if parallel.is_last_stage() and parallel.tp_rank() == 0:
            save_file({"logprobs": torch.cat(found)}, out / f"logprobs-{number}.safetensors")
        gradients = export_gradients(model)
        if parallel.rank() == 0:
            contiguous = {name: tensor.contiguous() for name, tensor in gradients.items()}
            save_file(contiguous, out / f"gradients-{number}.safetensors")
    torch.distributed.barrier()
    parallel.shutdown()


if __name__ == "__main__":
    main()
