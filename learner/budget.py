"""What one learner rank holds in memory, from shapes alone: no torch, no weights, no accelerator.

Symbols: h hidden, f ffn (of one expert, where there are some), Q = heads · head size, K = key-value heads ·
head size, V vocabulary, t tensor size, p pipeline size; of the largest micro-batch S tokens, N targets. The
counts of parameters are exact. The rest is what `learner/layers.py`, `attention.py`, `vocabulary.py` and
Megatron's buffers allocate, read off their code; `benchmarks/plan_memory.py` compares it with what ranks
really take.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from learner.config import LoraConfig, ParallelConfig, TrainingConfig
from learner.families import Family

FLOAT32 = 4
CHUNK_NUMBERS, KEPT_NUMBERS = 1 << 24, 1 << 27
"""As in learner/vocabulary.py: logits computed at once, and kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the ranks compute."""

    gpu: bool
    weight_bytes: int
    """Of one weight: 2 in bfloat16."""
    compute_bytes: int
    """Of one activation; differs from a weight's on a CPU without bfloat16 instructions."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch: prompts and completions as long as the config allows.

    Keys and values are gathered for attention, a prompt's once for itself and once for each completion behind
    it, so that `keys` exceeds `tokens`; `mask` counts the entries that say which completion sees which.
    """

    tokens: int
    keys: int
    mask: int
    targets: int


def largest_micro_batch(max_length: int, max_tokens: int, group_size: int, budget: int) -> MicroBatch:
    """Of groups whose completions have `max_tokens` behind prompts that fill up `max_length`.

    Packing puts as many completions behind a prompt as the budget holds, at least one, and as many such
    segments as fit; what is left over counts as an equal share of one.
    """
    prompt, completion = max_length - max_tokens, max_tokens
    together = min(group_size, max(1, (budget - prompt) // completion))
    length = prompt + together * completion
    tokens = max(budget, length)
    segments = tokens / length
    # One completion is attended to in one causal call with its prompt: nothing is gathered twice.
    keys = prompt + together * (prompt + completion) if together > 1 else length
    mask = completion * (prompt + completion) if together > 1 else 0
    return MicroBatch(
        tokens, round(segments * keys), round(segments * mask), round(segments * together * completion)
    )


def layer_parameters(family: Family, tensor: int) -> int:
    """Of one transformer layer on one tensor rank but its experts; norms and routers are on every rank
    whole."""
    queries, keys = family.heads * family.head_dim, family.kv_heads * family.head_dim
    split = family.hidden * (queries + 2 * keys) + queries * family.hidden
    if family.qkv_bias:
        split += queries + 2 * keys
    whole = 2 * family.hidden + (2 * family.head_dim if family.qk_norm else 0)
    if family.mixture is None:
        split += 3 * family.hidden * family.ffn
    else:
        whole += family.mixture.experts * family.hidden
    return split // tensor + whole


def layers_of(family: Family, layout: ParallelConfig, stage: int) -> int:
    """How many layers a pipeline stage has."""
    return len(family.stage_layers(stage, layout.pipeline))


def expert_parameters(family: Family, layout: ParallelConfig, stage: int) -> int:
    """Of one rank: the experts of its stage's layers that are its own, each whole."""
    if family.mixture is None:
        return 0
    experts = family.mixture.experts // layout.expert * layers_of(family, layout, stage)
    return experts * 3 * family.hidden * family.ffn


def parameters(family: Family, layout: ParallelConfig, stage: int) -> int:
    """Of one rank of a pipeline stage, its experts too.

    The first stage has the embedding, the last the final norm and the output layer; tied embeddings lie once
    more on a last stage that is not the first. A score model has one row for an output layer.
    """
    tensor, pipeline = layout.tensor, layout.pipeline
    table = family.padded_vocab(tensor) // tensor * family.hidden
    count = layer_parameters(family, tensor) * layers_of(family, layout, stage)
    count += expert_parameters(family, layout, stage)
    if stage == 0:
        count += table
    if stage == pipeline - 1:
        count += family.hidden
        output = family.hidden if family.head == "score" else table
        count += 0 if family.tied and pipeline == 1 else output
    return count


