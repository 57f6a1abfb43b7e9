"""Which Hugging Face architectures the learner trains, and what each one's config means to Megatron.

A `Family` is read from config.json alone; nothing here loads weights, nor torch on import. What is not
supported is refused in one line, never approximated.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from learner.config import LoraConfig, ParallelConfig

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),  # SmolLM is Llama by another name
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
    "MixtralForCausalLM": (False, False),
    "Qwen3MoeForCausalLM": (False, True),
}
"""Architecture → (bias on q, k and v; RMSNorm on each head of q and k)."""

MIXTURES = {
    "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Architecture with experts → (name of a layer's mixture; of an expert's gate, up and down projections)."""

COUNTS = (
    "head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_key_value_heads",
    "num_local_experts", "sliding_window",
)  # fmt: skip
"""Whole numbers that a config may have."""

STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Numbers of llama3's rotary embedding."""

LARGEST = 2**31
"""Of a config's numbers: above what any model has."""

Head = Literal["vocabulary", "score"]
"""What reads the last hidden state: the output layer over the vocabulary, or one row that gives a number."""

SCORED = "ForSequenceClassification"
"""Of a model with a score head, at the end of its architecture's name."""

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: frequencies theta^(-2i/d), stretched for long contexts as Llama 3 does."""

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    """factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""

    def inverse_frequencies(self, head_dim: int) -> "torch.Tensor":
        """Float32 [head_dim / 2], in radians per position."""
        import torch

        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.llama3 is None:
            return frequencies
        factor, low, high, original = self.llama3
        wavelengths = 2 * math.pi / frequencies
        # 0 where waves are longer than original/low: stretched; 1 where shorter than original/high: kept.
        kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a layer has in the place of its MLP: a router, and experts of which every token gets a few.

    The router's softmax is over all experts. No token is ever dropped.
    """

    experts: int
    chosen: int
    """Experts of one token, the most probable ones."""
    renormalised: bool
    """Whether their probabilities are divided by their sum."""
    home: str
    """Hugging Face's name of the mixture within a layer."""
    projections: tuple[str, str, str]
    """Hugging Face's names of gate, up and down within an expert."""


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder as Megatron needs it described."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    """Of the MLP, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    head: Head = "vocabulary"
    mixture: Mixture | None = None
    has_score: bool = False
    """Whether the folder holds a score head; otherwise it is made anew."""
    window: int | None = None
    """The tokens that each one attends to, itself among them, where a sequence can be longer."""

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding after padding to a multiple of the tensor-parallel size."""
        return -(-self.vocab // tensor) * tensor

    def stage_layers(self, stage: int, pipeline: int) -> range:
        """The layers of a pipeline stage, of so many stages: equally many on each, and what is left over one
        each on the stages just before the last.

        The slowest stage sets the pace of all, and the last has the output layer to compute: it never has
        more than another. Each of the others is as slow wherever the rest goes, but the earlier a stage, the
        more micro-batches it keeps the activations of, and the first has the embedding too. vLLM deals
        layers in the same way.
        """
        each, over = divmod(self.layers, pipeline)
        first, end = (s * each + min(over, max(0, s - (pipeline - 1 - over))) for s in (stage, stage + 1))
        return range(first, end)

    def splits_kv_heads(self, tensor: int) -> bool:
        """Whether several tensor ranks share a key-value head, and gather it from each other's rows."""
        return tensor > self.kv_heads

    def _misfit(self, tensor: int) -> str | None:
        """Why a tensor size does not fit the model; None if it does."""
        if self.heads % tensor:
            return f"does not divide the model's {self.heads} attention heads"
        if self.kv_heads % tensor and tensor % self.kv_heads:
            return f"neither divides the model's {self.kv_heads} key-value heads nor is a multiple of them"
        if (rows := (self.heads + 2 * self.kv_heads) * self.head_dim) % tensor:
            return f"does not divide the model's {rows} rows of queries, keys and values"
        if self.mixture is None and self.ffn % tensor:
            return f"does not divide the model's {self.ffn} ffn"
        return None

    def tensor_sizes(self, most: int) -> list[int]:
        """Those that fit the model."""
        return [n for n in range(1, most + 1) if self._misfit(n) is None]

    def check_layout(self, parallel: ParallelConfig, key: str = "learner.parallel") -> None:
        """Refuse a layout that does not fit the model.

        Args:
            key: Its section, for the message.

        Raises:
            ValueError: Says which count and which sizes would work.
        """
        if (misfit := self._misfit(parallel.tensor)) is not None:
            fitting = ", ".join(map(str, self.tensor_sizes(16)))
            raise ValueError(f"{key}.tensor={parallel.tensor} {misfit}; use one of {fitting}")
        if parallel.pipeline > self.layers:
            raise ValueError(
                f"{key}.pipeline={parallel.pipeline} is more than the model's {self.layers} layers; "
                f"use {self.layers} or less"
            )
        if self.mixture is None and parallel.expert > 1:
            raise ValueError(f"{key}.expert={parallel.expert}: {self.architecture} has no experts; use 1")
        if self.mixture is not None and (experts := self.mixture.experts) % parallel.expert:
            fitting = [n for n in range(1, experts + 1) if experts % n == 0]
            raise ValueError(
                f"{key}.expert={parallel.expert} does not divide the model's {experts} experts; "
                f"use one of {', '.join(map(str, fitting))}"
            )

    def check_length(self, max_length: int) -> None:
        """Refuse sequences that a sliding window would cut: attention here is over all that came before.

        Args:
            max_length: model.max_length.

        Raises:
            ValueError: Says which length would do.
        """
        if self.window is not None and max_length > self.window:
            raise ValueError(
                f"model.max_length={max_length} is more than its sliding window of {self.window} tokens, and "
                f"windows are not supported; set it to {self.window} or less"
            )

    def check_adapters(self, lora: LoraConfig, key: str = "learner.lora") -> None:
        """Refuse adapters that the model has no place for.

        Args:
            key: Of their section, for messages.

        Raises:
            ValueError: Says what to set.
        """
        if self.mixture is not None and {"gate_proj", "up_proj", "down_proj"} & set(lora.modules):
            raise ValueError(
                f"{key}.modules: the experts of {self.architecture} take no adapters; "
                "set it to [q_proj, k_proj, v_proj, o_proj]"
            )

    def transformer_config(self, parallel: ParallelConfig, dtype: "torch.dtype", recompute: bool) -> Any:
        """Megatron's TransformerConfig for this model in this layout."""
        import torch
        import torch.nn.functional as F
        from megatron.core.transformer.transformer_config import TransformerConfig

        checkpointing: dict[str, Any] = {}
        if recompute:
            checkpointing = {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            kv_channels=self.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=self.norm_eps,
            qk_layernorm=self.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            gated_linear_unit=True,
            activation_func=F.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Micro-batches differ in length, so pipeline stages tell each other the shape.
            variable_seq_lengths=parallel.pipeline > 1,
            # The only dispatcher that lets ranks hold micro-batches of different lengths.
            moe_token_dispatcher_type="alltoall",
            # Weights come from the checkpoint: allocate them where they will live and fill nothing.
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            **checkpointing,
            **self._stages_config(parallel.pipeline),
            **self._mixture_config(parallel),
        )

    def _stages_config(self, pipeline: int) -> dict[str, Any]:
        """What Megatron has on each stage, by name."""
        if pipeline == 1:
            return {}
        stages = [["decoder"] * len(self.stage_layers(stage, pipeline)) for stage in range(pipeline)]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return {"pipeline_model_parallel_layout": stages}

    def _mixture_config(self, parallel: ParallelConfig) -> dict[str, Any]:
        if self.mixture is None:
            return {}
        return {
            "num_moe_experts": self.mixture.experts,
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_topk": self.mixture.chosen,
            # A softmax over the chosen logits alone is one over all of them, renormalised.
            "moe_router_pre_softmax": not self.mixture.renormalised,
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": 1,
        }


