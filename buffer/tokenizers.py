"""The tokenizer of a model folder."""

from pathlib import Path
from typing import Any

from buffer.cache import contents
from buffer.experiment import ConfigError

PARTS = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")
"""How the names of a tokenizer's files begin."""


def load_tokenizer(key: str, path: str) -> Any:
    """
    Args:
        key: The setting that names the folder, for messages.
        path: The folder.

    Raises:
        ConfigError: There is none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    if not (Path(path) / "config.json").exists():
        raise ConfigError(f"{key}: {path} has no config.json; expected a Hugging Face model folder")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of files that are none transformers may raise anything
        told = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"{key}: {path}: no tokenizer: {type(error).__name__}: {told}") from error


def tokenizer_digest(path: str) -> str:
    """Changes when a model folder's tokenizer or chat template does: the same rows are other tokens then.

    Raises:
        ValueError: A file of it cannot be read.
    """
    try:
        files = sorted(Path(path).iterdir())
        return contents(file for file in files if file.name.startswith(PARTS) and file.is_file())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