def adapter_parameters(family: Family, lora: LoraConfig, layout: ParallelConfig, stage: int) -> int:
    """Of one rank: A and B of its stage's adapters. Of a column-parallel linear A is on every tensor rank
    whole, of a row-parallel one B; of q, k and v both where tensor ranks share key-value heads."""
    hidden, tensor = family.hidden, layout.tensor
    queries, keys = family.heads * family.head_dim, family.kv_heads * family.head_dim
    cut = 1 if family.splits_kv_heads(tensor) else tensor
    columns = {"q_proj": queries // cut, "k_proj": keys // cut, "v_proj": keys // cut}
    columns |= {"gate_proj": family.ffn // tensor, "up_proj": family.ffn // tensor}
    rows = {"o_proj": queries, "down_proj": family.ffn}
    width = sum(hidden + columns[name] for name in lora.modules if name in columns)
    width += sum(rows[name] // tensor + hidden for name in lora.modules if name in rows)
    return lora.rank * width * layers_of(family, layout, stage)


def fused_weight_bytes(family: Family, tensor: int, machine: Machine) -> int:
    """The largest weight of a layer while its adapter is fused with it: the sum in float32, and a float32
    copy of a narrower weight beside it."""
    queries, keys = family.heads * family.head_dim, family.kv_heads * family.head_dim
    largest = (
        family.hidden * max(queries + 2 * keys, 2 * family.ffn if family.mixture is None else 0) // tensor
    )
    return largest * FLOAT32 * (2 if machine.weight_bytes < FLOAT32 else 1)


def whole_parameters(family: Family) -> int:
    """Of the model as it is published: tied embeddings once."""
    return parameters(family, ParallelConfig(), 0)


def optimizer_bytes(count: int, weight_bytes: int, data: int) -> float:
    """Adam's state for `count` weights: two float32 moments, and float32 master weights beside narrower ones.

    4 + 4 + 4 bytes a weight in mixed precision, as in ZeRO (arXiv 1910.02054, section 3.1), of which the
    distributed optimizer keeps a share on each of `data` ranks; pass 1 without it.
    """
    master = FLOAT32 if weight_bytes < FLOAT32 else 0
    return count * (2 * FLOAT32 + master) / data


def joined_parameters(family: Family, layout: ParallelConfig, stage: int) -> int:
    """Of one rank: gate and up projections, which lie joined in one tensor; a checkpoint has them apart."""
    layers = layers_of(family, layout, stage)
    if family.mixture is not None:
        return family.mixture.experts // layout.expert * layers * 2 * family.hidden * family.ffn
    return layers * 2 * family.hidden * family.ffn // layout.tensor


def gathered_optimizer_bytes(parts: Sequence[tuple[int, int]], gpu: bool) -> tuple[float, float]:
    """What saving the distributed optimizer's state takes for a moment: on the device, and on a GPU's host.

    Megatron's `get_parameter_state_dp_zero`, as `learner/checkpoint.py` asks for it, collects one float32
    state after the other from the data-parallel ranks, through the device: this rank's share, everybody's,
    and, under NCCL, those once more in one piece. On the host all three states are kept, and their shares.

    Args:
        parts: For each optimizer, experts have one of their own, its weights and the ranks that share them.
        gpu: Whether there is a device beside the host.
    """
    sizes = [(FLOAT32 * count / ranks, float(FLOAT32 * count)) for count, ranks in parts]
    host = sum(3 * whole + 3 * share for share, whole in sizes)
    if gpu:
        return max(share + 2 * whole for share, whole in sizes), host
    return host + max(2 * whole for _, whole in sizes), 0.0


def layer_activations(family: Family, tensor: int, batch: MicroBatch, machine: Machine) -> int:
    """Bytes that one layer keeps for its backward pass.

    Korthikanti et al. 2022 (arXiv 2205.05198, equation 1) count s·b·h·(34 + 5·a·s/h) bytes for GPT's layer
    under 16-bit activations. Ours differs: no dropout masks; RMSNorm keeps its input and the layer behind it
    its output, 4·h in all, on every tensor rank; attention keeps no scores but rotated queries, its output
    twice (once as the projection's input) and gathered keys and values; a gated MLP keeps 2·f before the gate
    and f behind it. On a GPU, silu(gate) is kept too; on CPU it is computed again.
    """
    queries = family.heads * family.head_dim // tensor
    # A head that ranks share is whole on each of them.
    keys = max(1, family.kv_heads // tensor) * family.head_dim
    per_token = 4 * family.hidden + 3 * queries
    if family.mixture is None:
        per_token += (4 if machine.gpu else 3) * family.ffn // tensor
    if family.qk_norm:
        # The norms' inputs lie within the whole projection, or what was gathered of it; queries of several
        # key-value heads in a copy.
        per_token += gathered_numbers(family, tensor) or queries + 2 * keys
        per_token += queries if family.kv_heads > tensor else 0
    numbers = batch.tokens * per_token + batch.keys * 2 * keys + batch.mask
    log_sums = batch.tokens * (family.heads // tensor) * FLOAT32
    return numbers * machine.compute_bytes + log_sums + mixture_activations(family, tensor, batch, machine)


def gathered_numbers(family: Family, tensor: int) -> int:
    """Of one token's queries, keys and values on a tensor rank that shares key-value heads: Megatron gathers
    all heads' and takes its own from them. 0 where heads are not shared."""
    whole = (family.heads + 2 * family.kv_heads) * family.head_dim
    return whole if family.splits_kv_heads(tensor) else 0


def mixture_activations(family: Family, tensor: int, batch: MicroBatch, machine: Machine) -> int:
    """Bytes that one layer's router and experts keep, if every rank's experts get equally many tokens.

    Of each token the tensor rank gives away as many copies as experts are chosen, and gets as many from the
    others. An expert keeps a copy as its input, h; both halves before the gate, silu(gate), the other half
    once more, their product, and that weighed, 6·f in all. The router keeps its input in float32; for every
    expert and token a probability, two where it is not renormalised, and whether it goes there; for every
    copy its weight, twice, and two places of 8 bytes.
    """
    if family.mixture is None:
        return 0
    copies = batch.tokens * family.mixture.chosen // tensor
    probabilities = 1 if family.mixture.renormalised else 2
    routed = batch.tokens * family.mixture.experts * (probabilities * FLOAT32 + 1)
    if machine.compute_bytes < FLOAT32:
        routed += batch.tokens * family.hidden * FLOAT32
    return copies * ((family.hidden + 6 * family.ffn) * machine.compute_bytes + 2 * FLOAT32 + 2 * 8) + routed


def layer_workspace(family: Family, tensor: int, batch: MicroBatch, machine: Machine) -> int:
    """Gradients of activations at the widest place of a layer's backward pass: that of the gate, or of
    gathered queries, keys and values, which are copied once to be scattered."""
    if family.mixture is None:
        widest = 4 * family.ffn // tensor
    else:
        widest = family.mixture.chosen * (family.hidden + 4 * family.ffn) // tensor
    gathered = gathered_numbers(family, tensor)
    widest = max(widest, 2 * gathered + gathered // tensor)
    return batch.tokens * (2 * family.hidden + widest) * machine.compute_bytes


def output_bytes(
    family: Family, tensor: int, batch: MicroBatch, machine: Machine, frozen: bool = False
) -> tuple[int, int]:
    """Of the output layer: what it keeps for the backward pass, and what either pass takes for a moment.

    Kept are the inputs of the final norm and of the projection, and float32 logits of whole chunks up to
    KEPT_NUMBERS. Forward a chunk's exponentials come beside it; backward the weight's gradient is built in
    the type of the activations, and copied once when the logits are gone. Chunks beyond the bound are there
    only while they are worked on. A frozen weight has no gradient.
    """
    rows = -(-family.vocab // tensor)
    chunk_rows = max(1, CHUNK_NUMBERS // rows)
    chunk = min(batch.targets, chunk_rows) * rows
    kept_targets = min(batch.targets, KEPT_NUMBERS // (chunk_rows * rows) * chunk_rows)
    logits = kept_targets * rows * FLOAT32
    inputs = (batch.tokens + batch.targets) * family.hidden * machine.compute_bytes
    gradient = rows * family.hidden * machine.compute_bytes
    grad_inputs = batch.targets * family.hidden * machine.compute_bytes
    passing = chunk * FLOAT32 if kept_targets < batch.targets else 0
    # Slopes of another type than float32 are a copy; so are weights of another type than the activations.
    narrowed = chunk * machine.compute_bytes if machine.compute_bytes < FLOAT32 else 0
    widened = gradient if machine.compute_bytes != machine.weight_bytes else 0
    gradient = 0 if frozen else gradient
    forward = chunk * FLOAT32 + passing
    backward = max(gradient + passing + narrowed, 2 * gradient - logits) + grad_inputs
    return inputs + logits, widened + max(forward, backward)


def forward_bytes(
    family: Family, tensor: int, last_stage: bool, batch: MicroBatch, machine: Machine
) -> dict[str, int]:
    """What a rank of a frozen model takes at the fullest moment of a pass: one layer with all that it makes,
    or, on the last stage, one chunk of logits and its exponentials beside the hidden states."""
    passing = {"a layer": layer_activations(family, tensor, batch, machine)}
    rows = -(-family.vocab // tensor)
    chunk = min(batch.targets, max(1, CHUNK_NUMBERS // rows)) * rows
    hidden = (batch.tokens + batch.targets) * family.hidden * machine.compute_bytes
    widened = rows * family.hidden * machine.compute_bytes * (machine.compute_bytes != machine.weight_bytes)
    output = {"work on logits": 2 * chunk * FLOAT32 + hidden + widened} if last_stage else {}
    return max(output, passing, key=lambda part: sum(part.values()))


def kept_activations(
    family: Family, learner: TrainingConfig, stage: int, batch: MicroBatch, machine: Machine
) -> dict[str, int]:
    """Bytes that the layers of a stage keep, for every micro-batch in flight.

    Under Megatron's one-forward-one-backward schedule stage i of p has min(p - i, micro-batches) of them in
    flight (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); here as if there were at least p.
    """
    pipeline = learner.parallel.pipeline
    layers, in_flight = layers_of(family, learner.parallel, stage), pipeline - stage
    hidden = batch.tokens * family.hidden * machine.compute_bytes
    full = layer_activations(family, learner.parallel.tensor, batch, machine)
    found = {"activations": layers * full * in_flight}
    if learner.recompute:
        found = {"inputs of layers": layers * hidden * in_flight}
    if pipeline > 1:
        found["outputs of the stage"] = hidden * in_flight
    return found


def stage_activations(
    family: Family, learner: TrainingConfig, stage: int, batch: MicroBatch, machine: Machine
) -> dict[str, int]:
    """What one rank takes at the fullest moment of a forward and backward pass, by what it is for.

    That is in the output layer, or, when the backward pass has left that, in the last of the stage's layers,
    which recomputing fills with its activations again.
    """
    tensor = learner.parallel.tensor
    layer = {"gradients of a layer": layer_workspace(family, tensor, batch, machine)}
    if learner.recompute:
        layer["a layer computed again"] = layer_activations(family, tensor, batch, machine)
    if learner.lora is not None:
        layer["a fused weight"] = fused_weight_bytes(family, tensor, machine)
    output: dict[str, int] = {}
    if stage == learner.parallel.pipeline - 1 and family.head == "vocabulary":
        kept, moment = output_bytes(family, tensor, batch, machine, frozen=learner.lora is not None)
        output = {"logits and output layer": kept, "work on logits": moment}
    fuller = max(output, layer, key=lambda part: sum(part.values()))
    return kept_activations(family, learner, stage, batch, machine) | fuller