def read(path: str | Path, head: Head = "vocabulary") -> Family:
    """Read the family of a Hugging Face folder.

    Args:
        path: The folder.
        head: What the model is wanted for. A score head goes on a language model's folder too; a score
            model's folder has no vocabulary head to offer.

    Raises:
        ValueError: No config.json, an architecture or a feature that is not supported.
    """
    return from_config(_config(path), str(Path(path) / "config.json"), head)


def own_head(path: str | Path) -> Head:
    """The head that a folder's model was saved with.

    Raises:
        ValueError: No config.json.
    """
    named = _named(_config(path), str(Path(path) / "config.json"))
    return "score" if named.endswith(SCORED) else "vocabulary"


def _named(config: dict[str, Any], where: str) -> str:
    """The architecture that a config names first."""
    found = config.get("architectures") or ["none"]
    if not isinstance(found, list) or not isinstance(found[0], str):
        raise ValueError(f"{where}: architectures {json.dumps(found)}; expected a list of names")
    return found[0]


def _config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist; expected a Hugging Face folder")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a Hugging Face config")
    return config


def from_config(config: dict[str, Any], where: str, head: Head = "vocabulary") -> Family:
    """The family that a parsed config.json describes; `where` names it in errors."""
    named = _named(config, where)
    architecture = named.replace(SCORED, "ForCausalLM") if head == "score" else named
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{where}: architecture {named} is not supported; one of {', '.join(ARCHITECTURES)}")
    has_score = named != architecture
    if has_score and (labels := num_labels(config)) != 1:
        raise ValueError(f"{where}: {named} with {labels} labels; a reward model has num_labels 1")
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} not found; expected a Hugging Face config")
    for key in REQUIRED:
        _number(config, key, where, whole=key != "rms_norm_eps")
    for key in COUNTS:
        if config.get(key):
            _number(config, key, where, whole=True)
    _refuse_unsupported(config, where)
    qkv_bias, qk_norm = ARCHITECTURES[architecture]
    heads = config["num_attention_heads"]
    if not config.get("head_dim") and config["hidden_size"] < heads:
        raise ValueError(
            f"{where}: hidden_size {config['hidden_size']} for {heads} heads; expected one each or more"
        )
    mixture, ffn = _mixture(architecture, config, where), config["intermediate_size"]
    if mixture is not None:
        ffn = config.get("moe_intermediate_size") or ffn
    return Family(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=ffn,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope=_rope(config, where),
        tied=head == "vocabulary" and bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        head=head,
        mixture=mixture,
        has_score=has_score,
        window=_window(config),
    )


