"""The policy: Megatron's GPTModel over packed segments, whose output is logprobs of the trained tokens.

Or a reward model: the same with one row in the place of the output layer, whose output is scores.
`build_model` makes either from a Hugging Face folder; a second call makes another, such as a frozen
reference. Shapes: S tokens of the micro-batch, N targets, h hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from learner import convert, families, parallel
from learner.adapter import attach
from learner.attention import SegmentLike, pack_segments
from learner.checkpoint_weights import open_checkpoint, stored_head
from learner.config import LoraConfig, ParallelConfig
from learner.families import Family, Head
from learner.layers import block_spec, compute_dtype
from learner.mixture import MixtureLayer
from learner.safetensors_folder import SafetensorsFolder
from learner.vocabulary import VocabShard, target_logprobs

SCORE_STD = 0.02
"""Of a new score row, as Hugging Face's default `initializer_range`."""


class Packed(Protocol):
    """What the model needs of `learner.layout.Layout`."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def segments(self) -> Sequence[SegmentLike]: ...
    @property
    def target_positions(self) -> Tensor: ...
    @property
    def target_ids(self) -> Tensor: ...


class PolicyModel(GPTModel):
    """This process's pipeline stage and tensor shard of the policy."""

    def __init__(self, family: Family, config: TransformerConfig, adapted: bool = False) -> None:
        self.family = family
        self.compute_dtype = compute_dtype(config.params_dtype)
        self.is_last_stage = parallel.is_last_stage()
        super().__init__(
            config,
            block_spec(  # pyright: ignore[reportArgumentType]
                len(family.stage_layers(parallel.pp_rank(), parallel.pp_size())),
                family.qk_norm,
                MixtureLayer if family.mixture else None,
                adapted,
            ),
            vocab_size=family.padded_vocab(parallel.tp_size()),
            max_sequence_length=family.max_positions,
            pre_process=parallel.is_first_stage(),
            post_process=self.is_last_stage,
            share_embeddings_and_output_weights=family.tied,
            # The core attention rotates by explicit position: positions restart behind a shared prompt.
            position_embedding_type="none",
        )

    def forward(self, batch: Packed, temperature: float = 1.0) -> tuple[Tensor, Tensor] | Tensor:
        """Run this stage.

        Args:
            batch: The micro-batch; every stage is given the whole of it.
            temperature: Divides the logits; the one the tokens were sampled at.

        Returns:
            On the last stage logprobs and entropy at the targets, float32 [N] each; before it hidden states
            [S, 1, h].
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=batch.token_ids, position_ids=batch.position_ids)
            hidden = hidden.to(self.compute_dtype)
            if self.training and not hidden.requires_grad:
                # With frozen embeddings; recomputation asks its input whether there is a gradient to make.
                hidden.requires_grad_()
        family = self.family
        packed = pack_segments(
            batch.segments, batch.position_ids, family.rope, family.head_dim, self.compute_dtype
        )
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=packed)
        if not self.is_last_stage:
            return hidden
        return self._read(hidden[:, 0].index_select(0, batch.target_positions), batch, temperature)

    def _read(self, hidden: Tensor, batch: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """From the hidden states [N, h] that the output layer reads."""
        return target_logprobs(
            hidden, self.output_weight(), batch.target_ids, self._vocab_shard(), temperature
        )

    def output_weight(self) -> Tensor:
        """The output layer's rows on this rank, on the last stage: the embedding's own when they are tied."""
        weight = self.shared_embedding_or_output_weight() if self.family.tied else self.output_layer.weight
        assert weight is not None
        return weight

    def _vocab_shard(self) -> VocabShard:
        size = parallel.tp_size()
        rows = self.family.padded_vocab(size) // size
        start = rows * parallel.tp_rank()
        real = max(0, min(rows, self.family.vocab - start))
        return VocabShard(start, real, parallel.tensor_parallel_group() if size > 1 else None)


class ScoreModel(PolicyModel):
    """This process's stage and shard of a reward model: Hugging Face's `…ForSequenceClassification`.

    `forward` gives, on the last stage, the score at each target position, float32 [N].
    """

    def __init__(self, family: Family, config: TransformerConfig, adapted: bool = False) -> None:
        super().__init__(family, config, adapted)
        if not self.is_last_stage:
            return
        # Megatron knows language models only: it is told that there is no output layer on this stage.
        del self.output_layer
        self.post_process = False
        fields = {"dtype": config.params_dtype, "device": parallel.device()}
        self.score = torch.nn.Linear(family.hidden, 1, bias=False, **fields)
        # The run's seed is every rank's initial seed: all tensor ranks make the same row.
        generator = torch.Generator().manual_seed(torch.initial_seed())
        row = torch.randn(1, family.hidden, generator=generator) * SCORE_STD
        with torch.no_grad():
            self.score.weight.copy_(row)

    def _read(self, hidden: Tensor, batch: Packed, temperature: float) -> Tensor:  # pyright: ignore
        return hidden.float().matmul(self.score.weight[0].float())


def build_model(
    hf_path: str | Path,
    layout: ParallelConfig,
    dtype: torch.dtype,
    recompute: bool = False,
    checkpoint: str | Path | None = None,
    head: Head = "vocabulary",
    adapters: LoraConfig | None = None,
) -> PolicyModel:
    """Make a model, each process reading its own shard. Collective.

    Args:
        hf_path: Hugging Face folder: config.json, and safetensors unless there is a checkpoint.
        layout: As given to `parallel.initialize`.
        dtype: Of the parameters.
        recompute: Compute activations again in the backward pass instead of keeping them.
        checkpoint: A Megatron checkpoint, of whatever layout, that has the weights in their place.
        head: `score` makes a ScoreModel; its row comes with the weights, or is new where they have none.
        adapters: Freezes the weights and adds new adapters to them.

    Raises:
        ValueError: The architecture is not supported, the layout does not fit it, or weights do not.
    """
    family = families.read(hf_path, head)
    if checkpoint:
        family = _of_checkpoint(family, Path(checkpoint))
    family.check_layout(layout)
    if adapters is not None:
        family.check_adapters(adapters)
    config = family.transformer_config(layout, dtype, recompute)
    config.pipeline_dtype = compute_dtype(dtype)
    # A router's weight is made on the host wherever the model is.
    kind = ScoreModel if head == "score" else PolicyModel
    model = kind(family, config, adapters is not None).to(parallel.device())
    convert.load(
        model, open_checkpoint(Path(checkpoint), family) if checkpoint else SafetensorsFolder(hf_path)
    )
    if adapters is not None:
        attach(model, adapters)
    return model


def _of_checkpoint(family: Family, checkpoint: Path) -> Family:
    """As far as the weights come from there, and not from the folder."""
    scored = stored_head(checkpoint) == "score"
    if scored and family.head == "vocabulary":
        raise ValueError(f"{checkpoint}: it is of a reward model, which has no output layer to start from")
    return replace(family, has_score=scored)
