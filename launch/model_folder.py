"""Whether a model's folder can be loaded, as far as its files tell unread.

Looks at config.json, for a tokenizer, and at the headers of the weights, whose tensors must be those that
config.json asks for. No torch.
"""

import json
from pathlib import Path
from typing import Any

from launch.demo_model import MODEL_DIR
from learner import families
from learner.config import ParallelConfig
from learner.families import Family, Head
from learner.slots import slots
from sync.expected import INDEX, NO_WEIGHT, damage, read_shapes, untied, weight_files

MADE_BY = {
    MODEL_DIR: "python -m launch.demo_model",
    Path("runs/sft/model"): "slipstream sft configs/sft.yaml",
    Path("runs/reward/model"): "slipstream reward configs/reward.yaml",
}
"""What writes the folders that the examples name."""
SCORING = "ForSequenceClassification"
"""How the name of a reward model's architecture ends."""
FLOATS = ("F32", "BF16", "F16", "F64")
"""Of safetensors' dtypes those that hold weights as they are; of quantised ones the scales lie elsewhere."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's attention on CPU computes; it would tell others a minute after the
start, in a traceback."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def trained(
    key: str,
    path: str,
    max_length: int,
    layout: ParallelConfig | None = None,
    head: Head = "vocabulary",
    tokenizer: bool = True,
    layout_key: str = "learner.parallel",
) -> list[str]:
    """What is wrong with a folder whose model the learner trains, in one line at most.

    Args:
        key: The setting that names it, for the line.
        path: The folder.
        max_length: Longest sequence it is to take, tokens.
        layout: How ranks share it; None where they run on another machine.
        head: What is trained on it.
        tokenizer: Whether its tokenizer is used.
        layout_key: The setting that the layout is.
    """
    fields, found = _config(key, path)
    found = found or _length(path, fields, max_length) or _weights(key, path)
    if found or (tokenizer and (found := _tokenizer(key, path))):
        return found
    try:
        family = families.read(path, head)
        family.check_length(max_length)
        if layout is not None:
            family.check_layout(layout, layout_key)
    except ValueError as error:
        return [f"{key}={path}: {str(error).removeprefix(f'{path}/')}"]
    return _shapes(key, path, family)


def served(key: str, path: str, max_length: int | None = None, scores: bool = False) -> list[str]:
    """What is wrong with a folder that vLLM alone is to serve: it knows more architectures than the learner.

    Args:
        key: As above.
        path: The folder.
        max_length: None leaves it unchecked.
        scores: Whether it is to score and not to generate.
    """
    fields, found = _config(key, path)
    if not found and not scores and _architecture(fields).endswith(SCORING):
        found = [f"{key}={path}: a reward model, which generates nothing; expected a language model"]
    if max_length is not None:
        found = found or _length(path, fields, max_length)
    return found or _weights(key, path) or _tokenizer(key, path) or _unlike(key, path, fields)


def same_words(key: str, path: str, other: str) -> list[str]:
    """Why a model could not read the token ids of another one's, in one line at most.

    Args:
        key: The setting that names it, for the line.
        path: Its folder.
        other: The other one's. What cannot be read is another check's, and a tokenizer of another kind than
            tokenizer.json is not compared.
    """
    known, asked = _words(path), _words(other)
    for word, number in asked.items():
        if (found := known.get(word, number)) != number:
            shown = json.dumps(word, ensure_ascii=False)
            return [
                f"{key}={path}: its tokenizer has {shown} as token {found}, and that of model.path={other} "
                f"as {number}; expected a model with the policy's tokenizer"
            ]
    return []


def _words(path: str) -> dict[str, int]:
    """Of a folder's tokenizer, by their ids."""
    try:
        told = json.loads((Path(path) / "tokenizer.json").read_text())
        words = told["model"]["vocab"]
        # Of a unigram model they lie in the ids' order, each with its score.
        found = words if isinstance(words, dict) else {word: i for i, (word, _) in enumerate(words)}
        return found | {token["content"]: token["id"] for token in told.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def longest(path: str) -> int | None:
    """Tokens that the model in a folder takes at most; None where its config.json does not tell."""
    found = _config("", path)[0].get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def shared(key: str, size: int, path: str) -> list[str]:
    """Why an engine's ranks could not share the model's attention heads, in one line at most.

    Args:
        key: Of the engine's section, for the line.
        size: Its `tensor_parallel`.
        path: The model's folder; one that cannot be read is another check's.
    """
    fields, _ = _config(key, path)
    heads = fields.get("num_attention_heads")
    groups = fields.get("num_key_value_heads", heads)
    if not isinstance(heads, int) or not isinstance(groups, int) or min(heads, groups) < 1:
        return []
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if size in fitting:
        return []
    return [
        f"{key}.tensor_parallel={size}: cannot share the {heads} attention heads and {groups} key-value "
        f"heads of the model in {path}; use one of {', '.join(map(str, fitting))}"
    ]


def heads_on_cpu(key: str, path: str) -> list[str]:
    """Why vLLM could not serve the model without a GPU, in one line at most.

    Args:
        key: The setting that names the folder, for the line.
        path: The folder; one that cannot be read is another check's.
    """
    fields, _ = _config(key, path)
    heads, hidden, size = (fields.get(k) for k in ("num_attention_heads", "hidden_size", "head_dim"))
    if size is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        size = hidden // heads
    why = unserved_on_cpu(size) if isinstance(size, int) else None
    return [f"{key}={path}: this machine has no GPU, and {why}"] if why else []


def unserved_on_cpu(head_size: int) -> str | None:
    """Why vLLM without a GPU has no attention for heads of this size; None if it has."""
    if head_size in CPU_HEADS:
        return None
    known = ", ".join(map(str, CPU_HEADS))
    return f"vLLM on CPU computes no attention heads of {head_size}, only those of {known}"


def _config(key: str, path: str) -> tuple[dict[str, Any], list[str]]:
    config = Path(path) / "config.json"
    if not config.is_file():
        command = MADE_BY.get(Path(path))
        made = f"; `{command}` makes it" if command else ""
        return {}, [f"{key}={path}: no config.json in it, expected a Hugging Face folder{made}"]
    try:
        fields = json.loads(config.read_text())
    except (ValueError, RecursionError) as error:
        return {}, [f"{key}={path}: config.json is not JSON: {error}"]
    if not isinstance(fields, dict):
        return {}, [f"{key}={path}: config.json is not a mapping, expected a Hugging Face folder"]
    return fields, []


def _architecture(fields: dict[str, Any]) -> str:
    named = fields.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _length(path: str, fields: dict[str, Any], max_length: int) -> list[str]:
    most = fields.get("max_position_embeddings")
    if isinstance(most, int) and max_length > most:
        return [f"model.max_length={max_length}: the model in {path} takes at most {most}"]
    return []


def _weights(key: str, path: str) -> list[str]:
    """What is wrong with the files of weights, each by itself."""
    folder = Path(path)
    try:
        files = weight_files(folder)
    except ValueError as error:
        return [f"{key}={path}: {error}"]
    if not files:
        return [f"{key}={path}: no weights in it, expected *.safetensors beside config.json"]
    if missing := [file.name for file in files if not file.is_file()]:
        return [f"{key}={path}: {missing[0]} is missing, which {INDEX} names; bring it here again"]
    damages = [found for file in files if (found := damage(file))]
    return [f"{key}={path}: {damages[0]}; bring it here again"] if damages else []


def _tokenizer(key: str, path: str) -> list[str]:
    if any((Path(path) / name).is_file() for name in TOKENIZERS):
        return []
    return [f"{key}={path}: no tokenizer in it, expected {' or '.join(TOKENIZERS)}"]


def _unlike(key: str, path: str, fields: dict[str, Any]) -> list[str]:
    """Where the weights are not what config.json asks for; of an architecture not known here nothing."""
    head: Head = "score" if _architecture(fields).endswith(SCORING) else "vocabulary"
    try:
        family = families.from_config(fields, path, head)
    except ValueError:
        return []
    return _shapes(key, path, family)


def _shapes(key: str, path: str, family: Family) -> list[str]:
    """The first tensor that is missing, of another shape or of no plain floats, or asked for by nobody."""
    found = read_shapes(Path(path))
    asked = {whole.name: whole.shape for slot in slots(family, ParallelConfig()) for whole in slot.whole}
    if not family.has_score:
        asked.pop("score.weight", None)  # made anew
    for name, shape in asked.items():
        if name not in found:
            return [
                f"{key}={path}: config.json asks for {name} {_shown(shape)}, which the weights do not have"
            ]
        dtype, size = found[name]
        if size != shape:
            return [
                f"{key}={path}: {name} is {_shown(size)} in the weights, and config.json asks for "
                f"{_shown(shape)}"
            ]
        if dtype not in FLOATS:
            return [f"{key}={path}: {name} is {dtype} in the weights; expected {', '.join(FLOATS)}"]
    if family.tied and (reason := untied(Path(path))):
        return [f"{key}={path}: {reason}"]
    extra = [n for n in found if n not in asked and n != "lm_head.weight" and not n.endswith(NO_WEIGHT)]
    if extra:
        return [f"{key}={path}: the weights have {extra[0]}, which config.json does not ask for"]
    return []


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