def num_labels(config: dict[str, Any]) -> object:
    """As Hugging Face counts them: two, if nothing is said."""
    labels = config.get("id2label", "--")
    return config.get("num_labels", len(labels) if isinstance(labels, dict | str) else labels)


def _number(config: dict[str, Any], key: str, where: str, whole: bool = False) -> None:
    """Refuse a value that is no number above 0, or no whole one."""
    value = config[key]
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not 0 < value < LARGEST:
        what = "whole number" if whole else "number"
        raise ValueError(f"{where}: {key} {json.dumps(value, default=str)}; expected a {what} above 0")


def _mixture(architecture: str, config: dict[str, Any], where: str) -> Mixture | None:
    if architecture not in MIXTURES:
        return None
    # transformers 5 writes num_local_experts for both; older Qwen3-MoE folders have num_experts.
    experts = config.get("num_local_experts") or config.get("num_experts")
    chosen = config.get("num_experts_per_tok")
    if not experts or not chosen or not chosen <= experts:
        raise ValueError(
            f"{where}: num_experts_per_tok {chosen} of {experts} experts; expected a number of experts and "
            "at most as many for each token"
        )
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    if step != 1 or dense:
        raise ValueError(
            f"{where}: decoder_sparse_step {step} with mlp_only_layers {dense} is not supported; every layer "
            "must have experts"
        )
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "router_jitter_noise"):
        if config.get(key):
            raise ValueError(f"{where}: {key} {config[key]} is not supported")
    renormalised = architecture == "MixtralForCausalLM" or bool(config.get("norm_topk_prob", False))
    if renormalised and chosen == 1:
        raise ValueError(
            f"{where}: one expert of each token, with its probability renormalised to 1, leaves its router "
            "no gradient; not supported"
        )
    return Mixture(experts, chosen, renormalised, *MIXTURES[architecture])


def score_config(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a language model's folder, made that of a model with one score, for Hugging Face and
    vLLM."""
    ends = config.get("eos_token_id")
    padding = config.get("pad_token_id")
    return config | {
        "architectures": [family.architecture.replace("ForCausalLM", SCORED)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        # Hugging Face scores the last token that is not padding: were the end mark padding too, it would
        # score the token before it.
        "pad_token_id": None if padding in (ends if isinstance(ends, list) else [ends]) else padding,
    }


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {config['hidden_act']} is not supported; only silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{where}: {key} true is not supported")
    if config.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config: quantised weights cannot be trained; take the plain ones"
        )


def _window(config: dict[str, Any]) -> int | None:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return window if window and window < config["max_position_embeddings"] else None


def _rope(config: dict[str, Any], where: str) -> Rope:
    # transformers 5 writes rope_parameters; older folders have rope_theta beside an optional rope_scaling.
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: rope_parameters {json.dumps(fields)}; expected a mapping")
    stated = fields | {"rope_theta": fields.get("rope_theta") or config.get("rope_theta", 10000.0)}
    _number(stated, "rope_theta", where)
    theta = stated["rope_theta"]
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "default":
        return Rope(float(theta))
    if kind != "llama3":
        raise ValueError(f"{where}: rope type {kind} is not supported; default or llama3")
    for key in STRETCH:
        if key not in fields:
            raise ValueError(f"{where}: {key} not found in its rope_parameters, which are llama3's")
        _number(fields, key, where, whole=key.startswith("original"))
    stretch = (
        float(fields["factor"]),
        float(fields["low_freq_factor"]),
        float(fields["high_freq_factor"]),
        int(fields["original_max_position_embeddings"]),
    )
    return Rope(float(theta), stretch)
